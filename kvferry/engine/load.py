"""From a checkpoint directory to an engine: checks, loads, sizes the pool, warms up.

On the CPU the Llama family runs in the native decoder; whatever it cannot run, or where it cannot be had, goes through transformers'
modules. Another device than the CPU is load_device.py's.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
from transformers import PretrainedConfig

from kvferry.engine.checkpoint import Tensors, read_config
from kvferry.engine.device import device_called
from kvferry.engine.device_memory import DeviceMemory
from kvferry.engine.engine import WARM_UP_TOKENS, Engine
from kvferry.engine.modules_shape import ModulesShape, modules_shape
from kvferry.engine.native.attention import use_native_attention
from kvferry.engine.native.decoder import NativeRunner
from kvferry.engine.native.family import DecoderConfig, NotNative, decoder_config, rope_tables
from kvferry.engine.native.library import Library, load_library
from kvferry.engine.native.weights import BeyondFloat16, PackedWeights
from kvferry.engine.plan import GREEDY, Chunk, Draw, Plan, Runner
from kvferry.engine.roofline import StepCosts
from kvferry.engine.torch_memory import TorchMemory
from kvferry.errors import ConfigurationError
from kvferry.shape import BYTES_PER_NUMBER, cpu_kv
from kvferry.worker.identity import WorkerIdentity

logger = logging.getLogger(__name__)

BLOCK_SIZES = (16, 32, 64)
WEIGHTS = ("float32", "float16", "bfloat16", "int8", "auto")
KV_DTYPES = ("float32", "bfloat16")
IRRELEVANT = (
    "transformers_version",
    "_name_or_path",
    "architectures",
    "dtype",
    "use_cache",
    "token_id",
    "initializer_range",
    "dropout",
    "pretraining_tp",
)
"""Parts of the names of a configuration's fields that no KV depends on."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How a checkpoint is loaded, besides which one."""

    kv_tokens: int
    """The pool's size; on a device 0 stands for what fits."""
    block_size: int = 16
    context_tokens: int = 0
    """Lowers the model's own limit if not 0."""
    num_threads: int = 1
    weights: str = "float32"
    kv: str = "float32"
    """What the pool keeps. auto: float32; on a device what the weights are."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    runner: Runner
    weights: str
    """How they are kept."""
    numerics: str
    """What decides its bits, besides."""
    activations: str = ""
    """Said of those that are coarser than the CPU's with such weights, since the KV is."""


def load_engine(
    directory: Path, settings: EngineSettings, on_progress: Callable[[float], None] = lambda share: None
) -> Engine:
    """Raises ConfigurationError."""
    if settings.device != "cpu":
        from kvferry.engine.load_device import load_on_device  # transformers' modelling code takes seconds to import

        return load_on_device(directory, settings, device_called(settings.device), on_progress)
    settings = replace(settings, kv=cpu_kv(settings.kv))
    torch.set_num_threads(settings.num_threads)
    config = read_config(directory)
    shape = modules_shape(directory, config)
    check_choices(settings, KV_DTYPES)
    check_sizes(directory, shape, settings)
    tensors = Tensors(directory)
    num_slots = settings.kv_tokens // settings.block_size
    memory = TorchMemory(
        num_slots, shape.num_layers, shape.num_kv_heads, settings.block_size, shape.head_size, settings.kv
    )
    library = load_library()
    loaded = _load_runner(directory, config, tensors, memory, library, settings, on_progress)
    return make_engine(config, shape, settings, tensors, memory, loaded)


def make_engine(
    config: PretrainedConfig,
    shape: ModulesShape,
    settings: EngineSettings,
    tensors: Tensors,
    memory: TorchMemory | DeviceMemory,
    loaded: LoadedRunner,
) -> Engine:
    """Warmed up."""
    runner, weights = loaded.runner, loaded.weights
    identity = WorkerIdentity(
        model_id=tensors.digest(*_what_kv_depends_on(config, settings, f"{weights}{loaded.activations}")),
        fidelity=settings.kv,
        numerics_id=f"{loaded.numerics}-{weights}",
        block_size=settings.block_size,
        block_bytes=memory.format.block_bytes,
        vocabulary_size=shape.vocabulary_size,
        context_tokens=settings.context_tokens or shape.context_tokens,
        window=runner.window if isinstance(runner, NativeRunner) else 0,
    )
    kv_bytes = memory.format.block_bytes // settings.block_size
    costs = StepCosts.of(
        config, tensors.num_weights(), shape.num_layers, shape.head_size, weights, kv_bytes, identity.window
    )
    most = min(identity.context_tokens, WARM_UP_TOKENS)
    tokens_per_s = _warm_up(runner, memory.num_slots, settings.block_size, most)
    return Engine(identity, memory, runner, memory.num_slots, costs, tokens_per_s)


def _load_runner(
    directory: Path,
    config: PretrainedConfig,
    tensors: Tensors,
    memory: TorchMemory,
    library: Library | None,
    settings: EngineSettings,
    on_progress: Callable[[float], None],
) -> LoadedRunner:
    try:
        if library is None:
            raise NotNative("the C decoder cannot be had here")
        decoder = decoder_config(config, settings.block_size)
        rope = rope_tables(config, _num_positions(config, settings))
        kind, weights = _pack(library, decoder, directory, tensors, settings.weights, on_progress)
        runner = NativeRunner(library, decoder, weights, rope, memory, kind, settings.num_threads)
        return LoadedRunner(runner, kind, f"decoder.c-{library.key}")
    except NotNative as reason:
        if settings.weights not in ("float32", "auto"):
            message = f"weights {settings.weights!r} need the native decoder, and {reason}: use float32"
            raise ConfigurationError(f"{directory}: {message}") from reason
        logger.warning(
            "%s runs through transformers' modules (%s): slower, and its bits may depend on the company that a sequence has",
            directory.name,
            reason,
        )
        from kvferry.engine.modules_load import load_modules  # transformers' modelling code takes seconds to import

        use_native_attention(library, settings.num_threads)
        attention = library.key if library else "reference"
        processor = f"{torch.backends.cpu.get_cpu_capability()}-threads-{settings.num_threads}"
        numerics = f"modules-torch-{torch.__version__}-{processor}-{attention}"
        return LoadedRunner(load_modules(directory, config, memory, on_progress), "float32", numerics)


def _pack(
    library: Library,
    decoder: DecoderConfig,
    directory: Path,
    tensors: Tensors,
    wanted: str,
    on_progress: Callable[[float], None],
) -> tuple[str, PackedWeights]:
    """`auto` is float16, half the traffic at a loss that can hardly be measured, unless a weight does not fit into it."""
    if wanted != "auto":
        return wanted, PackedWeights(library, decoder, tensors, wanted, on_progress)
    try:
        return "float16", PackedWeights(library, decoder, tensors, "float16", on_progress)
    except BeyondFloat16 as error:
        logger.warning("%s", error.message)
    return "float32", PackedWeights(library, decoder, Tensors(directory), "float32", on_progress)


def _num_positions(config: PretrainedConfig, settings: EngineSettings) -> int:
    """Positions that a sequence in this pool can have."""
    limit = settings.context_tokens or int(config.max_position_embeddings)
    return min(limit, settings.kv_tokens) + 1


def check_choices(settings: EngineSettings, kv_dtypes: tuple[str, ...]) -> None:
    """Raises ConfigurationError."""
    for name, value, known in (
        ("weights", settings.weights, WEIGHTS),
        ("kv", settings.kv, kv_dtypes),
        ("block size", settings.block_size, BLOCK_SIZES),
    ):
        if value not in known:
            raise ConfigurationError(f"{name} {value!r}: choose one of {', '.join(map(str, known))}")


def check_sizes(directory: Path, shape: ModulesShape, settings: EngineSettings) -> None:
    """Raises ConfigurationError."""
    context, pool = settings.context_tokens, settings.kv_tokens
    if context > shape.context_tokens:
        raise ConfigurationError(
            f"context_tokens is {context}, but {directory}/config.json has max_position_embeddings "
            f"{shape.context_tokens}: lower it, or leave it out"
        )
    if pool < settings.block_size:
        raise ConfigurationError(
            f"kv_tokens is {pool}: a pool needs at least one block of {settings.block_size} tokens"
        )
    if context and pool // settings.block_size * settings.block_size < context:
        size = token_bytes(shape, settings.kv)
        raise ConfigurationError(
            f"context_tokens is {context}, but the pool holds {pool} tokens: one such request needs {context} x {size:,} "
            f"bytes = {context * size:,} bytes, the pool has {pool * size:,}; raise kv_tokens or lower context_tokens"
        )


def token_bytes(shape: ModulesShape, kv: str) -> int:
    """KV of one token."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * BYTES_PER_NUMBER[kv]


def _what_kv_depends_on(config: PretrainedConfig, settings: EngineSettings, kind: str) -> tuple[str, ...]:
    """Besides the tensors: all of the configuration that is not about files, versions, text or training."""
    known = {name: value for name, value in config.to_dict().items() if not any(part in name for part in IRRELEVANT)}
    return (kind, str(settings.block_size), json.dumps(known, sort_keys=True, default=str))


def _warm_up(runner: Runner, num_slots: int, block_size: int, max_tokens: int) -> float:
    """A large chunk and small steps, so that no request pays for the first ones. They leave only unsealed bytes behind.

    Returns the large one's tokens per second: the second time, since the first one pays.
    """
    most, began = min(num_slots * block_size, max_tokens), 0.0
    for length in (most, min(block_size, most), 1, most):
        slots = tuple(range(1, 1 + -(-length // block_size)))
        began = perf_counter()
        runner.run(Plan(0, (Chunk(0, (0,) * length, 0, slots, Draw(GREEDY)),)))
    return most / (perf_counter() - began)
