"""The attention function that transformers' modules call in a `ModulesRunner`: writes a layer's KV into the pool, then reads it paged.

Registered under `ATTENTION` at transformers' attention and mask interfaces. What the step is comes in as one keyword of our own,
`kvferry_batch`, which the modules hand down. A keyword that would change the arithmetic and is not known here is refused.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvferry.engine.device_memory import DeviceMemory
from kvferry.engine.torch_memory import TorchMemory
from kvferry.errors import ConfigurationError

ATTENTION = "kvferry_paged"
HARMLESS = {
    "dropout",
    "position_ids",
    "use_cache",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
}
"""Keywords that modules pass and that change nothing here: positions are applied already, and nothing is trained."""


@dataclass(frozen=True, slots=True)
class Mask:
    """In place of a mask that transformers would have built: only its rule. It is asked when a model is checked."""

    sees: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(batch, head, row's position, key's position) -> bool, over index tensors that broadcast."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer's call of the attention function, for whoever checks a model."""

    layer: int
    window: int
    mask: object


@dataclass(frozen=True, slots=True)
class ModulesBatch:
    """A step's rows: `num_rows` real ones, then padding, which neither writes nor reads the pool."""

    memory: TorchMemory | DeviceMemory
    num_rows: int
    slots: torch.Tensor
    """[num_rows]: the slot that each row's KV goes to."""
    offsets: torch.Tensor
    """[num_rows]: its token's place within the block."""
    attend: Callable[[torch.Tensor, int, float, int, float, torch.Tensor | None], torch.Tensor]
    """Paged attention over the step's spans, from queries [rows, heads, dim], layer, scale, window, softcap and sinks."""
    on_call: Callable[[LayerCall], None] | None = None


def attend_paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    kvferry_batch: ModulesBatch | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """`query` [1, heads, rows, dim], `key` and `value` [1, KV heads, rows, dim]; returns [1, rows, heads, dim].

    The signature is that of transformers' attention interface.
    """
    batch, layer = kvferry_batch, getattr(module, "layer_idx", None)
    name = f"layer {layer} ({type(module).__name__})"
    if batch is None or not isinstance(layer, int):
        raise ConfigurationError(f"{name}: the model does not say which layer and step its attention belongs to")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ConfigurationError(f"{name}: its attention sees later tokens")
    for keyword, given in others.items():
        if given is not None and keyword not in HARMLESS:
            raise ConfigurationError(f"{name}: its attention has {keyword!r}, which paged attention does not know")
    _write(batch, layer, name, key, value)
    window = sliding_window or 0
    if batch.on_call is not None:
        batch.on_call(LayerCall(layer, window, attention_mask))
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    attended = batch.attend(query[0].transpose(0, 1), layer, scale, window, softcap or 0.0, s_aux)
    return attended[None], None


def _write(batch: ModulesBatch, layer: int, name: str, key: torch.Tensor, value: torch.Tensor) -> None:
    keys, values = batch.memory.keys, batch.memory.values
    _, num_layers, num_kv_heads, dim, _ = keys.shape
    for part in (key, value):
        if (part.shape[1], part.shape[3]) != (num_kv_heads, dim) or layer >= num_layers:
            raise ConfigurationError(
                f"{name} has {part.shape[1]} KV heads of size {part.shape[3]}, "
                f"the pool {num_layers} layers of {num_kv_heads} heads of size {dim}"
            )
    new_keys, new_values = (part[0, :, : batch.num_rows].transpose(0, 1).to(keys.dtype) for part in (key, value))
    keys[batch.slots, layer, :, :, batch.offsets] = new_keys
    values[batch.slots, layer, :, batch.offsets] = new_values


def describe_mask(*_: object, mask_function: Callable[..., torch.Tensor], **__: object) -> Mask:
    """The signature is that of transformers' mask interface."""
    return Mask(mask_function)


AttentionInterface.register(ATTENTION, attend_paged)
AttentionMaskInterface.register(ATTENTION, describe_mask)
