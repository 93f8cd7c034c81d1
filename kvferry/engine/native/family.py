"""Which checkpoints the native decoder runs: the Llama family, and what differs within it.

Llama 2 and 3, Mistral (one window for all layers), Qwen2 and 2.5 (biases), Qwen3 (norms of queries and keys). Whatever else is
`NotNative`, with the reason, and runs through transformers' own modules.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

VECTOR = 16


class NotNative(Exception):
    """Why the native decoder cannot run it."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The fields of config.json that the decoder's arithmetic depends on."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary_size: int
    norm_epsilon: float
    is_tied: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    window: int
    """A position sees so many keys, its own among them; 0: all."""


FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
MUST_BE_FALSE = {
    "llama": ("attention_bias", "mlp_bias"),
    "mistral": (),
    "qwen2": ("use_sliding_window",),
    "qwen3": ("use_sliding_window", "attention_bias"),
}


def decoder_config(config: Any, block_size: int) -> DecoderConfig:
    """From transformers' configuration. Raises NotNative."""
    family = config.model_type
    if family not in FAMILIES:
        raise NotNative(f"model_type is {family!r}, the native decoder runs {', '.join(FAMILIES)}")
    for name in MUST_BE_FALSE[family]:
        if getattr(config, name, False):
            raise NotNative(f"{name} is true")
    if config.hidden_act != "silu":
        raise NotNative(f"hidden_act is {config.hidden_act!r}")
    if len(set(getattr(config, "layer_types", None) or ["all"])) > 1:
        raise NotNative("layer_types has layers of several kinds")
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        raise NotNative("partial_rotary_factor is not 1")
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    widths = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size, "head_dim": head_size}
    for name, width in {**widths, "block size": block_size}.items():
        if width % VECTOR:
            raise NotNative(f"{name} is {width}, not a multiple of {VECTOR}")
    kv_heads = config.num_key_value_heads or heads
    if heads % kv_heads:
        raise NotNative(f"{heads} heads do not divide among {kv_heads} KV heads")
    return DecoderConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        vocabulary_size=config.vocab_size,
        norm_epsilon=config.rms_norm_eps,
        is_tied=bool(config.tie_word_embeddings),
        has_qkv_bias=family == "qwen2",
        has_qk_norm=family == "qwen3",
        window=(config.sliding_window or 0) if family == "mistral" else 0,
    )


def rope_tables(config: Any, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, [positions, head size], bit for bit as transformers computes them for this configuration.

    Its frequencies, without the rotary module around them: that would import all of its modelling code, seconds of every start.
    """
    frequencies, scale = _frequencies(config)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    both_halves = torch.cat((angles, angles), dim=-1)
    return both_halves.cos() * scale, both_halves.sin() * scale


def _frequencies(config: Any) -> tuple[torch.Tensor, float]:
    kind = config.rope_parameters["rope_type"]
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config)
    plain = copy.deepcopy(config)
    plain.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": 1.0}
    return ROPE_INIT_FUNCTIONS["linear"](plain)
