"""A module of ours as a process of its own: what it prints in answer to its standard input."""

import asyncio
import sys

from kvferry.errors import KvferryError


async def said_by(module: str, *arguments: str, asked: bytes = b"") -> bytes:
    """Until its end; it ends with this call. Raises KvferryError with its last words if it fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, complaint = await process.communicate(asked)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise KvferryError(
            f"{' '.join((module, *arguments))} failed: {complaint.decode(errors='replace').strip()[-300:]}"
        )
    return said
