"""Shared memory: for two workers on one host. The reader copies each block once, straight out of the source's pool.

The kernel makes the copy (process_vm_readv): nothing is mapped, named or put into /dev/shm, so nothing can be left behind, guessed or
full, and the pool keeps its large pages, which shared mappings have on few systems. It reads only, and may do so between processes of
one user and one container; a source that dies is an error, not a signal. Who may read so may write, says the kernel: that nobody does
is this code's promise. Before anything is believed the reader finds the source's random token at the address it was told: a process id
that means another process is found out.
"""

import ctypes
import os
import secrets
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgpack

from kvferry.errors import BadFrame, RoadFailed
from kvferry.kv.memory import BlockMemory
from kvferry.kv.places import pack_slots, unpack_slots
from kvferry.kv.road import MIB, Cargo, Road
from kvferry.messages import Frame

MAX_OFFER_BYTES = 4096
TOKEN_BYTES = 32
MAX_ADDRESS = 2**63
MAX_PID = 2**31 - 1
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
"""Where it is 1, only parents may look into a process: a source then lets all processes of its user in, which includes debuggers."""
SET_PTRACER, ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


@cache
def _library() -> Any:
    """The C library, if it can read another process's memory; ctypes gives up the interpreter's lock for a call."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "process_vm_readv"):
        return None
    library.process_vm_readv.restype = ctypes.c_ssize_t
    return library


class OtherProcess:
    """Reads the memory of a process. Raises OSError."""

    def __init__(self, pid: int):
        library = _library()
        if library is None:
            raise OSError("this system cannot read another process's memory")
        self._read, self._pid = library.process_vm_readv, pid

    def read(self, address: int, into: memoryview) -> None:
        """As many bytes as `into` has."""
        num_bytes = len(into)
        here = _Piece(ctypes.addressof(ctypes.c_char.from_buffer(into)), num_bytes)
        there = _Piece(address, num_bytes)
        one, no_flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
        num_read = self._read(self._pid, ctypes.byref(here), one, ctypes.byref(there), one, no_flags)
        if num_read != num_bytes:
            number = ctypes.get_errno()
            why = f"{num_read} of {num_bytes} bytes" if num_read >= 0 else os.strerror(number)
            raise OSError(number, f"reading the memory of process {self._pid}: {why}")


class SameHostSource:
    def __init__(self, address: int, num_slots: int):
        self._token = ctypes.create_string_buffer(secrets.token_bytes(TOKEN_BYTES), TOKEN_BYTES)
        token = (ctypes.addressof(self._token), self._token.raw)
        offer = msgpack.packb([boot_id(), os.getpid(), *token, address, num_slots])
        assert isinstance(offer, bytes)
        self.offer = offer

    def open(self, ticket: bytes) -> "SameHostSource":
        """Nothing differs between two fetches: it is its own outlet."""
        del ticket
        return self

    def load(self, slots: Sequence[int]) -> Cargo:
        return Cargo(place=pack_slots(slots))

    def close(self) -> None:
        """Nothing is held."""


class SameHostInlet:
    def __init__(self, process: OtherProcess, address: int, num_slots: int):
        self._process, self._address, self._num_slots = process, address, num_slots
        self._slots: list[int] = []

    async def arrive(self, frame: Frame, num_blocks: int, block_bytes: int) -> None:
        del block_bytes
        self._slots = unpack_slots(frame.place, num_blocks)
        if max(self._slots) > self._num_slots:
            raise BadFrame("place", f"slot {max(self._slots)} lies beyond the source's {self._num_slots}")

    def copy(self, number: int, into: memoryview) -> None:
        try:
            self._process.read(self._address + self._slots[number] * len(into), into)
        except OSError as error:
            raise RoadFailed(str(error)) from error

    def close(self) -> None:
        """Nothing is held."""


def lay(memory: BlockMemory) -> SameHostSource | None:
    if memory.address is None or not Path("/proc/self").exists() or (library := _library()) is None:
        return None
    try:
        if YAMA.exists() and YAMA.read_text().strip() == "1":
            none = ctypes.c_ulong(0)
            library.prctl(ctypes.c_int(SET_PTRACER), ANY_PROCESS, none, none, none)
        return SameHostSource(memory.address, memory.num_slots)
    except OSError:  # a process that may not see what it needs of /proc
        return None


async def enter(offer: bytes, ticket: bytes) -> SameHostInlet:
    del ticket
    try:
        host, pid, token_address, token, address, num_slots = _fields_of(offer)
        if host != boot_id():
            raise OSError("it lives on another host")
        process, found = OtherProcess(pid), bytearray(TOKEN_BYTES)
        process.read(token_address, memoryview(found))
        if bytes(found) != token:
            raise OSError(f"process {pid} is another one than was met")
    except (OSError, ValueError) as error:
        raise RoadFailed(f"the source's memory cannot be read: {error}") from error
    return SameHostInlet(process, address, num_slots)


def _fields_of(offer: bytes) -> list[Any]:
    """Raises ValueError."""
    if len(offer) > MAX_OFFER_BYTES:
        raise ValueError(f"an offer of {len(offer)} bytes")
    try:
        values: Any = msgpack.unpackb(offer)
    except msgpack.UnpackException as error:
        raise ValueError(str(error)) from error
    kinds = (str, int, int, bytes, int, int)
    if not isinstance(values, list) or tuple(map(type, values)) != kinds:
        raise ValueError("not an offer of memory on this host")
    numbers = [value for value in values if isinstance(value, int)]
    if not all(0 <= number < MAX_ADDRESS for number in numbers) or values[1] > MAX_PID or len(values[3]) != TOKEN_BYTES:
        raise ValueError("an offer with a number out of range")
    return values


@cache
def boot_id() -> str:
    """Of the running kernel: equal in all of a host's containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# A frame costs a message and its acknowledgement; of its size, the digests of blocks that are sent for the first time.
ROAD = Road("shm", rank=20, frame_bytes=64 * MIB, lay=lay, enter=enter, is_read_in_place=True)
