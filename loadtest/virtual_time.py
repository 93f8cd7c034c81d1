"""An event loop whose clock jumps to the next timer whenever nothing is ready: hours of waiting in milliseconds, repeatably."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.BaseSelector):
    """Never sleeps: what the loop would sleep is added to its clock. Real sockets are not supported."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._selector.select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock: nothing is ready and no timer is set")
            self.now += max(timeout, 0)
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._selector.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._selector.unregister(fileobj)

    def get_map(self) -> Any:
        return self._selector.get_map()

    def close(self) -> None:
        self._selector.close()


class _NumberedTask(asyncio.Task[T]):
    """A task group cancels its tasks as a set has them: by where they lie in memory, were it not for this."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, T], **more: Any):
        self._number = number
        super().__init__(coroutine, **more)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._num_tasks = 0
        self.set_task_factory(self._numbered)

    def _numbered(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> _NumberedTask[Any]:
        self._num_tasks += 1
        return _NumberedTask(self._num_tasks, coroutine, loop=loop, **more)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]], limit_s: float = 3600.0) -> T:
    """Runs `main()` in virtual time; more than `limit_s` of it is a hang."""

    async def limited() -> T:
        async with asyncio.timeout(limit_s):
            return await main()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(limited())
