"""GGUF models: a file, or a directory with one, becomes a checkpoint directory under KVFERRY_HOME, once.

transformers reads weights (de-quantised to float32), configuration and tokenizer out of the file; safetensors, tokenizer.json and chat
template are written beside the target and renamed, so that an interrupted run leaves nothing half.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

from kvferry.errors import ConfigurationError

OnStep = Callable[[str, float], None]

BYTES_A_WEIGHT = 8
"""transformers holds all weights in float32, and most of them twice while the model is filled (measured: up to 1.8 times)."""


def gguf_of(model: Path) -> Path | None:
    """The GGUF file that `model` is or holds; None for a checkpoint directory. Raises ConfigurationError if there are several."""
    if model.is_file() and model.suffix == ".gguf":
        return model
    if not model.is_dir() or (model / "config.json").is_file():
        return None
    found = sorted(model.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigurationError(f"{model} holds {len(found)} GGUF files ({names}): name the one to use")
    return found[0] if found else None


def converted_directory(gguf: Path, home: Path) -> Path:
    """Where its checkpoint is or will be; another file of the same name has another one."""
    stat = gguf.resolve().stat()
    key = hashlib.blake2b(f"{gguf.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=4).hexdigest()
    return home / "models" / f"{gguf.stem}-{key}"


def convert_gguf(gguf: Path, target: Path, on_step: OnStep) -> Path:
    """Returns `target`, made if it is not there. Raises ConfigurationError for what transformers cannot read."""
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".convert-", dir=target.parent) as scratch:
        made = Path(scratch) / "checkpoint"
        try:
            _check_memory(gguf)
            _write(gguf, made, on_step)
        except ConfigurationError:
            raise
        except OSError as error:
            if error.errno is None:  # transformers' own: it has no number
                raise ConfigurationError(f"{gguf}: transformers cannot read it: {error}") from error
            raise ConfigurationError(f"{target.parent}: the checkpoint cannot be written: {error.strerror}") from error
        except Exception as error:  # transformers and gguf raise many kinds
            message = f"{gguf}: transformers cannot read it: {error}; give a checkpoint directory instead"
            raise ConfigurationError(message) from error
        try:
            os.rename(made, target)
        except OSError:
            if not (target / "config.json").is_file():  # else another process was faster
                raise
    on_step("done", 1.0)
    return target


def _check_memory(gguf: Path) -> None:
    """Before anything of it is read that takes memory."""
    from gguf import GGUFReader

    num_weights = sum(int(tensor.n_elements) for tensor in GGUFReader(gguf).tensors)
    needed, available = num_weights * BYTES_A_WEIGHT, psutil.virtual_memory().available
    if needed > available:
        message = f"{gguf}: converting its {num_weights / 1e9:.2f} billion weights takes {BYTES_A_WEIGHT} bytes each, "
        message += f"{needed / 2**30:.1f} GiB of memory, and {available / 2**30:.1f} GiB are available"
        raise ConfigurationError(f"{message}; convert it on a larger machine, or give a checkpoint directory")


def _write(gguf: Path, made: Path, on_step: OnStep) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    on_step("de-quantising the weights", 0.3)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    if hasattr(model, "hf_quantizer"):  # it makes save_pretrained refuse
        del model.hf_quantizer
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    vars(model)["is_quantized"] = False
    on_step("writing the weights", 0.6)
    model.save_pretrained(made)
    on_step("writing the tokenizer", 0.8)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(made)
