"""A worker that ends while its weights load: they go on loading, and the process's next worker waits for these."""

import asyncio
import os

import pytest

from kvferry.config import DecodeConfig, PrefillConfig, read_config
from kvferry.errors import ConfigurationError
from kvferry.worker import process


async def test_the_next_worker_of_a_process_waits_for_what_loads_and_loads_nothing_beside_it(tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("secret")
    os.chmod(tmp_path / "secret", 0o600)
    flags = [f"--secret-file={tmp_path / 'secret'}", "--router=127.0.0.1:1"]
    may_end, began = asyncio.Event(), list[str]()

    async def load(config):
        began.append(config.role)
        await may_end.wait()
        raise ConfigurationError("that was all")

    def serve(kind):
        return asyncio.ensure_future(process.serve_worker(read_config(kind, flags), lambda *given: None))

    monkeypatch.setattr(process, "_load", load)
    process.host.set(process.WorkerHost())
    first = serve(DecodeConfig)
    await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = serve(PrefillConfig)
    await asyncio.sleep(0.01)
    assert (began, second.done()) == (["decode"], False)
    may_end.set()
    with pytest.raises(ConfigurationError, match="that was all"):
        await second
    with pytest.raises(ConfigurationError, match="that was all"):
        await serve(PrefillConfig)
    assert began == ["decode", "prefill"], "one that failed is no reason not to try again"
