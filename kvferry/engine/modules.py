"""Runs plans with transformers' own modules over the paged pool: any decoder whose attention goes through their interface.

Several sequences are packed into one row of tokens; the attention function (modules_attention.py) tells them apart. float32 on the CPU,
what the model was loaded in on a device. A step's rows are padded to MIN_ROWS. Made by `load_modules` (modules_load.py), which refuses
what it cannot run.
"""

import inspect
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from kvferry.engine.attention import paged_attention_operator
from kvferry.engine.device_attention import StepSpans, attend_on_device
from kvferry.engine.device_memory import DeviceMemory
from kvferry.engine.modules_attention import LayerCall, ModulesBatch
from kvferry.engine.modules_shape import ModulesShape
from kvferry.engine.packing import PackedChunks
from kvferry.engine.plan import Chunk, Plan, StepResult
from kvferry.engine.sampling import sample_rows
from kvferry.engine.scoring import score_chunks
from kvferry.engine.torch_memory import TorchMemory

MIN_ROWS = 5
"""A float32 product's rows have the same bits whatever their number from here up (measured with MKL); fewer are padded.

Of other dtypes and devices nothing of the kind is known, nor promised."""


class ModulesRunner:
    """A runner over a memory of `shape`, which lies where `model` does. That has the attention implementation `ATTENTION`."""

    def __init__(self, model: PreTrainedModel, shape: ModulesShape, memory: TorchMemory | DeviceMemory):
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
        packed = PackedChunks.of(chunks, self.memory.format.block_size)
        return self.forward(chunks, packed.last_rows(drawing).tolist(), self.memory)

    def all_logits(self, chunk: Chunk) -> npt.NDArray[np.float32]:
        """[tokens, vocabulary]: after each of the chunk's tokens."""
        return self.forward((chunk,), range(len(chunk.tokens)), self.memory)

    @torch.inference_mode()
    def forward(
        self,
        chunks: tuple[Chunk, ...],
        logit_rows: Sequence[int],
        memory: TorchMemory | DeviceMemory,
        on_call: Callable[[LayerCall], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Computes the chunks' KV into `memory`; returns the logits after `logit_rows` [len(logit_rows), vocabulary].

        Rows count over the tokens of all chunks, in order. `on_call` hears of each layer's attention.
        """
        packed = PackedChunks.of(chunks, memory.format.block_size)
        memory.begin_step(packed.table, packed.slots)
        try:
            return self._logits(packed, logit_rows, memory, on_call)
        finally:
            memory.end_step()  # also of one that failed: what it copied from the mirror is copied before a slot is another's

    def _logits(
        self,
        packed: PackedChunks,
        logit_rows: Sequence[int],
        memory: TorchMemory | DeviceMemory,
        on_call: Callable[[LayerCall], None] | None,
    ) -> npt.NDArray[np.float32]:
        device = memory.blocks.device
        lacking = max(MIN_ROWS - len(packed.tokens), 0)
        tokens, positions = (np.pad(one, (0, lacking)) for one in (packed.tokens, packed.positions))
        kept = [*logit_rows, *[0] * max(MIN_ROWS - len(logit_rows), 0)] if logit_rows else []
        output = self.model(
            input_ids=torch.from_numpy(tokens)[None].to(device, torch.long),
            position_ids=torch.from_numpy(positions)[None].to(device, torch.long),
            use_cache=False,
            kvferry_batch=_batch(packed, memory, on_call),
            **(
                dict(logits_to_keep=torch.tensor(kept, device=device, dtype=torch.long))
                if self._can_choose_rows
                else {}
            ),
        )
        logits = output.logits[0] if self._can_choose_rows else output.logits[0, kept]
        return logits[: len(logit_rows)].float().cpu().numpy()


def _batch(
    packed: PackedChunks, memory: TorchMemory | DeviceMemory, on_call: Callable[[LayerCall], None] | None
) -> ModulesBatch:
    slots, offsets = (
        torch.from_numpy(array).to(memory.blocks.device, torch.long) for array in (packed.slots, packed.offsets)
    )
    return ModulesBatch(memory, len(packed.tokens), slots, offsets, _attention(packed, memory), on_call)


def _attention(packed: PackedChunks, memory: TorchMemory | DeviceMemory) -> Callable[..., torch.Tensor]:
    numbers = (packed.begins, packed.positions[packed.begins[:-1]], packed.tables, packed.table)
    keys, values = memory.keys, memory.values
    if isinstance(memory, DeviceMemory):
        spans = StepSpans(*numbers, block_size=memory.format.block_size, device=memory.blocks.device)
        return lambda queries, layer, *how: attend_on_device(queries, keys, values, layer, spans, *how)
    tensors = [torch.from_numpy(array) for array in numbers]
    return lambda queries, layer, *how: paged_attention_operator(queries, keys, values, layer, *tensors, *how)
