"""Whether a loaded model's whole state is in the paged pool, and its attention is what we compute: tried once, at start.

A layer that never calls the attention function (recurrent state), one that mixes the sequences of a step, one that keeps something
between steps, and a mask that is neither causal nor a sliding window are refused here, instead of mixing requests later. Uses a
memory of its own.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from kvferry.engine.device_memory import DeviceMemory
from kvferry.engine.modules import ModulesRunner
from kvferry.engine.modules_attention import ATTENTION, LayerCall, Mask
from kvferry.engine.plan import Chunk
from kvferry.engine.torch_memory import TorchMemory, name_of
from kvferry.errors import ConfigurationError

TOLERANCE = 1e-3
"""Of the largest logit: how far a packed, cut sequence may be from the same one alone, in float32."""
ROUNDINGS = 16
"""In 16 bits: so many times the dtype's epsilon. Both runs round each sum to half of it at most, but sum in another order; over some
hundred sums in a row they drift apart like a random walk, by ten roundings or so. Mixed sequences differ by the logits themselves."""
SHARE_COMPARED = 0.75
"""In 16 bits, of a sequence's rows: where two experts are all but equally wanted a rounding chooses, and such a row differs by much.
State that is lost between the two steps shows in two fifths of the rows."""
LENGTHS = (5, 17, 26)
"""Tokens of the sequences that are tried together."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One sequence that is tried, and its blocks."""

    tokens: tuple[int, ...]
    slots: tuple[int, ...]
    block_size: int

    @property
    def cut(self) -> int:
        """How many tokens the first of two steps computes."""
        return len(self.tokens) * 3 // 5

    def chunk(self, start: int, end: int) -> Chunk:
        return Chunk(0, self.tokens[start:end], start, self.slots[: -(-end // self.block_size)])


def check(runner: ModulesRunner) -> None:
    """Raises ConfigurationError, naming the layers where it can, if the model cannot be run."""
    try:
        _check(runner)
    except ConfigurationError as error:
        raise ConfigurationError(f"{runner.model.name_or_path}: {error.message}") from error
    except Exception as error:  # whatever a model raises that is used as it was not made for
        raise ConfigurationError(
            f"{runner.model.name_or_path}: {type(runner.model).__name__} does not run over paged attention: {error!r}"
        ) from error


def _check(runner: ModulesRunner) -> None:
    block_size = runner.memory.format.block_size
    trials = _trials(runner.shape.context_tokens, runner.shape.vocabulary_size, block_size)
    memory = _trial_memory(runner, trials)
    calls = list[LayerCall]()
    tokens = trials[-1].tokens
    runner.forward((trials[-1].chunk(0, len(tokens)),), [len(tokens) - 1], memory, calls.append)
    _check_calls(calls, runner.shape.num_layers)
    for call in calls:
        _check_mask(call, runner.shape.context_tokens, memory.blocks.device)
    _compare(_run_packed(runner, trials, memory), _run_alone(runner.model, trials), runner.model.dtype)


def _trials(context_tokens: int, vocabulary_size: int, block_size: int) -> list[Trial]:
    trials, free = list[Trial](), 1
    for number, length in enumerate(LENGTHS):
        tokens = tuple((7 + 29 * number + 13 * k) % vocabulary_size for k in range(min(length, context_tokens)))
        num_slots = -(-len(tokens) // block_size)
        trials.append(Trial(tokens, tuple(range(free, free + num_slots)), block_size))
        free += num_slots
    return trials


def _trial_memory(runner: ModulesRunner, trials: list[Trial]) -> TorchMemory | DeviceMemory:
    """Of the same kind as the runner's, with KV of the model's own dtype."""
    shape, block_size = runner.shape, runner.memory.format.block_size
    num_slots = sum(len(trial.slots) for trial in trials)
    sizes = (num_slots, shape.num_layers, shape.num_kv_heads, block_size, shape.head_size, name_of(runner.model.dtype))
    if isinstance(runner.memory, DeviceMemory):
        return DeviceMemory(*sizes, device=runner.memory.blocks.device)
    return TorchMemory(*sizes)


def _check_calls(calls: list[LayerCall], num_layers: int) -> None:
    counts = [0] * num_layers
    for call in calls:
        counts[call.layer] += 1
    silent = [number for number, count in enumerate(counts) if count == 0]
    if silent:
        raise ConfigurationError(
            f"layers {', '.join(map(str, silent))} never called the attention function: what they remember is not in "
            "the KV pool (recurrent state, or an attention of the model's own)"
        )
    often = [number for number, count in enumerate(counts) if count > 1]
    if often:
        raise ConfigurationError(
            f"layers {', '.join(map(str, often))} called the attention function more than once a step"
        )


def _check_mask(call: LayerCall, context_tokens: int, device: torch.device) -> None:
    """The rule that transformers would have masked by must be the window that the attention function was told, far out."""
    if call.mask is None:
        return
    if not isinstance(call.mask, Mask):
        raise ConfigurationError(
            f"layer {call.layer} has a mask of the model's own, which paged attention does not know"
        )
    zero = torch.zeros((1, 1), dtype=torch.long, device=device)
    rows = torch.arange(max(context_tokens - 2, 0), context_tokens, device=device)[:, None]
    columns = torch.arange(context_tokens, device=device)[None]
    wanted = columns <= rows
    if call.window:
        wanted &= columns > rows - call.window
    if not torch.equal(call.mask.sees(zero, zero, rows, columns).expand_as(wanted), wanted):
        raise ConfigurationError(
            f"layer {call.layer} masks otherwise than by a window of {call.window} tokens (0: none), "
            "which is what its attention function is told"
        )


def _run_packed(
    runner: ModulesRunner, trials: list[Trial], memory: TorchMemory | DeviceMemory
) -> list[npt.NDArray[np.float32]]:
    """Each trial's logits, all computed in two steps that they share, over memory that was never written."""
    memory.blocks.fill_(float("nan"))
    halves = [
        _step(runner, [trial.chunk(0, trial.cut) for trial in trials], memory),
        _step(runner, [trial.chunk(trial.cut, len(trial.tokens)) for trial in trials], memory),
    ]
    return [np.concatenate(parts) for parts in zip(*halves, strict=True)]


def _step(
    runner: ModulesRunner, chunks: list[Chunk], memory: TorchMemory | DeviceMemory
) -> list[npt.NDArray[np.float32]]:
    """The logits after each token, by chunk. They are asked for last row first: a model must heed which are wanted."""
    num_rows = sum(len(chunk.tokens) for chunk in chunks)
    logits = runner.forward(tuple(chunks), range(num_rows)[::-1], memory)[::-1]
    if logits.shape != (num_rows, runner.shape.vocabulary_size):
        raise ConfigurationError(
            f"the model's logits are {logits.shape}, not {num_rows} rows of vocab_size {runner.shape.vocabulary_size}"
        )
    return np.split(logits, np.cumsum([len(chunk.tokens) for chunk in chunks])[:-1])


@torch.inference_mode()
def _run_alone(model: PreTrainedModel, trials: list[Trial]) -> list[npt.NDArray[np.float32]]:
    """Each trial's logits by transformers' own attention, in a call of its own."""
    model.set_attn_implementation("eager")
    try:
        device = model.device
        return [
            model(input_ids=torch.tensor([trial.tokens], device=device), use_cache=False)
            .logits[0]
            .float()
            .cpu()
            .numpy()
            for trial in trials
        ]
    finally:
        model.set_attn_implementation(ATTENTION)


def _compare(got: list[npt.NDArray[np.float32]], expected: list[npt.NDArray[np.float32]], dtype: torch.dtype) -> None:
    is_exact = dtype == torch.float32
    tolerance, share = (TOLERANCE, 1.0) if is_exact else (ROUNDINGS * torch.finfo(dtype).eps, SHARE_COMPARED)
    for packed, alone in zip(got, expected, strict=True):
        differences, largest = abs(packed - alone).max(axis=1), float(abs(alone).max())
        difference = float(np.quantile(differences, share))
        if not difference <= tolerance * largest:  # not finite counts as different
            raise ConfigurationError(
                f"sequences that share a step are not computed as each alone: logits differ by {difference:.3g} "
                f"(the largest is {largest:.3g})"
            )
