"""Anonymous memory that other processes of this user and machine may map, read-only: what the shared-memory road exposes.

It is a memfd: it has no name in any file system, takes no room in /dev/shm, and is gone with the last process that has it mapped,
however that one ended. Once this process has mapped it for itself, it is sealed: it cannot be resized (a reader never meets SIGBUS)
and nobody can map it for writing or write to it any more, this user's other processes and root included. A reader opens it through
/proc by process and descriptor, and believes it only by the random token in its last page, so that a process id that was used again,
or that means another process in another container, is found out.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

SEAL_SHRINK, SEAL_GROW, SEAL_FUTURE_WRITE, SEAL_SEAL = 0x2, 0x4, 0x10, 0x1
ADD_SEALS, GET_SEALS = 1033, 1034
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """What a reader must know to map the memory."""

    boot_id: str
    pid: int
    descriptor: int
    num_bytes: int
    """Of the whole mapping; the token lies at the beginning of its last page."""
    token: bytes


class SharedPages:
    """`num_bytes` writable bytes here. Raises OSError where the system has no such memory."""

    def __init__(self, num_bytes: int):
        self._total = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._descriptor = os.memfd_create("kvferry-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, self._total)
            self.mapped = mmap.mmap(self._descriptor, self._total, flags=mmap.MAP_SHARED)
            self.mapped[-mmap.PAGESIZE : -mmap.PAGESIZE + TOKEN_BYTES] = self._token
            fcntl.fcntl(self._descriptor, ADD_SEALS, SEAL_SHRINK | SEAL_GROW | SEAL_FUTURE_WRITE | SEAL_SEAL)
        except BaseException:
            os.close(self._descriptor)
            raise
        with contextlib.suppress(OSError):  # a kernel without huge pages in shared memory
            self.mapped.madvise(mmap.MADV_HUGEPAGE)

    @property
    def place(self) -> SharedPlace:
        return SharedPlace(boot_id(), os.getpid(), self._descriptor, self._total, self._token)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._descriptor)


class MappedPages:
    """Another process's `SharedPages`, read-only. Raises OSError saying why it cannot be had."""

    def __init__(self, place: SharedPlace):
        if place.boot_id != boot_id():
            raise OSError("it lives on another machine")
        path = f"/proc/{place.pid}/fd/{place.descriptor}"
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._mapped = self._map(descriptor, place)
        finally:
            os.close(descriptor)  # the mapping stays
        self.view = memoryview(self._mapped)

    @staticmethod
    def _map(descriptor: int, place: SharedPlace) -> mmap.mmap:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != place.num_bytes:
            raise OSError(f"descriptor {place.descriptor} of process {place.pid} is something else")
        if not fcntl.fcntl(descriptor, GET_SEALS) & SEAL_SHRINK:
            raise OSError("it is not sealed: it could shrink while it is read")
        mapped = mmap.mmap(descriptor, place.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        if mapped[-mmap.PAGESIZE : -mmap.PAGESIZE + TOKEN_BYTES] != place.token:
            mapped.close()
            raise OSError(f"process {place.pid} is another one than was met")
        with contextlib.suppress(OSError):  # a kernel without huge pages in shared memory
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return mapped

    def close(self) -> None:
        """Idempotent. A view that somebody still has keeps the mapping until it is released."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._mapped.close()


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
