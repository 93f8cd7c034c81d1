"""One of the three programs within another process: an actor's, or one that has them all."""

import asyncio
import contextvars
import importlib
from collections.abc import Callable
from typing import Any

from kvferry import process
from kvferry.errors import JoinRefused, KvferryError


async def run_within(module: str, arguments: list[str], on_state: Callable[[dict[str, Any]], object]) -> int:
    """Until it ends or is cancelled; returns the exit code that its process would have had. `on_state` is called from any thread."""
    program: Any = importlib.import_module(f"{module}.__main__")
    context = contextvars.copy_context()
    context.run(process.on_state.set, on_state)
    try:
        await asyncio.get_running_loop().create_task(program.serve(arguments), context=context)
    except (KvferryError, BaseExceptionGroup) as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if not isinstance(first, KvferryError):
            raise
        on_state({"state": "failed", "reason": first.message})
        return process.REFUSED_EXIT_CODE if isinstance(first, JoinRefused) else 2
    return 0
