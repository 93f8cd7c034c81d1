"""The command as a person types it: what it prints, and what it says of a mistake."""

import json
import subprocess
import sys

import pytest


def kvferry(*arguments, timeout=60):
    command = [sys.executable, "-m", "deploy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_size_does_the_arithmetic():
    text = kvferry("size", "llama-2-7b", "--requests", "10").stdout
    assert all(part in text for part in ("512 KiB", "2 GiB", "20 GiB"))
    lines = [json.loads(line) for line in kvferry("size", "qwen2.5-7b", "--json").stdout.splitlines()]
    figures = {line["figure"]: line["value"] for line in lines}
    assert figures["kv_bytes_per_token"] == 56 * 1024
    assert figures["kv_bytes_at_131072_tokens"] == 7 * 1024**3
    assert all({"figure", "value", "unit"} <= line.keys() for line in lines)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("size", "no-such-model"), "llama-2-7b"),
        (("size", "--dtype", "int3"), "float32"),
        (("run", "hello", "--url", "http://127.0.0.1:9"), "kvferry up"),
        (("bench", "load", "--url", "http://127.0.0.1:9"), "kvferry up"),
        (("bench", "pd", "--rates", "2,1"), "rise"),
        (("bench", "pd", "--no-real", "--trace", "/nowhere.csv"), "/nowhere.csv"),
        (("up", "--prefill", "-1"), "prefill"),
        (("up", "--decode", "0"), "decode"),
        (("up", "--model", "/nowhere"), "/nowhere"),
        (("sing",), "sing"),
    ],
)
def test_a_mistake_is_named_in_one_line_without_a_traceback(arguments, named):
    run = kvferry(*arguments)
    assert run.returncode == 2
    assert named in run.stderr
    assert "Traceback" not in run.stderr


def test_a_configuration_file_that_says_what_up_sets_itself_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            dict(num_attention_heads=4, num_hidden_layers=2, hidden_size=64, intermediate_size=96, vocab_size=199)
        )
    )
    path = tmp_path / "kvferry.yaml"
    path.write_text("decode:\n  name: mine\n")
    run = kvferry("up", "--model", str(tmp_path), "--config", str(path))
    assert run.returncode == 2
    assert "decode.name" in run.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("up",),
        ("run",),
        ("size",),
        ("model", "unpack"),
        *(("bench", name) for name in ("load", "exact", "engine", "quality", "peers", "pd")),
    ],
)
def test_every_command_describes_itself(command):
    run = subprocess.run(
        [sys.executable, "-m", "deploy", *command, "--help"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "Usage" in run.stdout


@pytest.mark.model
@pytest.mark.parametrize("name", ["load", "exact"])
def test_a_service_that_is_not_there_is_named_at_once(model_directory, name):
    command = [sys.executable, "-m", "deploy", "bench", name, "--url=http://127.0.0.1:9"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 2
    assert "nothing answers at http://127.0.0.1:9" in run.stderr
    assert "Traceback" not in run.stderr
