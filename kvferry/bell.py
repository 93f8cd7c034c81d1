"""A bell: wakes everybody who waits on an event loop, once for each ring."""

import asyncio


class Bell:
    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def ring(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns at the next ring, or after the time. Rings while nobody waits are not remembered: check, then wait."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            if timeout_s is None:
                await future
            else:
                await asyncio.wait((future,), timeout=timeout_s)
        finally:
            if future in self._waiting:  # nobody rang
                self._waiting.remove(future)
