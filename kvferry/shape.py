"""A model's shape and the arithmetic of its memory: KV bytes per token, per context, per number of requests, and weights.

KV per token = 2 x layers x KV heads x head size x bytes per number: one key and one value, in every layer. Pure; read from a
checkpoint's config.json or from the table of named shapes. No torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigurationError

BYTES_PER_NUMBER = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary_size: int
    context_tokens: int
    is_tied: bool = False
    has_qkv_bias: bool = False

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * BYTES_PER_NUMBER[dtype]

    @property
    def num_weights(self) -> int:
        """Of a decoder of the Llama family."""
        queries, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        attention = self.hidden_size * (2 * queries + 2 * keys) + (queries + 2 * keys if self.has_qkv_bias else 0)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocabulary_size * self.hidden_size * (1 if self.is_tied else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def weight_bytes(self, dtype: str) -> int:
        return self.num_weights * BYTES_PER_NUMBER[dtype]


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("llama-2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 4096),
        ModelShape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072),
        ModelShape("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, 131072),
        ModelShape("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, 131072, has_qkv_bias=True),
        ModelShape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, 8192, is_tied=True),
    )
}


def read_shape(model: str) -> ModelShape:
    """`model` is a named shape or a checkpoint directory. Raises ConfigurationError."""
    if model in SHAPES:
        return SHAPES[model]
    if not (Path(model) / "config.json").is_file():
        raise ConfigurationError(f"{model!r} is neither a checkpoint directory nor one of {', '.join(SHAPES)}")
    return read_checkpoint_shape(Path(model))


def read_checkpoint_shape(directory: Path) -> ModelShape:
    """Raises ConfigurationError."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigurationError(f"{path} is missing: --model takes a Hugging Face checkpoint directory or a GGUF file")
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        text: dict[str, Any] = raw.get("text_config") or raw
        heads, hidden = _first(text, "num_attention_heads", "n_head"), _first(text, "hidden_size", "n_embd")
        return ModelShape(
            name=directory.resolve().name,
            num_layers=_first(text, "num_hidden_layers", "n_layer"),
            hidden_size=hidden,
            intermediate_size=_first(text, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
            num_heads=heads,
            num_kv_heads=_first(text, "num_key_value_heads", default=heads),
            head_size=_first(text, "head_dim", default=hidden // heads),
            vocabulary_size=_first(text, "vocab_size"),
            context_tokens=_first(text, "max_position_embeddings", "n_positions", default=0),
            is_tied=bool(raw.get("tie_word_embeddings", False)),
            has_qkv_bias=bool(text.get("attention_bias", False)) or raw.get("model_type") == "qwen2",
        )
    except KeyError as error:
        raise ConfigurationError(f"{path}: field {error.args[0]!r} is missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


def _first(raw: dict[str, Any], *names: str, default: int | None = None) -> int:
    """Of the names that architectures have for it. Raises KeyError with the first if there is none, and no default."""
    found = next((raw[name] for name in names if raw.get(name) is not None), default)
    if found is None:
        raise KeyError(names[0])
    return int(found)


POOL_SHARE = 0.5
"""Of the memory that is available, for all pools of a machine together."""
MAX_POOL_BYTES = 4 * 1024**3


def pool_tokens(shape: ModelShape, available_bytes: int, num_pools: int, dtype: str = "float32") -> int:
    """Tokens that one of `num_pools` pools gets when nobody says how many."""
    budget = min(available_bytes * POOL_SHARE / max(num_pools, 1), MAX_POOL_BYTES)
    return max(int(budget) // shape.kv_bytes_per_token(dtype), 64)


def cpu_kv(kv: str) -> str:
    """What a pool on the CPU keeps: `auto` is float32 there."""
    return "float32" if kv == "auto" else kv


def human_bytes(count: float) -> str:
    """In binary units, three figures: 1,536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
