"""The C library of `decoder.c`: built once for this processor, kept under KVFERRY_HOME, called by ctypes.

The file's name is a hash of sources, compiler flags and instruction set, so that an old build is never taken for a new one. A wheel
may carry libraries that were built with it (`prebuilt/`). Where there is neither one nor a compiler, or the processor is
too old, `load_library` says so, and the engine runs through torch instead. ctypes gives up the interpreter's lock for the whole step.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvferry.config import home

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / name for name in ("decoder.c", "attention.h", "weights.h", "vectors.h"))
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
KINDS = {"float32": 0, "float16": 1, "int8": 2}
"""How weights are kept, by the library's number."""

PARTS = ("projections", "attention", "output layer", "others")
"""What the library's steps are timed by."""

POINTER, INT32, INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


@dataclass(frozen=True, slots=True)
class Level:
    """An instruction set: what the compiler is told, and the processor flags (as Linux names them) that it needs."""

    name: str
    flags: tuple[str, ...]
    needed: frozenset[str]


_V3 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS = (
    Level("x86-64-v4-vnni", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    Level("x86-64-v4", ("-march=x86-64-v4",), _V4),
    Level("x86-64-v3", ("-march=x86-64-v3",), _V3),
)
"""Best first."""


def _structure(name: str, *fields: tuple[str, object]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


def _named(kind: object, names: str) -> list[tuple[str, object]]:
    return [(name, kind) for name in names.split()]


Layer = _structure(
    "Layer", *_named(POINTER, "input_norm query_key_value bias query_norm key_norm output post_norm gate_up down")
)
Shape = _structure(
    "Shape", *_named(INT32, "layers heads kv_heads head block window is_bfloat16"), ("scale", ctypes.c_float)
)
Model = _structure(
    "Model",
    *_named(INT32, "hidden intermediate vocabulary kind"),
    ("epsilon", ctypes.c_float),
    ("shape", Shape),
    *_named(POINTER, "cosine sine norm output_layer layer"),
)
Spans = _structure("Spans", *_named(INT32, "spans threads"), *_named(POINTER, "positions begins tables table blocks"))
Batch = _structure(
    "Batch",
    *_named(INT32, "rows logit_rows"),
    ("spans", Spans),
    *_named(POINTER, "slots offsets logit_row logits hidden normed projected attended gated quantized seconds"),
)


class Library:
    """The loaded functions. `level` is the instruction set it was built for."""

    def __init__(self, path: Path, level: str):
        self.level = level
        library = ctypes.CDLL(str(path))
        self.forward = library.forward
        self.forward.argtypes, self.forward.restype = [ctypes.POINTER(Model), ctypes.POINTER(Batch)], None
        self.output = library.output
        self.output.argtypes, self.output.restype = [ctypes.POINTER(Model), ctypes.POINTER(Batch)], None
        self.paged_attention = library.paged_attention
        self.paged_attention.argtypes = [ctypes.POINTER(Shape), ctypes.POINTER(Spans), INT32, POINTER, POINTER]
        self.paged_attention.restype = None
        self.pack = library.pack
        self.pack.argtypes, self.pack.restype = [POINTER, *[INT32] * 3, POINTER], None
        self.packed_bytes = library.packed_bytes
        self.packed_bytes.argtypes, self.packed_bytes.restype = [INT32] * 3, INT64
        library.panel_width.restype = INT32
        self.panel_width: int = library.panel_width()


def load_library(only: str = "") -> Library | None:
    """None, with the reason in the log, if it cannot be had here. `only` names a lower level than the processor has."""
    found = processor_levels()
    level = next((level for level in found if level.name == only or not only), None)
    if level is None:
        logger.warning("the processor has no AVX2: models run through torch, which is slower")
        return None
    try:
        return Library(_prebuilt(level) or _built(level), level.name)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the C decoder cannot be built (%s): models run through torch, which is slower", error)
        return None


def processor_levels() -> list[Level]:
    """What this processor can run, best first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    try:
        flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    except OSError:
        return []
    return [level for level in LEVELS if level.needed <= flags]


def compile_library(level: Level, target: Path, compiler: str) -> None:
    """Written beside and renamed. Raises OSError with the compiler's words."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [compiler, *level.flags, *FLAGS, str(SOURCES[0]), "-o", str(made)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if run.returncode != 0:
            raise OSError(f"{compiler} failed: {run.stderr.strip()[:300]}")
        os.rename(made, target)


def _sources_key(*more: str) -> str:
    content = b"".join(path.read_bytes() for path in SOURCES)
    return hashlib.blake2b(content + " ".join((*more, *FLAGS)).encode(), digest_size=8).hexdigest()


def prebuilt_name(level: Level) -> str:
    return f"decoder-{level.name}-{_sources_key(*level.flags)}.so"


def _prebuilt(level: Level) -> Path | None:
    path = FOLDER / "prebuilt" / prebuilt_name(level)
    return path if path.is_file() else None


def _built(level: Level) -> Path:
    """The library's file, compiled if it is not there (a few seconds)."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise OSError("there is no C compiler")
    path = home() / "native" / f"decoder-{level.name}-{_sources_key(compiler, *level.flags)}.so"
    if not path.is_file():
        compile_library(level, path, compiler)
    return path
