"""A worker as a Ray actor: the same program as the process, started from the same flags, with one method more for the object store.

Ray carries its life and, if chosen, blocks; tokens stay on gRPC between worker and router.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

from deploy.within import run_within
from kvferry import process
from kvferry.kv.roads.object_store import Shipment, shipments


class WorkerActor:
    """To be created with a name: readers find it by that."""

    def __init__(self, module: str, arguments: list[str], environment: dict[str, str]):
        """`module` is what `python -m` would start."""
        os.environ.update(environment)
        process.set_up_logs("info", module)
        self._module, self._arguments = module, arguments
        self._states: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def pid(self) -> int:
        return os.getpid()

    async def run(self) -> int:
        """Until the worker ends; returns the exit code that its process would have had."""
        loop = asyncio.get_running_loop()
        try:
            return await run_within(
                self._module,
                self._arguments,
                lambda state: loop.call_soon_threadsafe(self._states.put_nowait, state),
            )
        finally:
            loop.call_soon(self._states.put_nowait, None)

    async def states(self) -> AsyncIterator[dict[str, Any]]:
        """What the program says of itself, as it does on standard output as a process."""
        while (state := await self._states.get()) is not None:
            yield state

    async def ship_blocks(self, ticket: bytes) -> AsyncIterator[Shipment]:
        """Frames of one fetch, for the worker whose ticket it is."""
        async for shipment in shipments(ticket):
            yield shipment
