"""Runs plans with transformers' own modules over the paged pool: any decoder whose attention goes through their interface.

Several sequences are packed into one row of tokens; the attention function (modules_attention.py) tells them apart. float32. A step's
rows are padded to MIN_ROWS. Made by `load_modules` (modules_load.py), which refuses what it cannot run.
"""

import inspect
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from kvferry.engine.modules_attention import LayerCall, ModulesBatch
from kvferry.engine.modules_shape import ModulesShape
from kvferry.engine.packing import PackedChunks
from kvferry.engine.plan import Chunk, Plan, StepResult
from kvferry.engine.sampling import sample_rows
from kvferry.engine.scoring import score_chunks
from kvferry.engine.torch_memory import TorchMemory

MIN_ROWS = 5
"""A float32 product's rows have the same bits whatever their number from here up (measured with MKL); fewer are padded."""


class ModulesRunner:
    """A runner over a `TorchMemory` of `shape`. `model` has the attention implementation `ATTENTION`."""

    def __init__(self, model: PreTrainedModel, shape: ModulesShape, memory: TorchMemory):
        self.model, self.shape, self.memory = model, shape, memory
        self._can_choose_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, plan: Plan) -> StepResult:
        drawing = [chunk for chunk in plan.chunks if chunk.draw is not None]
        packed = PackedChunks.of(plan.chunks, self.memory.format.block_size)
        scoring = [packed.rows_of(chunk, len(chunk.scoring.targets)) for chunk in plan.chunks if chunk.scoring]
        rows = np.concatenate([packed.last_rows(drawing), *scoring]).astype(np.int32)
        logits = self.forward(plan.chunks, rows.tolist(), self.memory)
        result = sample_rows(drawing, logits[: len(drawing)])
        place_of = {int(row): place for place, row in enumerate(rows)}
        return score_chunks(plan, result, lambda wanted: logits[[place_of[int(row)] for row in wanted]], packed)

    def logits(self, chunks: tuple[Chunk, ...], drawing: list[Chunk]) -> npt.NDArray[np.float32]:
        """Computes the chunks' KV; returns the logits [len(drawing), vocabulary] after the last token of each of `drawing`."""
        ends = np.cumsum([len(chunk.tokens) for chunk in chunks])
        last_rows = {id(chunk): int(end) - 1 for chunk, end in zip(chunks, ends, strict=True)}
        return self.forward(chunks, [last_rows[id(chunk)] for chunk in drawing], self.memory)

    def all_logits(self, chunk: Chunk) -> npt.NDArray[np.float32]:
        """[tokens, vocabulary]: after each of the chunk's tokens."""
        return self.forward((chunk,), range(len(chunk.tokens)), self.memory)

    @torch.inference_mode()
    def forward(
        self,
        chunks: tuple[Chunk, ...],
        logit_rows: Sequence[int],
        memory: TorchMemory,
        on_call: Callable[[LayerCall], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Computes the chunks' KV into `memory`; returns the logits after `logit_rows` [len(logit_rows), vocabulary].

        Rows count over the tokens of all chunks, in order. `on_call` hears of each layer's attention.
        """
        device = memory.blocks.device
        padding = [0] * max(MIN_ROWS - sum(len(chunk.tokens) for chunk in chunks), 0)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        positions = [position for chunk in chunks for position in _positions(chunk)]
        kept = [*logit_rows, *[0] * max(MIN_ROWS - len(logit_rows), 0)] if logit_rows else []
        output = self.model(
            input_ids=torch.tensor([tokens + padding], device=device),
            position_ids=torch.tensor([positions + padding], device=device),
            use_cache=False,
            kvferry_batch=_batch(chunks, memory, on_call),
            **(
                dict(logits_to_keep=torch.tensor(kept, device=device, dtype=torch.long))
                if self._can_choose_rows
                else {}
            ),
        )
        logits = output.logits[0] if self._can_choose_rows else output.logits[0, kept]
        return logits[: len(logit_rows)].float().cpu().numpy()


def _positions(chunk: Chunk) -> range:
    return range(chunk.start, chunk.start + len(chunk.tokens))


def _batch(chunks: tuple[Chunk, ...], memory: TorchMemory, on_call: Callable[[LayerCall], None] | None) -> ModulesBatch:
    size, device = memory.format.block_size, memory.blocks.device

    def numbers(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    rows = [(chunk.slots[position // size], position % size) for chunk in chunks for position in _positions(chunk)]
    return ModulesBatch(
        memory=memory,
        num_rows=len(rows),
        slots=numbers([slot for slot, _ in rows], torch.long),
        offsets=numbers([offset for _, offset in rows], torch.long),
        begins=numbers([0, *np.cumsum([len(chunk.tokens) for chunk in chunks]).tolist()]),
        starts=numbers([chunk.start for chunk in chunks]),
        tables=numbers([0, *np.cumsum([len(chunk.slots) for chunk in chunks]).tolist()]),
        table=numbers([slot for chunk in chunks for slot in chunk.slots]),
        on_call=on_call,
    )
