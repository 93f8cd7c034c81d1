"""A deployment whose workers live in this process, on its event loop, each with a step thread of its own; the router stays a process.

What `--transport inproc` needs: a block goes from pool to pool in one copy, with no kernel between. One pool of processors for both
kinds of work, so the two get into each other's way as they do in a server without separate pools.
"""

import asyncio
import os

from deploy.local import MODULES, Child, LocalDeployment
from deploy.within import run_within


class OneProcessDeployment(LocalDeployment):
    """Use `running()`."""

    async def _live(self, child: Child) -> int:
        if child.role == "router":
            return await super()._live(child)
        child.num_starts += 1
        child.pid = os.getpid()
        self._set_state(child, "starting")
        loop = asyncio.get_running_loop()
        os.environ.update(self._environment)
        return await run_within(
            MODULES[child.role],
            self._arguments_of(child),
            lambda state: loop.call_soon_threadsafe(self._heard, child, state),
        )
