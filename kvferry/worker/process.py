"""A worker as a process: engine, gRPC server, membership. Both roles run through it."""

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from kvferry.config import DecodeConfig, WorkerConfig, home
from kvferry.engine.engine import Engine
from kvferry.engine.roofline import Ceilings, measure_ceilings, measure_device_ceilings
from kvferry.engine.unpack import make_model
from kvferry.kv.road import roads_called
from kvferry.process import read_secret, read_tls, say_state
from kvferry.racing import until_first
from kvferry.rpc.links import GrpcDialer, add_decode_service, add_fetch_service, bind, new_server
from kvferry.shape import cpu_kv, pool_tokens, read_checkpoint_shape, read_shape
from kvferry.streams import Dialer
from kvferry.worker.allocation import keep_freed_memory
from kvferry.worker.draining import Draining
from kvferry.worker.kept_executor import KeptExecutor
from kvferry.worker.loop import Executor, ThreadExecutor
from kvferry.worker.patience import FetchBudgets
from kvferry.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    engine: Engine
    executor: Executor
    ceilings: Ceilings


@dataclass(slots=True)
class WorkerHost:
    """Of a process that outlives its worker: the next one, of either role, takes over what this one has loaded."""

    loaded: Loaded | None = None
    loading: "asyncio.Future[Loaded] | None" = None
    """Of the worker that runs, or of one before it: a thread that loads cannot be ended, and nothing is loaded twice."""
    draining: Draining | None = None
    """Of the worker that runs."""


host: ContextVar[WorkerHost | None] = ContextVar("host", default=None)


async def _loaded_in(here: WorkerHost, config: WorkerConfig) -> Loaded:
    if here.loaded is not None:
        return here.loaded
    if here.loading is None:
        here.loading = asyncio.ensure_future(_load_into(here, config))
    return await asyncio.shield(here.loading)


async def _load_into(here: WorkerHost, config: WorkerConfig) -> Loaded:
    try:
        here.loaded = await _load_or_simulate(config)
        return here.loaded
    finally:
        here.loading = None


async def _load_or_simulate(config: WorkerConfig) -> Loaded:
    return await (_simulate(config) if config.engine == "sim" else _load(config))


async def _load(config: WorkerConfig) -> Loaded:
    from kvferry.engine.load import EngineSettings, load_engine

    directory = await asyncio.to_thread(make_model, config.model, home())
    settings = EngineSettings(
        kv_tokens=config.kv_tokens or _pool_tokens(config, directory),
        block_size=config.block_size,
        context_tokens=config.context_tokens,
        num_threads=config.threads,
        weights=config.weights,
        kv=config.kv,
        device=config.device,
    )
    engine = await asyncio.to_thread(
        load_engine, directory, settings, lambda share: say_state("loading", share=round(share, 2))
    )
    ceilings = await asyncio.to_thread(_ceilings, engine.costs.weights, config.device)
    return Loaded(engine, ThreadExecutor(engine.runner), ceilings)


def _pool_tokens(config: WorkerConfig, directory: Path) -> int:
    """0 on a device, which the engine asks what it has."""
    if config.device != "cpu":
        return 0
    available = psutil.virtual_memory().available
    return pool_tokens(read_checkpoint_shape(directory), available, num_pools=2, dtype=cpu_kv(config.kv))


def _ceilings(weights: str, device: str) -> Ceilings:
    return measure_ceilings(weights) if device == "cpu" else measure_device_ceilings(weights, device)


async def _simulate(config: WorkerConfig) -> Loaded:
    from kvferry.engine.sim import accelerator_called, sim_worker

    directory = await asyncio.to_thread(make_model, config.model, home())
    text, shape = read_checkpoint_shape(directory), read_shape(config.sim_shape)
    accelerator = await asyncio.to_thread(accelerator_called, config.sim_accelerator)
    context = config.context_tokens or min(text.context_tokens, shape.context_tokens)
    made = sim_worker(
        shape, accelerator, config.kv_tokens, config.block_size, context, vocabulary_size=text.vocabulary_size
    )
    logger.warning("simulated: the time of %s on %s, and no text that means anything", shape.name, accelerator.name)
    return Loaded(made.engine, made.executor, made.ceilings)


async def serve_worker(
    config: WorkerConfig,
    make: Callable[[Engine, Executor, Dialer, WorkerSettings], Any],
    is_process: bool = False,
) -> None:
    """Until cancelled. Raises ConfigurationError or JoinRefused. `is_process`: SIGTERM is this worker's; it drains before it ends."""
    keep_freed_memory()
    name = config.name or f"{config.role}-{socket.gethostname()}-{os.getpid()}"
    roads = roads_called(config.transport)
    secret, tls = read_secret(config.secret_file), read_tls(config)
    say_state("loading", share=0.0)
    here = host.get()
    loaded = await (_load_or_simulate(config) if here is None else _loaded_in(here, config))
    if here is not None:
        kept = KeptExecutor.of(loaded.executor)
        await kept.settle()
        here.loaded = loaded = replace(loaded, executor=kept)
    engine = loaded.engine
    block_bytes = engine.identity.block_bytes
    server = new_server(block_bytes)
    port = bind(server, config.host, config.port, tls)
    settings = WorkerSettings(
        worker_id=name,
        address=config.advertise or f"{config.host}:{port}",
        incarnation=secrets.token_hex(8),
        router_addresses=tuple(config.router),
        max_sequences=config.max_sequences if isinstance(config, DecodeConfig) else 64,
        step_target_s=config.step_target_s,
        itl_target_s=config.itl_target_ms / 1000 if isinstance(config, DecodeConfig) else 0.0,
        max_step_tokens=config.max_step_tokens,
        max_local_tokens=config.max_local_tokens if isinstance(config, DecodeConfig) else 0,
        max_warm=config.max_warm if isinstance(config, DecodeConfig) else 0,
        num_threads=config.threads,
        previous_end=config.previous_end,
        ceilings=loaded.ceilings,
        silence_s=config.silence_s,
        roads=roads,
        budgets=FetchBudgets(config.silence_s, config.fetch_queued_s, config.fetch_computing_s, config.fetch_sending_s),
    )
    dialer = GrpcDialer(secret, block_bytes, tls)
    worker = make(engine, loaded.executor, dialer, settings)
    worker.body.on_joined = lambda: say_state("ready")
    add_fetch_service(server, worker, secret)
    if hasattr(worker, "serve_attach"):
        add_decode_service(server, worker, secret)
    await server.start()
    block_size = engine.identity.block_size
    say_state(
        "listening",
        address=settings.address,
        name=name,
        pool_tokens=engine.num_slots * block_size,
        token_bytes=block_bytes // block_size,
    )
    draining = Draining(worker, config.drain_s)
    if here is not None:
        here.draining = draining
    if is_process:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, draining.begin)
    try:
        await until_first(worker.run(), draining.run())
    finally:
        await server.stop(0.2)
        await dialer.close()
