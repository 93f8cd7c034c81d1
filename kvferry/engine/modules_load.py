"""From a checkpoint directory and a block memory to a checked `ModulesRunner`.

transformers only warns of tensors that are missing, unknown or of another shape; here they are refused. Weights are read from
safetensors alone, mapped, and become `dtype`, where the memory's blocks are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from kvferry.engine.checkpoint import Tensors
from kvferry.engine.device_memory import DeviceMemory
from kvferry.engine.modules import ModulesRunner
from kvferry.engine.modules_attention import ATTENTION
from kvferry.engine.modules_check import check
from kvferry.engine.modules_shape import modules_shape
from kvferry.engine.torch_memory import TorchMemory
from kvferry.errors import ConfigurationError


def load_modules(
    directory: Path,
    config: PretrainedConfig,
    memory: TorchMemory | DeviceMemory,
    on_progress: Callable[[float], None] = lambda share: None,
    dtype: torch.dtype = torch.float32,
) -> ModulesRunner:
    """`memory` is sized by `modules_shape`. Raises ConfigurationError if the model cannot be run as it is."""
    on_progress(0.0)
    shape = modules_shape(directory, config)
    wanted, given = (shape.num_layers, shape.num_kv_heads, shape.head_size), tuple(memory.keys.shape[1:4])
    if given != wanted:
        raise ConfigurationError(f"{directory} needs a pool of layers, KV heads and head size {wanted}, not {given}")
    Tensors(directory)  # refuses a directory without whole safetensors
    model = _load(directory, dtype, memory.blocks.device if isinstance(memory, DeviceMemory) else None)
    on_progress(0.9)
    runner = ModulesRunner(model, shape, memory)
    check(runner)
    on_progress(1.0)
    return runner


def _load(directory: Path, dtype: torch.dtype, device: torch.device | None) -> PreTrainedModel:
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            attn_implementation=ATTENTION,
            dtype=dtype,
            device_map={"": device} if device else None,  # each weight goes there as it is read
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are told by name, and refused
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises many kinds, some of them undocumented
        raise ConfigurationError(f"{directory}: transformers cannot load it: {error}") from error
    model, told = loaded
    _refuse_tensors(directory, told)
    return model.eval()


def _refuse_tensors(directory: Path, told: dict[str, Any]) -> None:
    problems = [f"{name} is missing" for name in sorted(told["missing_keys"])]
    problems += [f"{name} is unknown" for name in sorted(told["unexpected_keys"])]
    problems += [
        f"{name} has shape {tuple(stored)}, config.json asks for {tuple(wanted)}"
        for name, stored, wanted in sorted(told["mismatched_keys"])
    ]
    problems = [problem for problem in problems if "rotary_emb.inv_freq " not in problem]
    if problems:
        raise ConfigurationError(f"{directory}: tensor {problems[0]} ({len(problems)} such in all)")
    if told.get("error_msgs"):
        raise ConfigurationError(f"{directory}: {told['error_msgs'][0]}")
