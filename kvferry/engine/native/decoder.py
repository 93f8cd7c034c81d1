"""A decoder of the Llama family whose step is two calls of `decoder.c`: all layers, then the output layer for the rows that want it.

Weights are packed once at loading, activations are float32. The same bits for a row whatever the batch, the cut of its prompt or the
number of threads, for every kind of weights. Knows nothing of sequences or scheduling.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kvferry.engine.native.family import DecoderConfig
from kvferry.engine.native.library import KINDS, PARTS, Batch, Library, Model, Shape, Spans
from kvferry.engine.native.weights import PackedWeights
from kvferry.engine.packing import PackedChunks
from kvferry.engine.plan import Chunk, Plan, StepResult
from kvferry.engine.sampling import sample_rows
from kvferry.engine.scoring import LOGIT_ROWS, score_chunks
from kvferry.engine.torch_memory import TorchMemory

SCRATCH_PER_NUMBER = 2
"""Bytes: bfloat16's two; int8's one, and eight for each group of 32 or 64."""
ROUNDING_KINDS = ("bfloat16", "int8")
"""Of weights: activations are rounded for them, and over bfloat16 KV for attention, too."""


class NativeRunner:
    """A runner over a `TorchMemory`. `rope` is cosine and sine, [positions, head size]."""

    def __init__(
        self,
        library: Library,
        config: DecoderConfig,
        weights: PackedWeights,
        rope: tuple[torch.Tensor, torch.Tensor],
        memory: TorchMemory,
        kind: str,
        num_threads: int,
    ):
        self._library, self._config, self._memory = library, config, memory
        self._num_threads, self._weights, self._rope = num_threads, weights, rope
        self.window = config.window
        self._scratch: dict[str, npt.NDArray[np.uint8]] = {}
        self._kept: Any = None
        self.part_seconds: npt.NDArray[np.float64] = np.zeros(len(PARTS))
        """Spent in each of PARTS, over all steps."""
        c, block = config, memory.format.block_size
        self._shape = Shape(
            c.num_layers,
            c.num_heads,
            c.num_kv_heads,
            c.head_size,
            block,
            c.window,
            memory.format.dtype == "bfloat16",
            memory.format.dtype == "bfloat16" and kind in ROUNDING_KINDS,
            c.head_size**-0.5,
        )
        cosine, sine = rope
        self._model = Model(
            c.hidden_size,
            c.intermediate_size,
            c.vocabulary_size,
            KINDS[kind],
            c.norm_epsilon,
            self._shape,
            cosine.data_ptr(),
            sine.data_ptr(),
            weights.norm,
            weights.output_layer,
            weights.layers,
        )

    def run(self, plan: Plan) -> StepResult:
        drawing = [chunk for chunk in plan.chunks if chunk.draw is not None]
        packed, batch = self._forward(plan.chunks)
        result = sample_rows(drawing, self._logits(batch, packed.last_rows(drawing)))
        return score_chunks(plan, result, lambda rows: self._logits(batch, rows), packed)

    def logits(self, chunks: tuple[Chunk, ...], drawing: list[Chunk]) -> npt.NDArray[np.float32]:
        """Computes the chunks' KV; returns the logits [len(drawing), vocabulary] after the last token of each of `drawing`."""
        packed, batch = self._forward(chunks)
        return self._logits(batch, packed.last_rows(drawing)).copy()

    def all_logits(self, chunk: Chunk) -> npt.NDArray[np.float32]:
        """[tokens, vocabulary]: after each of the chunk's tokens."""
        _, batch = self._forward((chunk,))
        return self._logits(batch, np.arange(len(chunk.tokens), dtype=np.int32)).copy()

    def _forward(self, chunks: tuple[Chunk, ...]) -> tuple[PackedChunks, Any]:
        """The chunks, and the batch with their hidden states, good until the next call."""
        c, packed = self._config, PackedChunks.of(chunks, self._memory.format.block_size)
        assert packed.positions.max() < len(self._rope[0]), "schedulers keep to the context"
        rows = len(packed.tokens)
        hidden = F.embedding(torch.from_numpy(packed.tokens), self._weights.embedding).float().contiguous()
        queries = c.num_heads * c.head_size
        widest = max(queries + 2 * c.num_kv_heads * c.head_size, 2 * c.intermediate_size, c.hidden_size)
        most = max(rows, LOGIT_ROWS)
        spans = Spans(
            len(chunks),
            self._num_threads,
            *(array.ctypes.data for array in (packed.positions, packed.begins, packed.tables, packed.table)),
            self._memory.blocks.data_ptr(),
        )
        inner = max(c.hidden_size, c.intermediate_size, queries)
        batch = Batch(
            rows=rows,
            spans=spans,
            slots=packed.slots.ctypes.data,
            offsets=packed.offsets.ctypes.data,
            hidden=hidden.data_ptr(),
            normed=self._buffer("normed", most * c.hidden_size * 4),
            projected=self._buffer("projected", most * widest * 4),
            attended=self._buffer("attended", rows * queries * 4),
            gated=self._buffer("gated", rows * c.intermediate_size * 4),
            seconds=self.part_seconds.ctypes.data,
            quantized=self._buffer("quantized", most * inner * SCRATCH_PER_NUMBER),
        )
        self._library.forward(ctypes.byref(self._model), ctypes.byref(batch))
        self._kept = packed, hidden  # `batch` points into them
        return packed, batch

    def _logits(self, batch: Any, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Of some rows of the last `_forward`, good until the next call; in slices that bound the scratch."""
        vocabulary = self._config.vocabulary_size
        if len(rows) <= LOGIT_ROWS:  # in memory that is there already
            self._buffer("logits", len(rows) * vocabulary * 4)
            logits = self._scratch["logits"].view(np.float32)[: len(rows) * vocabulary].reshape(len(rows), vocabulary)
        else:
            logits = np.empty((len(rows), vocabulary), np.float32)
        for begin in range(0, len(rows), LOGIT_ROWS):
            part = np.ascontiguousarray(rows[begin : begin + LOGIT_ROWS])
            batch.logit_rows, batch.logit_row = len(part), part.ctypes.data
            batch.logits = logits[begin : begin + LOGIT_ROWS].ctypes.data
            self._library.output(ctypes.byref(self._model), ctypes.byref(batch))
        return logits

    def _buffer(self, name: str, size: int) -> int:
        """Scratch that only grows."""
        known = self._scratch.get(name)
        if known is None or known.size < size:
            known = self._scratch[name] = np.empty(-(-size // 4) * 4, np.uint8)
        return known.ctypes.data
