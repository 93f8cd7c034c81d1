"""Runs a few coroutines together until the first of them ends: how each side of a stream sends, receives and shows life.

Not a task group, on purpose: there, a failure that meets a cancellation swallows it (Python before 3.13), and a loop that dials
again would never hear that it was cancelled. Here the first error is raised as it is, and a cancellation always wins.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def until_first(*coroutines: Coroutine[Any, Any, None], awaits_others: bool = True) -> None:
    """Returns when one returns, raises what one raises; the others are cancelled and awaited before.

    With `awaits_others` False, who returned is not kept waiting for that: the others hold nothing by then, and end by themselves.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    has_returned = False
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        has_returned = not any(task.cancelled() or task.exception() for task in done)
    finally:
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        if awaits_others or not has_returned:
            await ended
    for task in tasks:
        if task in done:
            task.result()
