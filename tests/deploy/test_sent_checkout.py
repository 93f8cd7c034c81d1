"""What Ray sends of a checkout to a cluster's nodes (`ray job submit --working-dir .`): all that runs, and little else."""

import subprocess
import sys
import zipfile
from pathlib import Path

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
    code = "import deploy.cluster.controller as c, router.__main__, decode_worker.__main__, prefill_worker.__main__; print(c.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "sent", env={"PYTHONPATH": str(tmp_path / "sent")}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert str(tmp_path / "sent") in run.stdout
