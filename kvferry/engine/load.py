"""From a checkpoint directory to an engine: checks, loads, sizes the pool, warms up."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from kvferry.engine.checkpoint import Tensors, read_config
from kvferry.engine.engine import Engine
from kvferry.engine.llama import Llama
from kvferry.engine.plan import Chunk, Draw, Plan
from kvferry.engine.torch_memory import TorchMemory
from kvferry.engine.torch_runner import TorchRunner
from kvferry.errors import ConfigurationError
from kvferry.worker.identity import WorkerIdentity

logger = logging.getLogger(__name__)

BLOCK_SIZES = (16, 32, 64)


def load_engine(
    directory: Path,
    kv_tokens: int,
    block_size: int = 16,
    context_tokens: int = 0,
    num_threads: int = 1,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Engine:
    """`kv_tokens` is the pool's size; `context_tokens` lowers the model's own limit if not 0. Raises ConfigurationError."""
    torch.set_num_threads(num_threads)
    if block_size not in BLOCK_SIZES:
        raise ConfigurationError(f"block size {block_size}: choose one of {', '.join(map(str, BLOCK_SIZES))}")
    config = read_config(directory)
    if context_tokens > config.context_tokens:
        raise ConfigurationError(
            f"context_tokens is {context_tokens}, but {directory}/config.json has max_position_embeddings "
            f"{config.context_tokens}: lower it, or leave it out"
        )
    if kv_tokens < block_size:
        raise ConfigurationError(f"kv_tokens is {kv_tokens}: a pool needs at least one block of {block_size} tokens")
    tensors = Tensors(directory)
    model = Llama(config, tensors, on_progress)
    num_slots = kv_tokens // block_size
    memory = TorchMemory(num_slots, config.num_layers, config.num_kv_heads, block_size, config.head_size)
    identity = WorkerIdentity(
        model_id=tensors.digest(
            "float32",
            str(config.raw.get("rope_parameters") or config.raw.get("rope_scaling")),
            str(config.raw.get("rope_theta")),
            str(config.norm_epsilon),
            str(block_size),
        ),
        fidelity="float32",
        numerics_id=_numerics_id(),
        block_size=block_size,
        block_bytes=memory.format.block_bytes,
        vocabulary_size=config.vocabulary_size,
        context_tokens=context_tokens or config.context_tokens,
    )
    runner = TorchRunner(model, memory)
    _warm_up(runner, num_slots, block_size)
    return Engine(identity, memory, runner, num_slots)


def _numerics_id() -> str:
    return f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}-float32-linear"


def _warm_up(runner: TorchRunner, num_slots: int, block_size: int) -> None:
    """One small step of each kind, so that the first request does not pay for it. It leaves only unsealed bytes behind."""
    draw = Draw(0.0, 0, 1.0, 0, 0, 0)
    count = min(block_size, num_slots * block_size)
    for length in (count, 1):
        runner.run(Plan(0, (Chunk(0, (0,) * length, 0, (1,), draw),)))
