"""A Llama decoder whose whole step is one call of `decoder.c`: weights packed once at loading, activations float32.

The same bits for a row whatever the batch, the cut of its prompt or the number of threads. Weights are kept as float32 or, at half the
traffic, as float16 (converted on the fly, summed in float32). Knows nothing of sequences or scheduling.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.engine.checkpoint import LlamaConfig, Tensors
from kvferry.engine.llama import load_layer, rope_tables
from kvferry.engine.native.library import Batch, Layer, Library, Model
from kvferry.engine.plan import Chunk, Plan, StepResult
from kvferry.engine.sampling import sample_rows
from kvferry.engine.torch_memory import TorchMemory

VECTOR = 16


def can_run(config: LlamaConfig, block_size: int) -> bool:
    """Sizes that the kernels are made for."""
    widths = (config.hidden_size, config.intermediate_size, config.head_size, block_size)
    return all(width % VECTOR == 0 for width in widths) and config.num_heads % config.num_kv_heads == 0


class NativeRunner:
    """A runner over a `TorchMemory`."""

    def __init__(
        self,
        library: Library,
        config: LlamaConfig,
        tensors: Tensors,
        memory: TorchMemory,
        weights: str,
        num_threads: int,
        on_progress: Callable[[float], None] = lambda share: None,
    ):
        self._library, self._config, self._memory = library, config, memory
        self._is_half, self._num_threads = weights == "float16", num_threads
        self._kept: list[Any] = []
        self._scratch: dict[str, npt.NDArray[np.float32]] = {}
        self._model = self._load(tensors, on_progress)

    def run(self, plan: Plan) -> StepResult:
        drawing = [chunk for chunk in plan.chunks if chunk.draw is not None]
        logits = self.logits(plan.chunks, drawing)
        return sample_rows(drawing, logits)

    def logits(self, chunks: tuple[Chunk, ...], drawing: list[Chunk]) -> npt.NDArray[np.float32]:
        """Computes the chunks' KV; returns the logits [len(drawing), vocabulary] after the last token of each of `drawing`."""
        lengths = [len(chunk.tokens) for chunk in chunks]
        begins = np.cumsum([0, *lengths], dtype=np.int32)
        ends = {id(chunk): int(end) - 1 for chunk, end in zip(chunks, begins[1:], strict=True)}
        return self._step(chunks, begins, np.array([ends[id(chunk)] for chunk in drawing], np.int32))

    def all_logits(self, chunk: Chunk) -> npt.NDArray[np.float32]:
        """[tokens, vocabulary]: after each of the chunk's tokens."""
        count = len(chunk.tokens)
        return self._step((chunk,), np.array([0, count], np.int32), np.arange(count, dtype=np.int32))

    def _step(
        self, chunks: tuple[Chunk, ...], begins: npt.NDArray[np.int32], logit_rows: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float32]:
        c, size, rows = self._config, self._memory.format.block_size, int(begins[-1])
        tokens = np.concatenate([np.array(chunk.tokens, np.int32) for chunk in chunks])
        positions = np.concatenate([np.arange(k.start, k.start + len(k.tokens), dtype=np.int32) for k in chunks])
        tables = np.cumsum([0, *(len(chunk.slots) for chunk in chunks)], dtype=np.int32)
        table = np.concatenate([np.array(chunk.slots, np.int32) for chunk in chunks])
        span_of_row = np.repeat(np.arange(len(chunks), dtype=np.int32), np.diff(begins))
        slots = table[tables[span_of_row] + positions // size]
        offsets = (positions % size).astype(np.int32)
        logits = np.empty((len(logit_rows), c.vocabulary_size), np.float32)
        queries = c.num_heads * c.head_size
        widest = max(queries + 2 * c.num_kv_heads * c.head_size, 2 * c.intermediate_size, c.hidden_size)
        kept = [tokens, positions, slots, offsets, begins, tables, table, logit_rows]
        batch = Batch(
            rows,
            len(chunks),
            len(logit_rows),
            self._num_threads,
            *(array.ctypes.data for array in kept),
            self._memory.blocks.data_ptr(),
            logits.ctypes.data,
            self._buffer("hidden", rows * c.hidden_size),
            self._buffer("normed", max(rows, len(logit_rows)) * c.hidden_size),
            self._buffer("projected", max(rows, len(logit_rows)) * widest),
            self._buffer("attended", rows * queries),
            self._buffer("gated", rows * c.intermediate_size),
        )
        self._library.step(ctypes.byref(self._model), ctypes.byref(batch))
        return logits

    def _buffer(self, name: str, size: int) -> int:
        """Scratch that only grows."""
        known = self._scratch.get(name)
        if known is None or known.size < size:
            known = self._scratch[name] = np.empty(size, np.float32)
        return known.ctypes.data

    # --------------------------------------------------------------------------------------------------------- loading

    def _load(self, tensors: Tensors, on_progress: Callable[[float], None]) -> Model:
        c = self._config
        embedding = tensors.take("model.embed_tokens.weight", c.vocabulary_size, c.hidden_size)
        head = embedding if c.is_tied else tensors.take("lm_head.weight", c.vocabulary_size, c.hidden_size)
        layers = (Layer * c.num_layers)()
        for number in range(c.num_layers):
            loaded = load_layer(tensors, c, number)
            layers[number] = Layer(
                self._keep(loaded.input_norm),
                self._pack(loaded.query_key_value),
                self._pack(loaded.output),
                self._keep(loaded.post_norm),
                self._pack(loaded.gate_up),
                self._pack(loaded.down),
            )
            on_progress((number + 1) / c.num_layers)
        norm = tensors.take("model.norm.weight", c.hidden_size)
        tensors.refuse_extra({"lm_head.weight"} if c.is_tied else set())
        cosine, sine = rope_tables(c)
        self._kept.append(layers)
        return Model(
            c.hidden_size,
            c.intermediate_size,
            c.num_layers,
            c.num_heads,
            c.num_kv_heads,
            c.head_size,
            c.vocabulary_size,
            self._memory.format.block_size,
            self._is_half,
            c.norm_epsilon,
            self._keep(embedding),
            self._keep(cosine),
            self._keep(sine),
            self._keep(norm),
            self._pack(head),
            ctypes.addressof(layers),
        )

    def _keep(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _pack(self, weight: torch.Tensor) -> int:
        out, inner = weight.shape
        panels = -(-out // self._library.panel_width)
        packed = np.empty(panels * self._library.panel_width * inner, np.float16 if self._is_half else np.float32)
        weight = weight.contiguous()
        self._library.pack(weight.data_ptr(), out, inner, self._is_half, packed.ctypes.data)
        self._kept.append(packed)
        return packed.ctypes.data
