"""Other routers, each in front of stub workers: how they are started and ended. What they are asked is loadtest/router_contest.py's.

The peers' directory holds `routers`, a virtual environment with `vllm-router` and `sglang-router`; their policy is round robin, the one
that costs them least.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvferry.errors import ConfigurationError

READY_TIMEOUT_S = 40.0
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class PeerRouter:
    name: str
    python: Path
    module: tuple[str, ...]

    def command(self, port: int, metrics_port: int, workers: list[str]) -> list[str]:
        own = ["--host", HOST, "--port", str(port), "--prometheus-port", str(metrics_port)]
        return [str(self.python), "-I", "-m", *self.module, *own, "--policy", "round_robin", "--worker-urls", *workers]


def peer_routers(directory: Path) -> list[PeerRouter]:
    """Raises ConfigurationError if their environment is not there."""
    python = directory.absolute() / "routers" / "bin" / "python"
    if not python.exists():
        raise ConfigurationError(f"--peers {directory}: {python} is not there")
    return [
        PeerRouter("vllm-router", python, ("vllm_router.launch_router",)),
        PeerRouter("sglang-router", python, ("sglang_router.launch_router",)),
    ]


@contextlib.asynccontextmanager
async def stub_workers(count: int, step_s: float) -> AsyncIterator[list[str]]:
    """Their URLs."""
    async with contextlib.AsyncExitStack() as stack:
        urls: list[str] = []
        for _ in range(count):
            port = free_port()
            command = [sys.executable, "-m", "loadtest.stub_worker", str(port), str(step_s * 1e3)]
            await stack.enter_async_context(_process(command))
            urls.append(f"http://{HOST}:{port}")
            await _until_ready(urls[-1], "a stub worker")
        yield urls


@contextlib.asynccontextmanager
async def running(peer: PeerRouter, workers: list[str]) -> AsyncIterator[str]:
    """Its URL, once it serves. Raises ConfigurationError with its last words if it does not."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        async with _process(peer.command(port, free_port(), workers), log.fileno()):
            url = f"http://{HOST}:{port}"
            try:
                await _until_ready(url, peer.name)
            except ConfigurationError as error:
                log.seek(0)
                raise ConfigurationError(f"{error.message}: {log.read()[-300:].decode(errors='replace')}") from error
            yield url


@contextlib.asynccontextmanager
async def _process(command: list[str], output: int = asyncio.subprocess.DEVNULL) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with all of the session that it leads
        await process.wait()


async def _until_ready(url: str, name: str) -> None:
    try:
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(READY_TIMEOUT_S):
            while not await _is_healthy(client, url):
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise ConfigurationError(f"{name} at {url} does not become ready within {READY_TIMEOUT_S:g} s") from None


async def _is_healthy(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health")).status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    """Free when asked: what takes it has to be quick."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
