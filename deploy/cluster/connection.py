"""Getting to a Ray cluster, or starting one on this machine: in bounded time, and with a reason when it cannot be.

Ray's token authentication stays as it is (on by default since 2.60): nothing here reads, makes or passes a token.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvferry.errors import ConfigurationError

REACH_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 30.0
STORE_BYTES = 256 * 1024 * 1024
"""Of a Ray that is started here: at most two frames of every fetch are in its store at a time."""


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError("this needs Ray: pip install 'kvferry[ray]'") from error
    return ray


def connect(address: str, namespace: str) -> None:
    """As a driver of the cluster at `address` (host:port, or auto). Raises ConfigurationError."""
    if "://" in address:
        raise ConfigurationError(
            f"address {address!r}: kvferry is no Ray client. Run it on a node of the cluster with --address host:port (that of "
            "`ray start`) or auto, or send it there with `ray job submit`"
        )
    reached = _address_of_this_machine() if address == "auto" else address
    if reached:
        _reach(reached)
    _init_bounded(f"the Ray cluster at {address}", address=address, namespace=namespace)


@contextlib.asynccontextmanager
async def ray_here(num_cpus: int, namespace: str, store_bytes: int = STORE_BYTES) -> AsyncIterator[None]:
    """A Ray of this machine alone, inside. Raises ConfigurationError.

    It begins and ends on a thread of its own that stays: with the thread that started them, the kernel ends Ray's processes.
    """
    thread, loop = ThreadPoolExecutor(1, "ray"), asyncio.get_running_loop()
    options = {"num_cpus": num_cpus, "namespace": namespace, "object_store_memory": store_bytes}
    try:
        await loop.run_in_executor(thread, _start_here, options)
        restore_signals()
        yield
    finally:
        await loop.run_in_executor(thread, import_ray().shutdown)
        thread.shutdown()


def _start_here(options: dict[str, Any]) -> None:
    try:
        _init(address="local", include_dashboard=False, **options)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(_reason("a Ray on this machine", error)) from error


def restore_signals() -> None:
    """Ray puts a handler of its own in the place of SIGTERM's, which would end this process in disorder.

    On the main thread; any other has nothing to restore.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.getsignal(number) or signal.SIG_DFL)


def _init_bounded(what: str, **options: Any) -> None:
    """On a thread that is given up when it takes too long: what listens at an address need not be a Ray."""
    failures, is_done = list[BaseException](), threading.Event()

    def init() -> None:
        try:
            _init(**options)
        except BaseException as error:
            failures.append(error)
        finally:
            is_done.set()

    threading.Thread(target=init, daemon=True).start()
    if not is_done.wait(CONNECT_TIMEOUT_S):
        raise ConfigurationError(
            f"{what} does not answer within {CONNECT_TIMEOUT_S:g} s: is it Ray's GCS that listens there?"
        )
    if failures:
        raise ConfigurationError(_reason(what, failures[0])) from failures[0]


def _init(**options: Any) -> None:
    ray = import_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def _address_of_this_machine() -> str:
    """What `auto` means here, in the order that `ray.init` has: it can then be tried in bounded time. Empty if there is none."""
    import_ray()
    from ray._private.services import canonicalize_bootstrap_address

    try:
        found: str = canonicalize_bootstrap_address("auto") or ""
    except (ConnectionError, ValueError):
        return ""
    return "" if "://" in found else found


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigurationError(f"address {address!r} is not host:port, as `ray start --head` prints it")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error
        raise ConfigurationError(
            f"no Ray at {address}: {reason}. Check the address that `ray start --head` printed, and that port {port} is open"
        ) from error


def _reason(what: str, error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if "ersion mismatch" in text:
        return (
            f"{what} runs other versions than this environment: {text}. Install the same Ray and Python here as there"
        )
    if "uthenticat" in text or "ailed to connect" in text:
        return f"cannot use {what}: {text}. {_token_words()}"
    if "an't find a node" in text or "raylet" in text:
        return f"{what}: {text}. Run kvferry on one of its nodes, or send it there with `ray job submit`"
    return f"cannot use {what}: {text}"


def _token_words() -> str:
    """To an address that a person names, Ray shows its token only if it is told to."""
    if os.environ.get("RAY_AUTH_MODE", "") == "token":
        return "RAY_AUTH_MODE is token: this user's token may not be the cluster's (`ray get-auth-token` shows which one is used)"
    return (
        "If the cluster wants a token, set RAY_AUTH_MODE=token; --address auto does that for a cluster of this machine"
    )
