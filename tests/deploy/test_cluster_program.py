"""An actor with a program inside: what it leaves on its node. Without Ray."""

import os
import subprocess
import sys

from deploy.cluster.program import _hold_secret
from kvferry.process import read_secret


def test_a_secret_that_is_held_can_be_read_again_and_again_and_by_nobody_else():
    file = _hold_secret("a secret")
    assert [read_secret(file), read_secret(file)] == ["a secret", "a secret"]
    assert file.stat().st_mode & 0o777 == 0o600
    os.close(int(file.name))
    assert not file.exists()


def test_an_actor_that_is_killed_leaves_no_secret_on_its_node(tmp_path):
    code = (
        "import asyncio, os; from deploy.cluster.program import ProgramActor\n"
        "async def main():\n"
        "    actor = ProgramActor('decode-1', 'the very secret')\n"
        "    print(actor._secret_file.read_text(), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())"
    )
    environment = {**os.environ, "KVFERRY_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert run.stdout == "the very secret\n", run.stderr
    left = [one for one in tmp_path.rglob("*") if one.is_file() and b"the very secret" in one.read_bytes()]
    assert not left
