"""What a checkpoint's config.json says to a `ModulesRunner`: sizes, and whether its KV can be paged and cached by prefix at all.

Reads no weights. What is known not to work is refused here, naming the file and the field; what only running can show is left to
modules_check.py.
"""

from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from kvferry.errors import ConfigurationError

LAYER_KINDS = ("full_attention", "sliding_attention")
"""Layers whose whole state is one key and one value a token and KV head."""
MUST_BE_UNSET = {
    "kv_lora_rank": "its KV is compressed (MLA), which the pool's layout cannot hold",
    "num_kv_shared_layers": "some layers read the KV of others",
    "is_encoder_decoder": "it has an encoder",
    "use_bidirectional_attention": "it sees later tokens",
    "quantization_config": "its weights are quantized",
}
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads", "swa_num_key_value_heads")
HEAD_SIZES = ("head_dim", "v_head_dim", "global_head_dim", "swa_head_dim", "swa_v_head_dim")


@dataclass(frozen=True, slots=True)
class ModulesShape:
    """What sizes the block memory, and bounds tokens and positions."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    vocabulary_size: int
    context_tokens: int


def modules_shape(directory: Path, config: PretrainedConfig) -> ModulesShape:
    """Raises ConfigurationError if the architecture is one that cannot be run."""
    path = directory / "config.json"
    text = config.get_text_config(decoder=True)
    for part in (config, text):
        _refuse_fields(path, part)
    _refuse_layers(path, text)
    num_heads = _number(path, text, "num_attention_heads")
    return ModulesShape(
        num_layers=_number(path, text, "num_hidden_layers"),
        num_kv_heads=_uniform(path, text, KV_HEADS) or num_heads,
        head_size=_uniform(path, text, HEAD_SIZES) or _number(path, text, "hidden_size") // num_heads,
        vocabulary_size=_number(path, text, "vocab_size"),
        context_tokens=_number(path, text, "max_position_embeddings"),
    )


def _refuse_fields(path: Path, config: PretrainedConfig) -> None:
    for name, why in MUST_BE_UNSET.items():
        value = getattr(config, name, None)
        if value:
            shown = value if isinstance(value, (bool, int, str)) else "set"
            raise ConfigurationError(f"{path}: {name} is {shown}: a model cannot be run if {why}")
    if getattr(config, "is_causal", True) is False:
        raise ConfigurationError(f"{path}: is_causal is False: a model cannot be run if it sees later tokens")


def _refuse_layers(path: Path, config: PretrainedConfig) -> None:
    for number, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in LAYER_KINDS:
            raise ConfigurationError(
                f"{path}: layer_types has {kind!r} for layer {number}; layers that are run: {', '.join(LAYER_KINDS)}"
            )


def _number(path: Path, config: PretrainedConfig, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value <= 0:
        raise ConfigurationError(f"{path}: field {name!r} is {value!r}, but a decoder needs a number there")
    return value


def _uniform(path: Path, config: PretrainedConfig, names: tuple[str, ...]) -> int | None:
    """The one value that all of `names` have over all layers, if any has one."""
    layers = list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]
    found: dict[int, str] = {}
    for layer in layers:
        for name in names:
            value = getattr(layer, name, None) or ()
            for each in value if isinstance(value, (list, tuple)) else (value,):
                found.setdefault(int(each), name)
    if len(found) > 1:
        shown = ", ".join(f"{name} {value}" for value, name in found.items())
        raise ConfigurationError(f"{path}: {shown}: the pool needs the same in all layers, for keys and for values")
    return next(iter(found), None)
