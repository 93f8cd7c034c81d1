"""A deployment on this machine whose workers are actors of a Ray that is started for them; the router stays a process.

What `--transport ray` needs: blocks then go through the object store. Everything else is as in deploy/local.py.
"""

import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

from deploy.cluster.connection import import_ray, ray_here
from deploy.local import MODULES, Child, LocalDeployment

STORE_BYTES = 512 * 1024 * 1024
"""At most two frames of every fetch are in it at a time."""
SIGKILL_CODE = -9


class RayDeployment(LocalDeployment):
    """Use `running()`."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[LocalDeployment]:
        num_cpus = max(self.plan.num_prefill + self.plan.num_decode, 1)
        async with ray_here(num_cpus, f"kvferry-{os.getpid()}", STORE_BYTES), super().running() as deployment:
            yield deployment

    async def _live(self, child: Child) -> int:
        if child.role == "router":
            return await super()._live(child)
        from deploy.ray_actor import WorkerActor

        ray = import_ray()
        child.num_starts += 1
        self._set_state(child, "starting")
        name = f"{child.name}-{child.num_starts}"
        actor: Any = (
            ray.remote(WorkerActor)
            .options(name=name, num_cpus=1)
            .remote(MODULES[child.role], self._arguments_of(child), self._environment)
        )
        try:
            child.pid = await actor.pid.remote()
            ended = actor.run.remote()
            async for reference in actor.states.remote():
                self._heard(child, await reference)
            return await ended
        except ray.exceptions.RayError:
            return SIGKILL_CODE
        finally:
            ray.kill(actor)
