"""Calls of fetches that have ended, kept for the next one from the same source: to open one takes as long as to ask and be answered.

A call at rest has been *done* at both ends: the reader said so, the source gave up what it held for the fetch and answered. Whatever
came between is dropped. Few are kept for each channel, for a while; one that ends meanwhile is found out when it is asked for.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

from grpc import aio

from kvferry.rpc.frame_wire import DONE_DOWN, DONE_UP

REST_S = 10.0
ANSWER_S = 1.0
"""For the source to be done with a fetch too."""
MAX_CALLS = 4
"""Kept for one channel."""
MAX_DROPPED_BYTES = 64 * 1024
"""What a source may have sent beyond what its reader took; more of it is a stream that was not at its end."""

BROKEN = (aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError, TimeoutError)


class KeptCalls:
    def __init__(self) -> None:
        self._calls: dict[aio.Channel, list[Any]] = {}
        self._keeping: dict[Any, asyncio.Task[None]] = {}
        """By call, from the end of its fetch until it is taken or has ended."""

    def take(self, channel: aio.Channel) -> Any:
        """A call for the caller alone, or None."""
        while calls := self._calls.get(channel):
            call = calls[-1]
            self._remove(channel, call)
            self._keeping[call].cancel()
            if not call.done():
                return call
        return None

    def keep(self, channel: aio.Channel, call: Any, last_write: Awaitable[None]) -> None:
        """No read is under way."""
        keeping = self._keeping[call] = asyncio.ensure_future(self._keep(channel, call, last_write))
        keeping.add_done_callback(lambda _: self._keeping.pop(call, None))

    def forget(self, channel: aio.Channel) -> None:
        for call in self._calls.pop(channel, ()):
            self._keeping[call].cancel()
            call.cancel()

    async def close(self) -> None:
        for call, keeping in list(self._keeping.items()):
            keeping.cancel()
            call.cancel()
        await asyncio.gather(*self._keeping.values(), return_exceptions=True)

    async def _keep(self, channel: aio.Channel, call: Any, last_write: Awaitable[None]) -> None:
        if await _is_at_rest(call, last_write) and len(self._calls.get(channel, ())) < MAX_CALLS:
            self._calls.setdefault(channel, []).append(call)
            await asyncio.sleep(REST_S)
            self._remove(channel, call)
        call.cancel()

    def _remove(self, channel: aio.Channel, call: Any) -> None:
        calls = self._calls[channel]
        calls.remove(call)
        if not calls:
            del self._calls[channel]


async def _is_at_rest(call: Any, last_write: Awaitable[None]) -> bool:
    try:
        async with asyncio.timeout(ANSWER_S):
            await last_write
            await call.write(DONE_UP)
            num_bytes = 0
            while (message := await call.read()) != DONE_DOWN:
                if not isinstance(message, bytes) or (num_bytes := num_bytes + len(message)) > MAX_DROPPED_BYTES:
                    return False
    except BROKEN:
        return False
    return True
