"""A bell: wakes everybody who waits on an event loop, once for each ring."""

import asyncio


class Bell:
    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    def ring(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
        self._future = None

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns at the next ring, or after the time. Rings while nobody waits are not remembered: check, then wait."""
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._future,), timeout=timeout_s)
