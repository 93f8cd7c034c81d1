"""The C library of `decoder.c`: built once for this processor, kept under KVFERRY_HOME, called by ctypes.

The file's name is a hash of source, compiler flags and instruction set, so that an old build is never taken for a new one. Where
there is no compiler, or the processor is too old, `load_library` says so, and the engine takes the plain torch form instead.
ctypes gives up the interpreter's lock for the whole step.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvferry.config import home

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("decoder.c")
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "fma", "f16c", "bmi2"},
}
"""Instruction sets, best first, and the processor flags (as Linux names them) that they need."""

POINTER = ctypes.c_void_p


class Layer(ctypes.Structure):
    _fields_ = [(name, POINTER) for name in ("input_norm", "query_key_value", "output", "post_norm", "gate_up", "down")]


class Model(ctypes.Structure):
    _fields_ = [
        *[
            (name, ctypes.c_int32)
            for name in (
                "hidden",
                "intermediate",
                "layers",
                "heads",
                "kv_heads",
                "head",
                "vocabulary",
                "block",
                "is_half",
            )
        ],
        ("epsilon", ctypes.c_float),
        *[(name, POINTER) for name in ("embedding", "cosine", "sine", "norm", "output_layer", "layer")],
    ]


class Batch(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int32) for name in ("rows", "spans", "logit_rows", "threads")],
        *[
            (name, POINTER)
            for name in (
                "tokens",
                "positions",
                "slots",
                "offsets",
                "begins",
                "tables",
                "table",
                "logit_row",
                "blocks",
                "logits",
                "hidden",
                "normed",
                "projected",
                "attended",
                "gated",
            )
        ],
    ]


class Library:
    """The loaded functions. `level` is the instruction set it was built for."""

    def __init__(self, path: Path, level: str):
        self.level = level
        library = ctypes.CDLL(str(path))
        self.step = library.step
        self.step.argtypes, self.step.restype = [ctypes.POINTER(Model), ctypes.POINTER(Batch)], None
        self.pack = library.pack
        self.pack.argtypes, self.pack.restype = [POINTER, *[ctypes.c_int32] * 3, POINTER], None
        library.panel_width.restype = ctypes.c_int32
        self.panel_width: int = library.panel_width()


def load_library() -> Library | None:
    """None, with the reason in the log, if it cannot be had here."""
    level = processor_level()
    if level is None:
        logger.warning("the processor has no AVX2: the plain torch form is used, which is slower")
        return None
    try:
        return Library(_built(level), level)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the C decoder cannot be built (%s): the plain torch form is used, which is slower", error)
        return None


def processor_level() -> str | None:
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    except OSError:
        return None
    return next((level for level, needed in LEVELS.items() if needed <= flags), None)


def _built(level: str) -> Path:
    """The library's file, compiled if it is not there (about a second)."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise OSError("there is no C compiler")
    key = hashlib.blake2b(SOURCE.read_bytes() + " ".join((compiler, level, *FLAGS)).encode(), digest_size=8).hexdigest()
    path = home() / "native" / f"decoder-{level}-{key}.so"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        command = [compiler, f"-march={level}", *FLAGS, str(SOURCE), "-o", str(made)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if run.returncode != 0:
            raise OSError(f"{compiler} failed: {run.stderr.strip()[:300]}")
        os.rename(made, path)
    return path
