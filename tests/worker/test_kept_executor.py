"""A step that outlives its worker writes into the next one's memory: no next pool before it has ended."""

import asyncio
import os
import socket
import threading
from typing import Any

import pytest

from kvferry.config import PrefillConfig, read_config
from kvferry.engine.engine import fake_engine
from kvferry.engine.plan import Chunk, Plan, StepResult
from kvferry.engine.roofline import Ceilings
from kvferry.errors import ConfigurationError
from kvferry.worker import kept_executor, process
from kvferry.worker.kept_executor import KeptExecutor
from kvferry.worker.loop import ThreadExecutor
from prefill_worker.worker import PrefillWorker

PLAN = Plan(1, (Chunk(0, (1,), 0, (1,)),))


class Held:
    """A runner whose step takes until it is let go."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def run(self, plan: Plan) -> StepResult:
        self.has_begun.set()
        assert self.may_end.wait(20)
        return StepResult({})


async def left_running(runner: Held, executor: Any) -> None:
    """As a worker does whose grace is over."""
    step = asyncio.ensure_future(executor.execute(PLAN))
    assert await asyncio.to_thread(runner.has_begun.wait, 10)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step


async def test_it_settles_once_the_step_that_was_left_running_has_ended():
    runner = Held()
    executor = KeptExecutor.of(ThreadExecutor(runner))
    await executor.settle()
    await left_running(runner, executor)
    settled = asyncio.ensure_future(executor.settle())
    await asyncio.sleep(0.05)
    assert not settled.done()
    runner.may_end.set()
    await asyncio.wait_for(settled, 10)
    await executor.settle()


async def test_the_next_worker_of_a_process_does_not_listen_before_the_last_step_of_the_one_before(tmp_path):
    (tmp_path / "secret").write_text("secret")
    os.chmod(tmp_path / "secret", 0o600)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    config = read_config(
        PrefillConfig, [f"--secret-file={tmp_path / 'secret'}", f"--port={port}", "--router=127.0.0.1:1"]
    )
    runner, engine = Held(), fake_engine(8)
    executor = KeptExecutor.of(ThreadExecutor(runner))
    await left_running(runner, executor)
    process.host.set(process.WorkerHost(process.Loaded(engine, executor, Ceilings())))
    serving = asyncio.ensure_future(process.serve_worker(config, PrefillWorker))
    try:
        await asyncio.sleep(0.3)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        runner.may_end.set()
        async with asyncio.timeout(10):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(0.02)
        writer.close()
    finally:
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving


async def test_a_step_that_never_ends_is_an_error_and_no_wait_for_ever(monkeypatch):
    monkeypatch.setattr(kept_executor, "SETTLE_S", 0.1)
    runner = Held()
    executor = KeptExecutor.of(ThreadExecutor(runner))
    await left_running(runner, executor)
    with pytest.raises(ConfigurationError, match="has not ended"):
        await executor.settle()
    runner.may_end.set()
    await asyncio.wait_for(executor.settle(), 10)
