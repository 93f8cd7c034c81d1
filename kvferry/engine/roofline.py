"""Operations and bytes of a step, and the two ceilings of the machine that it runs on.

After Williams, Waterman and Patterson, "Roofline" (CACM 2009): a step can be no faster than its operations at the matrix rate, nor than
its bytes at the memory bandwidth, whichever takes longer. Each weight is read once a step, each sequence's KV once; the output
layer counts for the rows that want logits. Knows no scheduler and no wire.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.engine.plan import Plan

BYTES_PER_WEIGHT = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0625}
"""int8 with a scale for each group of 64."""
MULTIPLY_ROUNDS, READ_NUMBERS = 1_000_000, 32 * 1024 * 1024
DEVICE_SIDE, DEVICE_NUMBERS, DEVICE_ROUNDS = 4096, 64 * 1024 * 1024, 16
"""Of the matrices that a device multiplies, and of the float32 numbers that it reads; so often that a start does not count."""


@dataclass(frozen=True, slots=True)
class Work:
    flops: float
    num_bytes: float

    def floor_s(self, ceilings: "Ceilings") -> float:
        return max(self.num_bytes / ceilings.bytes_per_s, self.flops / ceilings.flops_per_s)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a worker's threads reach on this machine. Zero where they were not measured."""

    flops_per_s: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a model's steps cost."""

    num_projection_weights: float
    """That each row is multiplied with; of experts, those that one row meets."""
    num_output_weights: float
    bytes_per_weight: float
    kv_bytes_per_token: float
    flops_per_key: float
    """Of attention: scores and values, for one row and one key, in all layers and heads."""
    window: int = 0
    """So many keys of a row are read at most; 0: all."""
    weights: str = "float32"
    """The kind that the matrix products have."""

    @staticmethod
    def of(
        config: Any,
        num_weights: dict[str, int],
        num_layers: int,
        head_size: int,
        weights: str,
        kv_bytes: int,
        window: int = 0,
    ) -> "StepCosts":
        text = config.get_text_config(decoder=True)
        output = text.vocab_size * text.hidden_size
        experts = sum(count for name, count in num_weights.items() if ".experts." in name)
        others = sum(count for name, count in num_weights.items() if ".experts." not in name)
        tables = ("embed", "lm_head", "wte", "wpe")
        others -= sum(count for name, count in num_weights.items() if any(table in name for table in tables))
        num_experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
        share = min((getattr(text, "num_experts_per_tok", None) or num_experts) / num_experts, 1.0)
        return StepCosts(
            num_projection_weights=others + experts * share,
            num_output_weights=output,
            bytes_per_weight=BYTES_PER_WEIGHT[weights],
            kv_bytes_per_token=kv_bytes,
            flops_per_key=4.0 * num_layers * text.num_attention_heads * head_size,
            window=window,
            weights=weights,
        )

    def of_plan(self, plan: Plan) -> Work:
        rows = num_logits = keys = context = 0
        for chunk in plan.chunks:
            length = len(chunk.tokens)
            rows += length
            num_logits += (chunk.draw is not None) + (len(chunk.scoring.targets) if chunk.scoring else 0)
            end = chunk.start + length
            window = self.window or end
            inside = min(max(window - chunk.start, 0), length)  # rows that see all that is before them
            keys += inside * chunk.start + inside * (inside + 1) // 2 + (length - inside) * window
            context += min(end, window - 1 + length)
        flops = 2 * (self.num_projection_weights * rows + self.num_output_weights * num_logits)
        weights = self.num_projection_weights + (self.num_output_weights if num_logits else 0)
        return Work(
            flops + self.flops_per_key * keys, weights * self.bytes_per_weight + context * self.kv_bytes_per_token
        )


class Throughput:
    """Operations and bytes per second while stepping: a running mean, in which a step counts by its time."""

    MEMORY_S = 5.0

    def __init__(self) -> None:
        self.flops_per_s = self.bytes_per_s = 0.0
        self._weight_s = 0.0

    def stepped(self, work: Work, duration_s: float) -> None:
        if duration_s <= 0:
            return
        kept_s = min(self._weight_s, self.MEMORY_S)
        self._weight_s = kept_s + duration_s
        self.flops_per_s = (self.flops_per_s * kept_s + work.flops) / self._weight_s
        self.bytes_per_s = (self.bytes_per_s * kept_s + work.num_bytes) / self._weight_s


def measure_ceilings(weights: str = "float32") -> Ceilings:
    """With torch's threads, as they are set, each at its best of five: multiply-adds for that kind of weights from registers
    alone, and a sum over 128 MiB. Without the C library a float32 product of 1024 rows, in torch, stands for the first."""
    import torch

    from kvferry.engine.native.library import KINDS, load_library

    data, num_threads = torch.ones(READ_NUMBERS), torch.get_num_threads()
    library = load_library()
    if library is None:
        left, right = torch.ones(1024, 1024), torch.ones(1024, 1024)
        return Ceilings(2 * 1024**3 / _best(lambda: left @ right), data.nbytes / _best(data.sum))
    address, count = data.data_ptr(), data.numel() // (64 * num_threads) * 64 * num_threads
    operations = library.multiply_much(KINDS[weights], MULTIPLY_ROUNDS, num_threads)
    seconds = _best(lambda: library.multiply_much(KINDS[weights], MULTIPLY_ROUNDS, num_threads))
    return Ceilings(operations / seconds, count * 4 / _best(lambda: library.read_much(address, count, num_threads)))


def measure_device_ceilings(
    weights: str, name: str, side: int = DEVICE_SIDE, num_numbers: int = DEVICE_NUMBERS
) -> Ceilings:
    """Of the torch device of that name: a square product in the weights' dtype, a sum of float32 numbers; each at its best of five."""
    import torch

    from kvferry.engine.device import synchronize
    from kvferry.engine.torch_memory import DTYPES

    device = torch.device(name)

    def seconds(work: Callable[[], object]) -> float:
        return _best(lambda: ([work() for _ in range(DEVICE_ROUNDS)], synchronize(device))) / DEVICE_ROUNDS

    left, right = torch.randn(2, side, side, device=device).to(DTYPES[weights])
    data = torch.ones(num_numbers, device=device)
    return Ceilings(2 * side**3 / seconds(lambda: left @ right), data.nbytes / seconds(data.sum))


def _best(work: Callable[[], object], times: int = 5) -> float:
    seconds: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
