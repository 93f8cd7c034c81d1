"""From a checkpoint directory to an engine whose steps run on a device: through transformers' modules, in 32 or 16 bits.

The native decoder is the CPU's. Weights and pool must fit into the device's memory, the pool's mirror into the host's.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from kvferry.engine.checkpoint import Tensors, read_config
from kvferry.engine.device import Room, model_of, refuse_dtype
from kvferry.engine.device_memory import DeviceMemory
from kvferry.engine.engine import Engine
from kvferry.engine.load import EngineSettings, LoadedRunner, check_choices, check_sizes, make_engine, token_bytes
from kvferry.engine.modules_load import load_modules
from kvferry.engine.modules_shape import modules_shape
from kvferry.engine.torch_memory import DTYPES
from kvferry.errors import ConfigurationError
from kvferry.shape import BYTES_PER_NUMBER


def load_on_device(
    directory: Path,
    settings: EngineSettings,
    device: torch.device,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Engine:
    """`device` counts, not the settings' name of it; the CPU's goes the same way. Raises ConfigurationError."""
    torch.set_num_threads(settings.num_threads)
    config = read_config(directory)
    shape = modules_shape(directory, config)
    weights = _weights(directory, config, settings.weights, device)
    refuse_dtype(device, weights)
    settings = replace(settings, kv=weights if settings.kv == "auto" else settings.kv)
    check_choices(settings, tuple(DTYPES))
    tensors = Tensors(directory)
    num_weights = sum(tensors.num_weights().values())
    room = Room.on(device, num_weights * BYTES_PER_NUMBER[weights], token_bytes(shape, settings.kv))
    settings = replace(settings, kv_tokens=room.tokens(settings.kv_tokens, settings.block_size))
    check_sizes(directory, shape, settings)
    sizes = (shape.num_layers, shape.num_kv_heads, settings.block_size, shape.head_size)
    try:
        memory = DeviceMemory(settings.kv_tokens // settings.block_size, *sizes, settings.kv, device)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"{room.device}: another has taken what was free: lower kv_tokens ({error})"
        ) from error
    runner = load_modules(directory, config, memory, on_progress, DTYPES[weights])
    numerics = f"modules-torch-{torch.__version__}-{device.type}-{model_of(device)}"
    activations = "" if weights == "float32" else f", activations {weights}"
    loaded = LoadedRunner(runner, weights, numerics, activations)
    return make_engine(config, shape, settings, tensors, memory, loaded)


def _weights(directory: Path, config: PretrainedConfig, wanted: str, device: torch.device) -> str:
    """`auto` is the checkpoint's own dtype."""
    known = ", ".join(DTYPES)
    if wanted != "auto":
        if wanted not in DTYPES:
            raise ConfigurationError(f"weights {wanted!r} are the CPU's only: on {device} use {known} or auto")
        return wanted
    text = config.get_text_config(decoder=True)
    stored = getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.float32
    name = str(stored).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigurationError(f"{directory}/config.json: dtype is {name}, which is not run: use --weights {known}")
    return name
