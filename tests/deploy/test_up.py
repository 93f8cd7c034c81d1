"""`kvferry up` as a user starts and ends it: nothing is left, whatever ends it."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from kvferry.config import home
from tests.processes.simulated import expected, ids, simulated, states

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]


def start(model_directory, *flags):
    """The process, its address, and the processes that it started."""
    command = [
        sys.executable,
        "-m",
        "deploy",
        "up",
        f"--model={model_directory}",
        "--port=0",
        "--kv-tokens=640",
        *flags,
    ]
    up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    banner = ""
    while "curl" not in banner:
        line = up.stdout.readline()
        assert line, up.stderr.read()
        banner += line
    return up, banner, psutil.Process(up.pid).children(recursive=True)


def flags_of(process):
    parted = [flag.partition("=") for flag in process.cmdline() if "=" in flag]
    return {name: value for name, _, value in parted}


def all_gone(processes, timeout_s=8):
    _, alive = psutil.wait_procs(processes, timeout_s)
    return not alive


@pytest.mark.parametrize(
    ("number", "engine"),
    [
        (signal.SIGINT, "native"),
        pytest.param(signal.SIGTERM, "sim", marks=pytest.mark.soak),
        (signal.SIGKILL, "sim"),
    ],
)
def test_whatever_ends_it_no_process_is_left(model_directory, number, engine):
    up, banner, children = start(model_directory, f"--engine={engine}")
    folder = Path(flags_of(children[1])["--secret-file"]).parent
    assert folder.parent == home() / "run"
    if number is not signal.SIGKILL:
        children[1].send_signal(signal.SIGSTOP)  # a hung child must not stay either
    up.send_signal(number)
    assert up.wait(15) == (130 if number is not signal.SIGKILL else -9)
    assert len(children) == 3
    if engine == "native":
        assert "46,080 bytes a token" in banner
        assert "640 tokens" in banner
    assert all_gone(children)
    if number is not signal.SIGKILL:
        assert not folder.exists()


def test_the_line_of_the_banner_works_when_pasted_and_a_worker_that_dies_comes_back(model_directory):
    up, banner, children = start(model_directory)
    try:
        curl = re.search(r"curl .*", banner).group()
        answer = json.loads(subprocess.run(curl, shell=True, capture_output=True, check=True).stdout)
        assert "Seoul" in answer["choices"][0]["message"]["content"]
        url = re.search(r"http://[\d.:]+", banner).group()
        worker = next(child for child in children if "decode_worker" in " ".join(child.cmdline()))
        worker.kill()
        ends = time.monotonic() + 60
        while not is_ready_with_two_others(url, worker.pid):
            assert time.monotonic() < ends
            time.sleep(0.2)
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(15)


def is_ready_with_two_others(url, dead_pid):
    try:
        with urllib.request.urlopen(f"{url}/health/ready") as response:
            pids = [one["pid"] for one in json.load(response)["workers"]]
    except OSError:
        return False
    return len(pids) == 2 and dead_pid not in pids


def test_a_model_that_cannot_run_ends_it_at_once_naming_the_field(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    command = [sys.executable, "-m", "deploy", "up", f"--model={tmp_path}", "--port=0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert "num_attention_heads" in run.stderr


@pytest.mark.parametrize("num_times", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_many_workers_that_begin_in_the_same_moment_beside_another_deployment_have_ports_of_their_own(
    model_directory, num_times
):
    """T085."""
    for turn in range(num_times):
        with (
            simulated(model_directory, num_prefill=1, num_decode=1) as beside,
            simulated(model_directory, num_prefill=3, num_decode=3) as many,
        ):
            found = {"prefill-1", "prefill-2", "prefill-3", "decode-1", "decode-2", "decode-3"}
            assert states(many) == dict.fromkeys(found, "ready")
            children = [*beside.deployment.children.values(), *many.deployment.children.values()]
            addresses = [text for child in children for text in child.details.values() if text.startswith("127.0.0.1:")]
            assert len(set(addresses)) == len(addresses) == 2 * 3 + 8, addresses
            assert {child.num_starts for child in children} == {1}
            for service in (beside, many):
                prompt = ids(100, (turn, service.url))
                assert service.tokens(prompt, 4) == expected(prompt, 4)


def test_a_port_that_is_taken_is_named(model_directory):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "deploy", "up", f"--model={model_directory}", f"--port={port}"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert str(port) in run.stderr


def test_a_worker_of_another_block_size_or_secret_is_refused_and_says_why(model_directory, tmp_path):
    up, _, children = start(model_directory, "--engine=sim")
    try:
        worker = next(child for child in children if "decode_worker" in " ".join(child.cmdline()))
        given = flags_of(worker)
        secret = tmp_path / "secret"
        secret.write_text("another")
        secret.chmod(0o600)
        for changes, named in (
            (["--block-size=32"], "block_size"),
            (["--context-tokens=512"], "context_tokens"),
            ([f"--secret-file={secret}"], "secret"),
        ):
            base = [
                f"{flag}={given[flag]}" for flag in ("--router", "--model", "--secret-file", "--kv-tokens", "--engine")
            ]
            command = [sys.executable, "-m", "decode_worker", "--name=other", *base, *changes]
            run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert run.returncode == 3
            assert named in run.stderr
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(15)
