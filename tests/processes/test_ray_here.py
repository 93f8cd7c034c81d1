"""`kvferry up --on ray` without a cluster: a Ray of this machine, which ends with it; and the commands as a person calls them."""

import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from deploy.local import num_cores
from tests.processes.ray_cluster import ROOT, json_of, kvferry, with_token

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]


def start(model_directory, *flags):
    """The process. Its Ray is found as `auto`: no other one runs on this machine meanwhile."""
    up, banner = begun("--on=ray", f"--model={model_directory}", *flags, until="kvferry status")
    assert re.search(r"start-up  Ray .* s, controller .* s, programs .* s", banner)
    assert re.search(r"memory    router .*, prefill .*, decode .*, controller .*, Ray itself .*", banner)
    return up


def begun(*flags, until):
    command = [sys.executable, "-m", "deploy", "up", "--engine=sim", "--port=0", *flags]
    up = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=with_token()
    )
    banner = ""
    while until not in banner:
        line = up.stdout.readline()
        assert line, up.stderr.read()
        banner += line
    return up, banner


def test_the_commands_as_a_person_calls_them(model_directory):
    up = start(model_directory, "--decode=2")
    processes = psutil.Process(up.pid).children(recursive=True)
    try:
        at = "--address=auto"
        too_many = max(num_cores(), 4) - 1  # router-1 and prefill-1 have two, and the plan needs four
        run = kvferry("scale", at, f"--decode={too_many}")
        assert run.returncode == 2
        assert f"no node has room for decode-{too_many}: it needs 1 CPU on one node, but" in run.stderr.replace(
            "\n", " "
        )
        assert kvferry("role", at, "decode-2", "prefill").returncode == 0
        assert json_of(kvferry("status", at, "--json"))["wanted"] == {"prefill": 2, "decode": 1}
        assert kvferry("drain", at, "decode-2").returncode == 0
        assert "decode-1" in kvferry("status", at).stdout
        assert kvferry("down", at).returncode == 0
        assert up.wait(15) == 0
        assert "ended by `kvferry down`" in up.stderr.read()
    finally:
        up.kill()
    assert not psutil.wait_procs(processes, 10)[1]


def test_a_signal_ends_all_of_it_in_order(model_directory):
    up = start(model_directory)
    processes = psutil.Process(up.pid).children(recursive=True)
    began = time.monotonic()
    up.send_signal(signal.SIGTERM)
    assert up.wait(15) == 130
    assert not psutil.wait_procs(processes, 10)[1]
    assert time.monotonic() - began < 15


def test_a_signal_ends_workers_that_are_actors_in_order_too(model_directory):
    up, _ = begun("--transport=ray", f"--model={model_directory}", until="curl")
    processes = psutil.Process(up.pid).children(recursive=True)
    up.send_signal(signal.SIGTERM)
    assert up.wait(15) == 130
    assert not psutil.wait_procs(processes, 10)[1]
    assert "SIGTERM received" not in up.stderr.read(), "that is Ray's handler, which ends a process where it stands"


def test_a_port_that_is_taken_is_named_and_nothing_is_left(model_directory):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = kvferry("up", "--on=ray", f"--model={model_directory}", "--engine=sim", f"--port={port}")
    assert run.returncode == 2
    assert f"cannot listen at 127.0.0.1:{port}" in run.stderr.replace("\n", " ")
