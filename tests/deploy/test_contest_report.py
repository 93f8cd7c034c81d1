"""What a contest's outcome looks like, and what is refused before anything is run."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from rich.console import Console

from deploy import contest_report as under_test
from kvferry.errors import ConfigurationError
from loadtest.contest import Timing, Turn

STEPS_S = {"kvferry-float16": 0.5, "llama.cpp-F16": 0.6, "transformers": 2.0}


@pytest.fixture
def contest(tmp_path, monkeypatch):
    """Prints a contest whose every contender needs nothing, and times prefill_1024 alone or fails."""

    def take(contender):
        if contender.name not in STEPS_S:
            return Turn(contender.name, (), "exit code 2: [/no] such weights")
        return Turn(contender.name, (Timing("prefill_1024", STEPS_S[contender.name]),))

    monkeypatch.setattr(under_test, "take_turn", take)
    for path in ("llama/bin/python", "hf/bin/python", "model-F16.gguf", "model-hf"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    notes = Console(stderr=True, highlight=False, width=200)

    def hold(only=(), as_json=False, directory=tmp_path):
        under_test.report_contest(directory, tmp_path, 2, only, as_json, notes)

    return hold


def test_the_markdown_shows_ratios_beside_targets_and_what_misses_its_own_in_bold(contest, capsys):
    contest()
    shown = capsys.readouterr()
    assert "| kvferry-float16 / llama.cpp-F16 |  | **1.20 (<1.4)** |" in shown.out
    assert "| kvferry-float16 / transformers |  | 4.00 (≥1.25) |" in shown.out
    assert "| llama.cpp-F16 |  | 600.0 |" in shown.out
    assert "- kvferry-int8 failed: exit code 2: [/no] such weights" in shown.out
    assert "vllm-1-thread is skipped" in shown.err


def test_json_lines_tell_steps_ratios_and_failures(contest, capsys):
    contest(["kvferry-float16", "llama.cpp-F16", "kvferry-int8"], as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(line["figure"], line.get("contender")) for line in lines} == {
        ("step", "kvferry-float16"), ("step", "llama.cpp-F16"), ("ratio", None), ("failure", "kvferry-int8"),
    }  # fmt: skip
    (ratio,) = [line for line in lines if line["figure"] == "ratio"]
    assert (ratio["value"], ratio["target"], ratio["holds"]) == (1.2, 1.4, False)


def test_an_unknown_contender_or_directory_or_one_without_peers_is_refused(contest, tmp_path):
    with pytest.raises(ConfigurationError, match=r"'llama' is not known; known: kvferry-float16, "):
        contest(["llama"])
    with pytest.raises(ConfigurationError, match="no such directory"):
        contest(directory=tmp_path / "none")
    with pytest.raises(ConfigurationError, match="none of the contenders can run"):
        contest(["vllm-1-thread"])


@pytest.mark.model
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whatever_ends_it_ends_the_contender_that_runs(tmp_path, model_directory, number):
    python, told = tmp_path / "llama/bin/python", tmp_path / "pid"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho $$ > {told}.new; mv {told}.new {told}\nexec sleep 60\n")
    python.chmod(0o700)
    (tmp_path / "model-F16.gguf").touch()
    command = [sys.executable, "-m", "deploy", "bench", "peers", "--only", "llama.cpp-F16"]
    bench = subprocess.Popen([*command, "--peers", str(tmp_path), "--model", str(model_directory)])
    ends = time.monotonic() + 20
    while not told.exists():
        assert time.monotonic() < ends
        time.sleep(0.05)
    contender = psutil.Process(int(told.read_text()))
    bench.send_signal(number)
    try:
        assert bench.wait(10) == 130
        contender.wait(5)
    finally:
        bench.kill()
