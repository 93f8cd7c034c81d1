"""What gets to another machine: a checkout that Ray sends (`ray job submit --working-dir .`), and a wheel. All that runs, and little else."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvferry.engine.native.build import LEVELS, library_name

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 20 * 1024 * 1024


def test_a_checkout_is_small_and_runs_by_itself(tmp_path):
    from ray._private.runtime_env.packaging import create_package

    package = tmp_path / "sent.zip"
    create_package(str(ROOT), package, include_gitignore=True, excludes=[".git"])
    assert package.stat().st_size < MAX_BYTES
    with zipfile.ZipFile(package) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "sent")
    assert "kvferry/rpc/v1/registry_pb2.py" in names
    assert "kvferry/engine/native/decoder.c" in names
    assert "deploy/examples/ten_hosts.yaml" in names
    assert not [name for name in names if name.startswith(".venv/") or "__pycache__" in name]
    assert_runs_alone(tmp_path / "sent")


def assert_runs_alone(folder):
    """The programs and the command, from that folder and from none of this checkout's files."""
    code = "import deploy.cluster.controller as c, router.__main__, decode_worker.__main__, prefill_worker.__main__; print(c.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert str(folder) in run.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Its path. What the compiler would have made is a file that says which instruction set was asked for: compiling takes long."""
    folder = tmp_path_factory.mktemp("wheel")
    compiler = folder / "compiler"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho "$1" > "$last"\n')
    compiler.chmod(0o755)
    code = f"from hatchling.builders.wheel import WheelBuilder; print(*WheelBuilder({str(ROOT)!r}).build(directory={str(folder)!r}))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CC": str(compiler)},
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(run.stdout.strip().splitlines()[-1])


def test_a_wheel_carries_everything_that_runs_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    folders = {name.partition("/")[0] for name in names}
    assert {name for name in folders if ".dist-info" not in name} == {
        "kvferry", "router", "prefill_worker", "decode_worker", "deploy", "loadtest",
    }  # fmt: skip
    files = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    missing = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts} - names
    assert not missing, "stubs, C sources, examples and all code are in it"
    assert "kvferry/rpc/v1/registry_pb2.py" in names
    assert "kvferry/engine/native/decoder.c" in names
    assert "deploy/examples/ten_hosts.yaml" in names
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    with zipfile.ZipFile(wheel) as archive:
        assert "kvferry = deploy.cli:main" in archive.read(entry_points).decode()


@pytest.mark.skipif(
    (sys.platform, os.uname().machine) != ("linux", "x86_64"), reason="the decoder is built for this alone"
)
def test_a_wheel_carries_the_decoder_for_every_instruction_set_where_the_library_looks_for_it(wheel, tmp_path):
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    for level in LEVELS:
        built = tmp_path / "kvferry/engine/native/prebuilt" / library_name(level)
        assert built.read_text().strip() == level.flags[0]
    assert_runs_alone(tmp_path)
