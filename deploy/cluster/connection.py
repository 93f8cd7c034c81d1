"""Getting to a Ray cluster, or starting one on this machine: in bounded time, and with a reason when it cannot be.

From a node of the cluster this process is a driver of it. From anywhere else it is a Ray Client (ray://), which can call what runs
there, and no more: nodes and their room cannot be seen from it.
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

from deploy.cluster.tokens import refused, show_token
from kvferry.errors import ConfigurationError

REACH_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 30.0
CLIENT_TIMEOUT_S = 45.0
"""For a Ray Client, whose cluster begins a process for it. Ray itself tries for 5 + 10 + 15 s, and more."""
STORE_BYTES = 256 * 1024 * 1024
"""Of a Ray that is started here: at most two frames of every fetch are in its store at a time."""


CLIENT_SCHEME = "ray://"
STILLBORN = "Starting Ray client server failed"
"""What a cluster says if the process that it begins for a client dies at once: of some forty, one did (Ray 2.60)."""
GCS_ADVICE = "Check the address that `ray start --head` printed, and that its port is open"
CLIENT_ADVICE = (
    "Check the head's address, and that its port for Ray Clients (10001, or that of `ray start --head --ray-client-server-port`) "
    "is open"
)


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError("this needs Ray: pip install 'kvferry[ray]'") from error
    return ray


def connect(address: str, namespace: str, needs_node: bool) -> None:
    """To the cluster at `address`: host:port, ray://host:port, or auto. Raises ConfigurationError."""
    address = _meant(address)
    if address.startswith(CLIENT_SCHEME):
        if needs_node:
            raise ConfigurationError(
                f"address {address!r}: this command looks at the cluster's nodes, which a Ray Client cannot. Run it on a node, "
                "with --address host:port (that of `ray start`) or auto, or send it there with `ray job submit`"
            )
        _connect_client(address, namespace)
        return
    reached = _address_of_this_machine() if address == "auto" else address
    if reached:
        _reach(reached, GCS_ADVICE)
    _init_bounded(f"the Ray cluster at {address}", CONNECT_TIMEOUT_S, address=address, namespace=namespace)


def _meant(address: str) -> str:
    """RAY_ADDRESS is what `auto` is, as Ray has it."""
    meant = os.environ.get("RAY_ADDRESS", "") or address if address == "auto" else address
    if "://" in meant and not meant.startswith(CLIENT_SCHEME):
        raise ConfigurationError(
            f"address {meant!r} is none of a Ray cluster: host:port of `ray start` on its nodes, ray://host:10001 elsewhere"
        )
    return meant


def _connect_client(address: str, namespace: str) -> None:
    what = f"the Ray cluster at {address}"
    import_ray()
    show_token()
    _reach(address.removeprefix(CLIENT_SCHEME), CLIENT_ADVICE)
    _greet(what, address.removeprefix(CLIENT_SCHEME))
    try:
        _init_bounded(what, CLIENT_TIMEOUT_S, address=address, namespace=namespace)
    except ConfigurationError as error:
        if STILLBORN not in error.message:
            raise
        _init_bounded(what, CLIENT_TIMEOUT_S, address=address, namespace=namespace)


def _greet(what: str, address: str) -> None:
    """A Ray Client that is turned away tries for half a minute, and does not say why."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import ray_client_pb2, ray_client_pb2_grpc

    channel: Any = init_grpc_channel(address)
    wire: Any = ray_client_pb2
    greeting = wire.ClusterInfoRequest(type=wire.ClusterInfoType.PING)
    try:
        ray_client_pb2_grpc.RayletDriverStub(channel).ClusterInfo(greeting, timeout=REACH_TIMEOUT_S)
    except grpc.RpcError as error:
        status: Any = error
        if status.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise refused(what, status.details()) from error
        raise ConfigurationError(
            f"no Ray Client server at {address}: {status.code().name}, {status.details()}. {CLIENT_ADVICE}"
        ) from error
    finally:
        channel.close()


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
        raise _reason("a Ray on this machine", error) from error


def restore_signals() -> None:
    """Ray puts a handler of its own in the place of SIGTERM's, which would end this process in disorder.

    On the main thread; any other has nothing to restore.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.getsignal(number) or signal.SIG_DFL)


def _init_bounded(what: str, timeout_s: float, **options: Any) -> None:
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
    if not is_done.wait(timeout_s):
        raise ConfigurationError(f"{what} does not answer within {timeout_s:g} s: is it Ray that listens there?")
    if failures:
        raise _reason(what, failures[0]) from failures[0]


def _init(**options: Any) -> None:
    ray = import_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def _address_of_this_machine() -> str:
    """What `auto` finds here, as `ray.init` does: it can then be tried in bounded time. Empty if there is none."""
    import_ray()
    from ray._private.services import canonicalize_bootstrap_address

    try:
        found: str = canonicalize_bootstrap_address("auto") or ""
    except (ConnectionError, ValueError):
        return ""
    return found


def _reach(address: str, advice: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigurationError(f"address {address!r} is not host:port. {advice}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error
        raise ConfigurationError(f"no Ray at {address}: {reason}. {advice}") from error


def _reason(what: str, error: BaseException) -> ConfigurationError:
    text = " ".join(str(error).split()) or type(error).__name__
    if "ersion mismatch" in text:
        return ConfigurationError(
            f"{what} runs other versions than this environment: {text}. Install the same Ray and Python here as there"
        )
    if "uthenticat" in text or "ailed to connect" in text:
        return refused(what, text)
    if "an't find a node" in text or "raylet" in text:
        return ConfigurationError(
            f"{what}: {text}. Run kvferry on one of its nodes, reach it by ray://, or send it there with `ray job submit`"
        )
    return ConfigurationError(f"cannot use {what}: {text}")
