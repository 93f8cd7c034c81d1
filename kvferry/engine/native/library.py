"""The C library of `decoder.c`, called by ctypes.

A wheel carries it, built for several instruction sets (`prebuilt/`); a checkout builds it on first use with the system's compiler and
keeps it under KVFERRY_HOME. Where there is neither, or the processor is too old, `load_library` says so, and models run
through torch instead. ctypes gives up the interpreter's lock for the whole step.
"""

import ctypes
import logging
import platform
import shlex
import subprocess
from functools import cache
from pathlib import Path

from kvferry.config import home
from kvferry.engine.native.build import FOLDER, LEVELS, Level, compile_library, find_compiler, library_name

logger = logging.getLogger(__name__)

KINDS = {"float32": 0, "float16": 1, "int8": 2, "bfloat16": 3}
"""How weights are kept, by the library's number."""
PARTS = ("projections", "attention", "output layer", "others")
"""What the library's steps are timed by."""

POINTER, INT32, INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


def _structure(name: str, *fields: tuple[str, object]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


def _named(kind: object, names: str) -> list[tuple[str, object]]:
    return [(name, kind) for name in names.split()]


Layer = _structure(
    "Layer", *_named(POINTER, "input_norm query_key_value bias query_norm key_norm output post_norm gate_up down")
)
Shape = _structure(
    "Shape", *_named(INT32, "layers heads kv_heads head block window is_bfloat16 in_pairs"), ("scale", ctypes.c_float)
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
        self.key = path.stem.removeprefix("decoder-")
        """Instruction set, and a hash of sources, flags and (in a checkout) compiler: what decides its bits."""
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
        self.multiply_much = library.multiply_much
        self.multiply_much.argtypes, self.multiply_much.restype = [INT32, INT64, INT32], ctypes.c_double
        self.read_much = library.read_much
        self.read_much.argtypes, self.read_much.restype = [POINTER, INT64, INT32], ctypes.c_float
        library.panel_width.restype = INT32
        self.panel_width: int = library.panel_width()


@cache
def load_library(only: str = "") -> Library | None:
    """None, with the reason in the log, if it cannot be had here. `only` names a lower level than the processor has. Found out once."""
    levels = [level for level in processor_levels() if level.name == only or not only]
    reason = "the processor is none of x86-64 with AVX2, FMA, F16C and BMI2"
    for level in levels:
        try:
            return Library(_prebuilt(level) or _built(level), level.name)
        except (OSError, subprocess.SubprocessError) as error:  # an old compiler may still know a lower level
            reason = str(error)
            logger.info("the C decoder cannot be had for %s: %s", level.name, reason)
    logger.warning("the C decoder cannot be had (%s): models run through torch, which is slower", reason)
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


def _prebuilt(level: Level) -> Path | None:
    path = FOLDER / "prebuilt" / library_name(level)
    return path if path.is_file() else None


def _built(level: Level) -> Path:
    """The library's file, compiled if it is not there (a few seconds)."""
    compiler = find_compiler()
    if compiler is None:
        raise OSError("there is no C compiler")
    command = [*shlex.split(compiler), "--version"]
    version = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    path = home() / "native" / library_name(level, f"{compiler} {version}")
    if not path.is_file():
        compile_library(level, path, compiler)
    return path
