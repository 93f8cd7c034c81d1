"""`python -m router`: the router as a process. `--help` lists its configuration."""

import asyncio
import contextlib
import gc
import socket
import sys

import uvicorn

from kvferry.config import RouterConfig, home, read_config
from kvferry.engine.unpack import find_model
from kvferry.errors import ConfigurationError
from kvferry.process import read_secret, read_tls, run_process, say_state, set_up_logs
from kvferry.rpc.links import GrpcDialer, add_registry_service, bind, new_server
from kvferry.text.model_text import ModelText
from router.admission import QueueLimits
from router.dispatcher import Dispatcher, DispatchLimits
from router.grpc_api import GrpcApi
from router.http_api import HttpApi
from router.index import PrefixIndex
from router.members import Members
from router.metrics import RouterMetrics
from router.placer import PlacingRules
from router.request_maker import Defaults, RequestMaker

STOP_TIMEOUT_S = 3.0


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


async def serve(arguments: list[str]) -> None:
    """Within another program, from the same flags: until cancelled. Raises ConfigurationError."""
    await serve_router(read_config(RouterConfig, arguments))


async def serve_router(config: RouterConfig) -> None:
    """Until cancelled. Raises ConfigurationError."""
    secret, tls = read_secret(config.secret_file), read_tls(config)
    directory = find_model(config.model, home())
    text = ModelText(directory)
    index = PrefixIndex()
    members = Members(config.name, text.sizes, index, config.silence_s)
    dialer = GrpcDialer(secret, 0, tls)
    dispatcher = Dispatcher(text, members, dialer, _limits(config), config.silence_s)
    maker = RequestMaker(text, dispatcher, Defaults(config.model_name or directory.name, config.default_temperature))
    grpc_api = GrpcApi(dispatcher, maker)

    registry_server, public_server = new_server(), new_server()
    add_registry_service(registry_server, members, secret)
    grpc_api.add_to(public_server)
    registry_port = bind(registry_server, config.host, config.registry_port, tls)
    grpc_port = bind(public_server, config.host, config.grpc_port)
    listener = _listen(config.host, config.port)
    app = HttpApi(dispatcher, maker, RouterMetrics(dispatcher)).app()
    http = _HttpServer(
        uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1, proxy_headers=False
        )
    )
    await registry_server.start()
    await public_server.start()
    say_state(
        "listening",
        http=f"{config.host}:{listener.getsockname()[1]}",
        grpc=f"{config.host}:{grpc_port}",
        registry=f"{config.host}:{registry_port}",
        model=maker.defaults.model_name,
    )
    serving = asyncio.ensure_future(http.serve(sockets=[listener]))
    gc.freeze()  # what is here by now (the vocabulary above all) stays: it is not looked through again and again
    gc.set_threshold(20_000, 20, 20)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(dispatcher.run())
            group.create_task(grpc_api.watch_health())
    finally:
        dispatcher.shut_down()  # each open stream says so to its client, and ends
        http.should_exit = True
        await asyncio.wait((serving,), timeout=STOP_TIMEOUT_S)
        await asyncio.gather(registry_server.stop(0.2), public_server.stop(1.0))
        await dialer.close()


def _limits(config: RouterConfig) -> DispatchLimits:
    def seconds(milliseconds: float) -> float:
        return milliseconds / 1000 or float("inf")

    return DispatchLimits(
        QueueLimits(config.max_queued, config.max_queued_tokens, config.max_queued_bytes),
        config.queue_timeout_s,
        config.request_timeout_s,
        config.reader_timeout_s,
        PlacingRules(config.policy, config.local_tokens, seconds(config.slo_ttft_ms), seconds(config.slo_tpot_ms)),
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Connections inherit it; asyncio sets it itself only where it made the socket. Without it each event would wait for the
        # client to acknowledge the one before.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        reason = f"cannot listen at {host}:{port}: {error.strerror}"
        raise ConfigurationError(f"{reason}; choose another --port, or 0 for any") from error


def main() -> int:
    try:
        config = read_config(RouterConfig)
    except ConfigurationError as error:
        print(error.message, file=sys.stderr)
        return 2
    set_up_logs(config.log_level, config.name)
    return run_process(serve_router(config), config.with_parent)


if __name__ == "__main__":
    sys.exit(main())
