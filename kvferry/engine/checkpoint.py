"""A checkpoint directory: its configuration, checked, and its tensors, mapped from safetensors.

What cannot be run is refused here, at once, naming file and field. Pickled checkpoints are never opened.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open

from kvferry.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The fields of a Llama checkpoint's config.json that its arithmetic depends on."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary_size: int
    context_tokens: int
    norm_epsilon: float
    is_tied: bool
    raw: dict[str, Any]
    """All of config.json: transformers computes the RoPE from it."""


MUST_BE = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
}
ROPE_KINDS = ("default", "linear", "llama3")
"""Kinds whose table depends on the position alone."""


def read_config(directory: Path) -> LlamaConfig:
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigurationError(f"{path} is missing: --model takes a Hugging Face checkpoint directory")
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    if raw.get("model_type") != "llama":
        raise ConfigurationError(f"{path}: model_type is {raw.get('model_type')!r}; this version runs 'llama' only")
    for name, allowed in MUST_BE.items():
        if raw.get(name, allowed[0]) not in allowed:
            raise ConfigurationError(f"{path}: {name} is {raw[name]!r}; this version runs {allowed[0]!r} only")
    kind = rope_kind(raw)
    if kind not in ROPE_KINDS:
        raise ConfigurationError(
            f"{path}: rope type {kind!r} is not run (known: {', '.join(ROPE_KINDS)}); kinds whose KV depends on a later "
            "length, as dynamic NTK, cannot be cached by prefix"
        )
    try:
        heads = int(raw["num_attention_heads"])
        return LlamaConfig(
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_size=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
            vocabulary_size=int(raw["vocab_size"]),
            context_tokens=int(raw["max_position_embeddings"]),
            norm_epsilon=float(raw["rms_norm_eps"]),
            is_tied=bool(raw.get("tie_word_embeddings", False)),
            raw=raw,
        )
    except KeyError as error:
        raise ConfigurationError(f"{path}: field {error.args[0]!r} is missing") from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{path}: a field is not a number: {error}") from error


def rope_kind(raw: dict[str, Any]) -> str:
    """Old configurations say `rope_scaling`, new ones `rope_parameters`; the kind is `rope_type` or `type`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return scaling.get("rope_type") or scaling.get("type") or "default"


class Tensors:
    """The tensors of a checkpoint, by name, read when asked for, each at most once."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._files = self._find_files()
        self._left = set(self._files)

    def _find_files(self) -> dict[str, Path]:
        index, single = self._directory / "model.safetensors.index.json", self._directory / "model.safetensors"
        if index.is_file():
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            files = {name: self._directory / file for name, file in weight_map.items()}
            for path in set(files.values()):
                if not path.is_file():
                    raise ConfigurationError(f"{path} is missing, but {index.name} names it")
            return files
        if not single.is_file():
            raise ConfigurationError(f"{single} is missing: kvferry reads safetensors only (never .bin or .pt)")
        try:
            with safe_open(str(single), "pt") as file:
                return dict.fromkeys(file.keys(), single)
        except Exception as error:  # safetensors raises its own, undocumented kinds
            raise ConfigurationError(f"{single} is not a safetensors file: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """In float32, of exactly that shape."""
        if name not in self._files:
            raise ConfigurationError(f"{self._directory}: tensor {name} is missing")
        with safe_open(str(self._files[name]), "pt") as file:
            tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigurationError(
                f"{self._files[name]}: tensor {name} has shape {tuple(tensor.shape)}, config.json asks for {shape}"
            )
        self._left.discard(name)
        return tensor.float()

    def refuse_extra(self, ignored: set[str]) -> None:
        """Every tensor must have been taken: an unknown one means another architecture."""
        extra = sorted(name for name in self._left - ignored if not name.endswith("rotary_emb.inv_freq"))
        if extra:
            raise ConfigurationError(
                f"{self._directory}: unknown tensors, the first is {extra[0]} ({len(extra)} in all)"
            )

    def digest(self, *settings: str) -> str:
        """Over every tensor's name, dtype, shape and bytes, and `settings`: 32 hexadecimal digits."""
        digest = xxhash.xxh3_128()
        for setting in settings:
            digest.update(setting.encode() + b"\0")
        for name, tensor in self._all():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data)
        return digest.hexdigest()

    def _all(self) -> Iterator[tuple[str, torch.Tensor]]:
        by_file: dict[Path, list[str]] = {}
        for name, path in sorted(self._files.items()):
            by_file.setdefault(path, []).append(name)
        for path in sorted(by_file):
            with safe_open(str(path), "pt") as file:
                for name in by_file[path]:
                    yield name, file.get_tensor(name)
