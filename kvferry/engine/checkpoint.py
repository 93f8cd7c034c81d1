"""A checkpoint directory: its configuration, checked, and its tensors, mapped from safetensors.

What cannot be run is refused here, at once, naming file and field. Pickled checkpoints are never opened.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from kvferry.errors import ConfigurationError

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds whose table depends on the position and on the configuration alone."""


def read_config(directory: Path) -> PretrainedConfig:
    """transformers' configuration, defaults filled in. Raises ConfigurationError for what no engine here can run."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigurationError(f"{path} is missing: --model takes a Hugging Face checkpoint directory")
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        kind = raw.get("model_type")
    except (ValueError, AttributeError) as error:
        raise ConfigurationError(f"{path} is not a JSON object: {error}") from error
    _refuse_rope(path, raw.get("rope_scaling"))
    if kind not in CONFIG_MAPPING:
        raise ConfigurationError(f"{path}: model_type {kind!r} is unknown to the transformers installed here")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises many kinds, its validators their own
        raise ConfigurationError(f"{path}: transformers does not accept it: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigurationError(f"{path}: model_type {kind!r} is no language model that transformers can decode with")
    _refuse_rope(path, getattr(config.get_text_config(decoder=True), "rope_parameters", None))
    return config


def _refuse_rope(path: Path, parameters: Any) -> None:
    """The kind is `rope_type` or `type`; a dictionary of dictionaries has one for each kind of layer."""
    if not isinstance(parameters, dict):
        return
    for part in [one for one in parameters.values() if isinstance(one, dict)] or [parameters]:
        kind = part.get("rope_type") or part.get("type") or "default"
        if kind not in ROPE_KINDS:
            raise ConfigurationError(
                f"{path}: rope type {kind!r} is not run (known: {', '.join(ROPE_KINDS)}); kinds whose KV depends on a "
                "later length, as dynamic NTK and longrope, cannot be cached by prefix"
            )


class Tensors:
    """The tensors of a checkpoint, by name, read when asked for, each at most once."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._files = self._find_files()
        self._left = set(self._files)

    def _find_files(self) -> dict[str, Path]:
        index, single = self._directory / "model.safetensors.index.json", self._directory / "model.safetensors"
        if index.is_file() and not single.is_file():  # of both, transformers takes the single one, too
            try:
                weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
                files = {name: self._directory / file for name, file in weight_map.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigurationError(f"{index} has no readable weight_map: {error!r}") from error
            for path in set(files.values()):
                if not path.is_file():
                    raise ConfigurationError(f"{path} is missing, but {index.name} names it")
            return files
        if not single.is_file():
            raise ConfigurationError(f"{single} is missing: kvferry reads safetensors only (never .bin or .pt)")
        return dict.fromkeys(self._open(single).keys(), single)

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            return safe_open(str(path), "pt")
        except Exception as error:  # safetensors raises its own, undocumented kinds
            raise ConfigurationError(f"{path} is not a safetensors file: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def mapped(self, name: str, *shape: int) -> torch.Tensor:
        """In the file's dtype, of exactly that shape; its pages are the file's."""
        if name not in self._files:
            raise ConfigurationError(f"{self._directory}: tensor {name} is missing")
        with self._open(self._files[name]) as file:
            try:
                tensor: torch.Tensor = file.get_tensor(name)
            except Exception as error:
                raise ConfigurationError(f"{self._files[name]}: tensor {name} cannot be read: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ConfigurationError(
                f"{self._files[name]}: tensor {name} has shape {tuple(tensor.shape)}, config.json asks for {shape}"
            )
        self._left.discard(name)
        return tensor

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """In float32, of exactly that shape."""
        return self.mapped(name, *shape).float()

    def num_weights(self) -> dict[str, int]:
        """Numbers in each tensor, by name."""
        found: dict[str, int] = {}
        for path in set(self._files.values()):
            with self._open(path) as file:
                for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                    found[name] = math.prod(file.get_slice(name).get_shape())
        return found

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
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _all(self) -> Iterator[tuple[str, torch.Tensor]]:
        """In the order of their names, however they are spread over files."""
        with contextlib.ExitStack() as stack:
            opened = {path: stack.enter_context(self._open(path)) for path in set(self._files.values())}
            for name, path in sorted(self._files.items()):
                yield name, opened[path].get_tensor(name)
