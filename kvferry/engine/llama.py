"""A Llama decoder over the paged pool: one step of mixed sequences, float32, on the CPU.

The arithmetic follows Touvron et al., "Llama 2" (2023), as transformers' LlamaForCausalLM writes it down: RMS norm, rotary positions
in the half-split form, grouped queries, SwiGLU. The query-key-value and gate-up projections are fused at loading. Knows
nothing of sequences' owners, sampling or scheduling.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import LlamaConfig as TransformersLlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvferry.engine.attention import Span, paged_attention
from kvferry.engine.checkpoint import LlamaConfig, Tensors
from kvferry.engine.torch_memory import TorchMemory

MIN_ROWS = 5
"""A float32 product's rows have the same bits whatever their number from here up (measured with MKL); fewer are padded."""


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    input_norm: torch.Tensor
    query_key_value: torch.Tensor
    output: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def load_layer(tensors: Tensors, config: LlamaConfig, number: int) -> LlamaLayer:
    """One layer of a checkpoint, with its projections fused."""
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size

    def take(name: str, *shape: int) -> torch.Tensor:
        return tensors.take(f"model.layers.{number}.{name}.weight", *shape)

    def fuse(*parts: tuple[str, int]) -> torch.Tensor:
        return torch.cat([take(name, size, config.hidden_size) for name, size in parts])

    return LlamaLayer(
        input_norm=take("input_layernorm", config.hidden_size),
        query_key_value=fuse(("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)),
        output=take("self_attn.o_proj", config.hidden_size, queries),
        post_norm=take("post_attention_layernorm", config.hidden_size),
        gate_up=fuse(("mlp.gate_proj", config.intermediate_size), ("mlp.up_proj", config.intermediate_size)),
        down=take("mlp.down_proj", config.hidden_size, config.intermediate_size),
    )


class Llama:
    """Weights in their final form, and the forward pass."""

    def __init__(
        self, config: LlamaConfig, tensors: Tensors, on_progress: Callable[[float], None] = lambda share: None
    ):
        self.config = config
        hidden, vocabulary = config.hidden_size, config.vocabulary_size
        self._embedding = tensors.take("model.embed_tokens.weight", vocabulary, hidden)
        self._layers = list[LlamaLayer]()
        for number in range(config.num_layers):
            self._layers.append(load_layer(tensors, config, number))
            on_progress((number + 1) / config.num_layers)
        self._norm = tensors.take("model.norm.weight", hidden)
        self._head = self._embedding if config.is_tied else tensors.take("lm_head.weight", vocabulary, hidden)
        tensors.refuse_extra({"lm_head.weight"} if config.is_tied else set())
        self._cosine, self._sine = rope_tables(config)

    def forward(self, batch: "Batch", memory: TorchMemory) -> torch.Tensor:
        """Writes the batch's KV into `memory` and returns its hidden states [rows, hidden], before the last norm."""
        c = self.config
        hidden = F.embedding(batch.tokens, self._embedding)
        cosine, sine = self._cosine[batch.positions][:, None], self._sine[batch.positions][:, None]
        split = [c.num_heads * c.head_size, c.num_kv_heads * c.head_size, c.num_kv_heads * c.head_size]
        rows = batch.num_rows
        for number, layer in enumerate(self._layers):
            normed = self._rms(hidden, layer.input_norm)
            query, key, value = F.linear(normed, layer.query_key_value).split(split, dim=-1)
            query = rotate(query.view(-1, c.num_heads, c.head_size), cosine, sine)
            key = rotate(key.view(-1, c.num_kv_heads, c.head_size), cosine, sine)
            memory.keys[batch.slots, number, :, :, batch.offsets] = key[:rows]
            memory.values[batch.slots, number, :, batch.offsets] = value.reshape(key.shape)[:rows]
            attended = torch.zeros_like(query)
            attended[:rows] = paged_attention(query[:rows], memory.keys, memory.values, number, batch.spans)
            hidden = hidden + F.linear(attended.flatten(1), layer.output)
            gate, up = F.linear(self._rms(hidden, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] of some rows of what `forward` returned."""
        rows = hidden.shape[0]
        return F.linear(self._rms(pad_rows(hidden), self._norm), self._head)[:rows]

    def _rms(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (self.config.hidden_size,), weight, self.config.norm_epsilon)


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's rows: `num_rows` real ones, then padding that is computed and thrown away."""

    tokens: torch.Tensor
    positions: torch.Tensor
    num_rows: int
    slots: torch.Tensor
    """[num_rows]: the slot that each row's KV goes to."""
    offsets: torch.Tensor
    """[num_rows]: its token's place within the block."""
    spans: list[Span]


def pad_rows(rows: torch.Tensor) -> torch.Tensor:
    lacking = MIN_ROWS - rows.shape[0]
    return rows if lacking <= 0 else torch.cat([rows, rows.new_zeros((lacking, *rows.shape[1:]))])


def rotate(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary positions, half-split form: [rows, heads, dim] by tables of [rows, 1, dim]."""
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat([-second, first], dim=-1) * sine


def rope_tables(config: LlamaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, [context, head size], as transformers computes them for this configuration."""
    rotary = LlamaRotaryEmbedding(TransformersLlamaConfig(**config.raw))
    positions = torch.arange(config.context_tokens)[None]
    cosine, sine = rotary(torch.zeros(1, dtype=torch.float32), positions)
    return cosine[0].contiguous(), sine[0].contiguous()
