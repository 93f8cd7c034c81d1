"""Modules as processes of their own: what they say comes back, what goes wrong is told, and nothing is left."""

import psutil
import pytest

from kvferry.errors import KvferryError
from loadtest.own_process import said_by, serving


async def test_what_a_module_prints_in_answer_comes_back():
    assert await said_by("json.tool", "--compact", asked=b'{"a": 1}') == b'{"a":1}\n'


async def test_a_module_that_fails_is_heard_with_its_last_words():
    with pytest.raises(KvferryError, match=r"json\.tool --compact failed: Expecting value"):
        await said_by("json.tool", "--compact", asked=b"nothing")


async def test_a_module_that_serves_ends_with_the_block(tmp_path, monkeypatch):
    (tmp_path / "servant.py").write_text("import sys; print('here:', sys.argv[1], flush=True); sys.stdin.read()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with serving("servant", "7") as address:
        assert address == "here: 7"
        (process,) = psutil.Process().children()
    assert not process.is_running()


async def test_a_module_that_ends_before_it_serves_is_told():
    with pytest.raises(KvferryError, match="keyword ended before it could be asked"):
        async with serving("keyword"):
            pass
