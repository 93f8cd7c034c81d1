"""One of the three programs within another process: an actor's, or one that has them all."""

import asyncio
import contextvars
import importlib
from collections.abc import Callable
from typing import Any

from kvferry import process


async def run_within(module: str, arguments: list[str], on_state: Callable[[dict[str, Any]], object]) -> int:
    """Until it ends or is cancelled; returns the exit code that its process would have had. `on_state` is called from any thread."""
    program: Any = importlib.import_module(f"{module}.__main__")
    context = contextvars.copy_context()
    context.run(process.on_state.set, on_state)
    try:
        await asyncio.get_running_loop().create_task(program.serve(arguments), context=context)
    except Exception as error:  # the program's, whatever it is: a process would have ended with it
        return context.run(process.exit_code_of, error)
    return 0
