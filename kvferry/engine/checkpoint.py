"""A checkpoint directory: its configuration, checked, and its tensors, mapped from safetensors.

What cannot be run is refused here, at once, naming file and field. Pickled checkpoints are never opened.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from kvferry.engine.safetensors_file import SafetensorsFile
from kvferry.errors import ConfigurationError

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds whose table depends on the position and on the configuration alone."""


def read_config(directory: Path) -> PretrainedConfig:
    """transformers' configuration, defaults filled in. Raises ConfigurationError for what no engine here can run."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigurationError(f"{path} is missing: --model takes a Hugging Face checkpoint directory or a GGUF file")
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
    """The tensors of a checkpoint, by name: views of the files' pages."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._files = self._find_files()
        self._left = set(self._files)

    def _find_files(self) -> dict[str, SafetensorsFile]:
        index, single = self._directory / "model.safetensors.index.json", self._directory / "model.safetensors"
        if single.is_file():  # of both, transformers takes the single one, too
            file = SafetensorsFile(single)
            return dict.fromkeys(file.shapes(), file)
        if not index.is_file():
            raise ConfigurationError(f"{single} is missing: kvferry reads safetensors only (never .bin or .pt)")
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            paths = {name: self._directory / file for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{index} has no readable weight_map: {error!r}") from error
        for path in set(paths.values()):
            if not path.is_file():
                raise ConfigurationError(f"{path} is missing, but {index.name} names it")
        opened = {path: SafetensorsFile(path) for path in set(paths.values())}
        for name, path in paths.items():
            if name not in opened[path].shapes():
                raise ConfigurationError(f"{path}: tensor {name} is missing, but {index.name} names it")
        for path, file in opened.items():
            for name in file.shapes():
                if paths.get(name) != path and not name.endswith("rotary_emb.inv_freq"):
                    raise ConfigurationError(f"{path}: tensor {name} is there, but {index.name} does not name it there")
        return {name: opened[path] for name, path in paths.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def mapped(self, name: str, *shape: int) -> torch.Tensor:
        """In the file's dtype, of exactly that shape; not to be written to."""
        if name not in self._files:
            raise ConfigurationError(f"{self._directory}: tensor {name} is missing")
        tensor = self._files[name].tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigurationError(
                f"{self._files[name].path}: tensor {name} has shape {tuple(tensor.shape)}, config.json asks for {shape}"
            )
        self._left.discard(name)
        return tensor

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """In float32, of exactly that shape; a copy."""
        return self.mapped(name, *shape).to(torch.float32, copy=True)

    def num_weights(self) -> dict[str, int]:
        """Numbers in each tensor, by name."""
        return {name: math.prod(file.shapes()[name]) for name, file in self._files.items()}

    def refuse_extra(self, ignored: set[str]) -> None:
        """Every tensor must have been taken: an unknown one means another architecture."""
        extra = sorted(name for name in self._left - ignored if not name.endswith("rotary_emb.inv_freq"))
        if extra:
            raise ConfigurationError(
                f"{self._directory}: unknown tensors, the first is {extra[0]} ({len(extra)} in all)"
            )

    def digest(self, *settings: str) -> str:
        """Over every tensor's name, dtype, shape and bytes, and `settings`: 32 hexadecimal digits.

        In the order of names, however the tensors are spread over files.
        """
        digest = xxhash.xxh3_128()
        for setting in settings:
            digest.update(setting.encode() + b"\0")
        for name, file in sorted(self._files.items(), key=lambda item: item[0]):
            tensor = file.tensor(name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()
