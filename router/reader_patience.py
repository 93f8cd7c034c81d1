"""How long a finished answer is kept for a reader that takes nothing of it.

While an answer grows, a slow reader costs no more than its journal. Once it is whole nothing else ends it: a client that neither reads
nor leaves would keep it for ever. Used by both front doors around the sending of one answer.
"""

import asyncio
from collections.abc import Sequence
from types import TracebackType

from router.live import Live


class ReaderPatience:
    """Ends its body with TimeoutError once all of `lives` have ended and `took_some` was not called for `limit_s`."""

    def __init__(self, lives: Sequence[Live], limit_s: float):
        self._lives, self._limit_s = lives, limit_s
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> "ReaderPatience":
        await self._timeout.__aenter__()
        for live in self._lives:
            live.at_end.append(self.took_some)
        self.took_some()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for live in self._lives:
            live.at_end.remove(self.took_some)
        await self._timeout.__aexit__(kind, error, trace)

    def took_some(self) -> None:
        """The reader has taken what was sent, or there is nothing more to come: its time begins anew."""
        if all(live.has_ended for live in self._lives) and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._limit_s)
