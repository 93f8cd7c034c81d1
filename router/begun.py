"""A coroutine that begins at once, in its caller's turn of the event loop; another task awaits what is left of it.

A task of its own would begin a turn later, after all that the caller still does (from Python 3.12 on, asyncio has eager tasks for
this). Only for coroutines that do not ask before their first wait which task they run in.
"""

from collections.abc import Coroutine
from typing import Any


class Begun:
    """Await it once, or close it. What the coroutine raises before its first wait, this raises when it is made."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]):
        self._coroutine = coroutine
        self._waits_for: Any = None
        self._is_done = self._has_told = False
        try:
            self._waits_for = coroutine.send(None)
        except StopIteration:
            self._is_done = True

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> "Begun":
        return self

    def __next__(self) -> Any:
        """Whoever awaits this must first be told what the coroutine waits for already."""
        if self._is_done:
            raise StopIteration
        if self._has_told:
            return self._coroutine.send(None)
        self._has_told = True
        return self._waits_for

    def throw(self, error: BaseException) -> Any:
        """The task that awaits it was cancelled."""
        return self._coroutine.throw(error)

    def close(self) -> None:
        self._coroutine.close()
