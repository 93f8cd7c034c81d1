"""What each of the three programs does as a process: secret, TLS, logs, signals, and telling a supervisor how far it is.

State goes to standard output, one JSON object a line (`{"state": "loading", "share": 0.4}`); logs go to standard error.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

from kvferry.config import home, is_loopback
from kvferry.errors import ConfigurationError, EngineLost, JoinRefused, KvferryError
from kvferry.rpc.links import TlsFiles

REFUSED_EXIT_CODE = 3
"""The worker was refused: starting it again unchanged is vain."""
ENGINE_LOST_EXIT_CODE = 4
"""Starting another one in the same process is vain."""


def _print_state(state: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(state), flush=True)


on_state: ContextVar[Callable[[dict[str, Any]], object]] = ContextVar("on_state", default=_print_state)
"""Who hears how far a program is: a supervisor at standard output, unless the program runs within another."""


def say_state(state: str, **details: Any) -> None:
    on_state.get()({"state": state, **details})


def read_secret(path: Path | None) -> str:
    """From `path`; without one, from KVFERRY_HOME, where it is made with mode 0600 if need be."""
    if path is None:
        path = home() / "secret"
        make_secret(path)
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigurationError(f"{path} can be read by others: run `chmod 600` on it")
        secret = path.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"cannot read the secret {path}: {error.strerror}") from error
    if not secret:
        raise ConfigurationError(f"the secret file {path} is empty")
    return secret


def make_secret(path: Path) -> None:
    """Unless it is there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return
    scratch = path.with_name(f".{path.name}-{os.getpid()}")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32))
    try:
        os.link(scratch, path)
    except FileExistsError:
        pass  # another process was faster: its secret counts
    finally:
        scratch.unlink()


def read_tls(config: Any) -> TlsFiles | None:
    """All three files or none; none is for loopback only."""
    paths = (config.tls_certificate, config.tls_key, config.tls_authority)
    if not any(paths):
        if not is_loopback(config.host):
            raise ConfigurationError(
                f"host {config.host} is not loopback: give --tls-certificate, --tls-key and --tls-authority, or use 127.0.0.1"
            )
        return None
    if not all(paths):
        raise ConfigurationError("give all of --tls-certificate, --tls-key and --tls-authority, or none")
    try:
        return TlsFiles(*(path.read_bytes() for path in paths))
    except OSError as error:
        raise ConfigurationError(f"cannot read a TLS file: {error}") from error


def set_up_logs(level: str, name: str) -> None:
    form = f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=form, stream=sys.stderr, force=True)
    for noisy in ("httpx", "asyncio", "grpc._cython.cygrpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def run_process(main: Coroutine[Any, Any, None], with_parent: bool) -> NoReturn:
    """Until `main` ends, a signal arrives, or (`with_parent`) standard input ends; then ends the process.

    At once, once everything is in order: a thread that hangs in a step must not keep the process.
    """
    code = 0
    try:
        asyncio.run(_until_stopped(main, with_parent))
    except BaseException as error:
        code = exit_code_of(error)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _until_stopped(main: Coroutine[Any, Any, None], with_parent: bool) -> None:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    if with_parent:
        threading.Thread(target=_watch_parent, args=(loop, task), daemon=True).start()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _watch_parent(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(task.cancel)


def exit_code_of(error: BaseException) -> int:
    """Says why, too."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, EngineLost):  # no failed start: the next process may do better
        logging.getLogger("kvferry").critical("%s", error.message)
        return ENGINE_LOST_EXIT_CODE
    if isinstance(error, KvferryError):
        say_state("failed", reason=error.message)
        logging.getLogger("kvferry").error("%s", error.message)
        return REFUSED_EXIT_CODE if isinstance(error, JoinRefused) else 2
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
    logging.getLogger("kvferry").critical("unexpected error", exc_info=error)
    say_state("failed", reason=repr(error))
    return 1
