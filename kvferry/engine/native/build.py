"""Compiling `decoder.c`: for which instruction sets, with which flags, and what the result is called.

Standard library only: kvferry/engine/native/library.py builds on first use, hatch_build.py when a wheel is made.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = tuple(
    FOLDER / name for name in ("decoder.c", "ahead.h", "attention.h", "weights.h", "vectors.h", "ceilings.h")
)
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")


@dataclass(frozen=True, slots=True)
class Level:
    """An instruction set: what the compiler is told, and the processor flags (as Linux names them) that it needs."""

    name: str
    flags: tuple[str, ...]
    needed: frozenset[str]


_V3 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS = (
    Level(
        "x86-64-v4-bf16",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        _V4 | {"avx512_vnni", "avx512_bf16"},
    ),
    Level("x86-64-v4-vnni", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    Level("x86-64-v4", ("-march=x86-64-v4",), _V4),
    Level("x86-64-v3", ("-march=x86-64-v3",), _V3),
)
"""Best first."""


def compile_library(level: Level, target: Path, compiler: str) -> None:
    """Written beside and renamed. Raises OSError with the compiler's words."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [*shlex.split(compiler), *level.flags, *FLAGS, str(SOURCES[0]), "-o", str(made)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if run.returncode != 0:
            raise OSError(f"{compiler} failed: {run.stderr.strip()[:300]}")
        os.rename(made, target)


def find_compiler() -> str | None:
    """As CC has it: with its arguments, or behind another program."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")


def library_name(level: Level, compiler: str = "") -> str:
    """With a hash of sources and flags, so that an old build is never taken for a new one. A wheel's names no compiler."""
    content = b"".join(path.read_bytes() for path in SOURCES)
    key = hashlib.blake2b(content + " ".join((compiler, *level.flags, *FLAGS)).encode(), digest_size=8).hexdigest()
    return f"decoder-{level.name}-{key}.so"
