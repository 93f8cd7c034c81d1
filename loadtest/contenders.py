"""Who takes part in a contest and how each is run: a process of its own that prints one JSON line a workload.

Ours is `kvferry bench engine`; a peer is a script of loadtest/peers/ in the peer's own interpreter, isolated from ours. The peers'
directory holds `hf`, `llama` and `vllm` (virtual environments), `model-hf` (a transformers directory), `model-F16.gguf` and
`model-Q8_0.gguf`, all of one model. Knows nothing of rounds and targets (loadtest/contest.py).
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loadtest.contest import Turn, read_timings

SCRIPTS = Path(__file__).parent / "peers"
TURN_TIMEOUT_S = 600.0
FAILURE_LINES, FAILURE_CHARACTERS = 3, 400


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    command: tuple[str, ...]
    needs: tuple[Path, ...] = ()
    """Without one of these it is skipped."""
    num_threads: int = 1

    @property
    def missing(self) -> list[Path]:
        return [path for path in self.needs if not path.exists()]


def contenders_in(directory: Path, model: Path) -> dict[str, Contender]:
    """By name, in the order of their turns. `directory` is the peers', `model` our own checkpoint directory."""
    peers, model_hf = directory.absolute(), directory.absolute() / "model-hf"

    def ours(weights: str, kv: str = "float32") -> Contender:
        command = (sys.executable, "-m", "deploy", "bench", "engine", "--model", str(model), "--json")
        name = f"kvferry-{weights}" if kv == "float32" else f"kvferry-{weights}-kv-{kv}"
        return Contender(name, (*command, "--weights", weights, "--kv", kv))

    def llama_cpp(weights: str, kv: str, name: str) -> Contender:
        return _peer(name, peers / "llama", "llama_cpp_steps.py", peers / f"model-{weights}.gguf", kv)

    def vllm(num_threads: int, name: str) -> Contender:
        return _peer(name, peers / "vllm", "vllm_steps.py", model_hf, str(num_threads), num_threads=num_threads)

    all_of_them = (
        ours("float16"),
        llama_cpp("F16", "unified", "llama.cpp-F16"),
        llama_cpp("F16", "split", "llama.cpp-F16-split"),
        ours("float16", "bfloat16"),
        ours("bfloat16"),
        ours("bfloat16", "bfloat16"),
        ours("int8"),
        llama_cpp("Q8_0", "unified", "llama.cpp-Q8_0"),
        llama_cpp("Q8_0", "split", "llama.cpp-Q8_0-split"),
        ours("int8", "bfloat16"),
        ours("float32"),
        _peer("transformers", peers / "hf", "transformers_steps.py", model_hf),
        vllm(2, "vllm-2-threads"),
        vllm(1, "vllm-1-thread"),
    )
    return {contender.name: contender for contender in all_of_them}


def _peer(name: str, environment: Path, script: str, model: Path, *arguments: str, num_threads: int = 1) -> Contender:
    python = environment / "bin" / "python"
    command = (str(python), "-I", str(SCRIPTS / script), str(model), *arguments)
    return Contender(name, command, (python, model), num_threads)


def take_turn(contender: Contender, timeout_s: float = TURN_TIMEOUT_S) -> Turn:
    """Runs it to its end, or ends it and all that it started. What fails is told in the turn, never raised."""
    try:
        process = subprocess.Popen(
            contender.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=_environment(contender.num_threads, os.environ),
            start_new_session=True,
        )
    except OSError as error:
        return Turn(contender.name, (), f"cannot be started: {error}")
    try:
        printed, complaint, reason = *process.communicate(timeout=timeout_s), ""
    except subprocess.TimeoutExpired:
        _end(process)
        printed, complaint, reason = *process.communicate(), f"not done within {timeout_s:g} s"
    except BaseException:
        _end(process)
        raise
    timings = read_timings(printed)
    if not reason and process.returncode:
        reason = f"exit code {process.returncode}: {_last_words(complaint)}"
    elif not reason and not timings:
        reason = "it printed no timing"
    return Turn(contender.name, timings, reason)


def _environment(num_threads: int, ours: Mapping[str, str]) -> dict[str, str]:
    return {**ours, "OMP_NUM_THREADS": str(num_threads), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


def _end(process: subprocess.Popen[str]) -> None:
    """With all of the session that it leads: a child that outlives it may hold its standard output open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_words(complaint: str) -> str:
    """The end of what it wrote to standard error, on one line."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", complaint)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return " / ".join(lines[-FAILURE_LINES:])[-FAILURE_CHARACTERS:]
