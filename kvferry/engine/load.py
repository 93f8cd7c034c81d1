"""From a checkpoint directory to an engine: checks, loads, sizes the pool, warms up."""

from collections.abc import Callable
from pathlib import Path

import torch

from kvferry.engine.checkpoint import LlamaConfig, Tensors, read_config
from kvferry.engine.engine import Engine
from kvferry.engine.llama import Llama
from kvferry.engine.native.decoder import NativeRunner, can_run
from kvferry.engine.native.library import Library, load_library
from kvferry.engine.plan import GREEDY, Chunk, Draw, Plan, Runner
from kvferry.engine.torch_memory import TorchMemory
from kvferry.engine.torch_runner import TorchRunner
from kvferry.errors import ConfigurationError
from kvferry.worker.identity import WorkerIdentity

BLOCK_SIZES = (16, 32, 64)
WEIGHTS = ("float32", "float16")


def load_engine(
    directory: Path,
    kv_tokens: int,
    block_size: int = 16,
    context_tokens: int = 0,
    num_threads: int = 1,
    weights: str = "float32",
    on_progress: Callable[[float], None] = lambda share: None,
) -> Engine:
    """`kv_tokens` is the pool's size; `context_tokens` lowers the model's own limit if not 0. Raises ConfigurationError."""
    torch.set_num_threads(num_threads)
    config = read_config(directory)
    _check(directory, config, kv_tokens, block_size, context_tokens, weights)
    tensors = Tensors(directory)
    num_slots = kv_tokens // block_size
    memory = TorchMemory(num_slots, config.num_layers, config.num_kv_heads, block_size, config.head_size)
    library = load_library() if can_run(config, block_size) else None
    if library is None and weights != "float32":
        raise ConfigurationError(f"weights {weights!r} need the C decoder, which cannot be had here: use float32")
    if library is not None:
        runner = NativeRunner(library, config, tensors, memory, weights, num_threads, on_progress)
    else:
        runner = TorchRunner(Llama(config, tensors, on_progress), memory)
    identity = WorkerIdentity(
        model_id=tensors.digest(*_settings(config, block_size, weights)),
        fidelity="float32",
        numerics_id=_numerics_id(library, weights),
        block_size=block_size,
        block_bytes=memory.format.block_bytes,
        vocabulary_size=config.vocabulary_size,
        context_tokens=context_tokens or config.context_tokens,
    )
    _warm_up(runner, num_slots, block_size)
    return Engine(identity, memory, runner, num_slots)


def _check(
    directory: Path, config: LlamaConfig, kv_tokens: int, block_size: int, context_tokens: int, weights: str
) -> None:
    if weights not in WEIGHTS:
        raise ConfigurationError(f"weights {weights!r}: choose one of {', '.join(WEIGHTS)}")
    if block_size not in BLOCK_SIZES:
        raise ConfigurationError(f"block size {block_size}: choose one of {', '.join(map(str, BLOCK_SIZES))}")
    if context_tokens > config.context_tokens:
        raise ConfigurationError(
            f"context_tokens is {context_tokens}, but {directory}/config.json has max_position_embeddings "
            f"{config.context_tokens}: lower it, or leave it out"
        )
    if kv_tokens < block_size:
        raise ConfigurationError(f"kv_tokens is {kv_tokens}: a pool needs at least one block of {block_size} tokens")


def _settings(config: LlamaConfig, block_size: int, weights: str) -> tuple[str, ...]:
    """What, besides the tensors, makes the KV of a token what it is."""
    rope = config.raw.get("rope_parameters") or config.raw.get("rope_scaling")
    return (weights, str(rope), str(config.raw.get("rope_theta")), str(config.norm_epsilon), str(block_size))


def _numerics_id(library: Library | None, weights: str) -> str:
    if library is not None:
        return f"decoder.c-{library.level}-{weights}"
    return f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}-{weights}"


def _warm_up(runner: Runner, num_slots: int, block_size: int) -> None:
    """One small step of each kind, so that the first request does not pay for it. It leaves only unsealed bytes behind."""
    draw = Draw(GREEDY)
    count = min(block_size, num_slots * block_size)
    for length in (count, 1):
        runner.run(Plan(0, (Chunk(0, (0,) * length, 0, (1,), draw),)))
