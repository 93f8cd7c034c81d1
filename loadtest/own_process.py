"""A module of ours as a process of its own: what it prints in answer to its standard input, or where it serves."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from kvferry.errors import KvferryError

PIPE = asyncio.subprocess.PIPE


async def said_by(module: str, *arguments: str, asked: bytes = b"") -> bytes:
    """Until its end; it ends with this call. Raises KvferryError with its last words if it fails."""
    async with running(module, *arguments, stderr=PIPE) as process:
        said, complaint = await process.communicate(asked)
    if process.returncode:
        raise KvferryError(
            f"{' '.join((module, *arguments))} failed: {complaint.decode(errors='replace').strip()[-300:]}"
        )
    return said


@contextlib.asynccontextmanager
async def serving(module: str, *arguments: str) -> AsyncIterator[str]:
    """The address that is its first line. It ends with the block. Raises KvferryError if it ends before it has one."""
    async with running(module, *arguments) as process:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        if not address:
            raise KvferryError(f"{' '.join((module, *arguments))} ended before it could be asked")
        yield address


@contextlib.asynccontextmanager
async def running(module: str, *arguments: str, stderr: int | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    """Killed with the block, if it has not ended."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdin=PIPE, stdout=PIPE, stderr=stderr
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
