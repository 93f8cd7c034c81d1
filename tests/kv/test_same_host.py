"""Blocks out of another process's memory. The other process is a real one, started for the test."""

import ast
import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

import kvferry
from kvferry.engine.fake import KV_BYTES, BytesMemory
from kvferry.errors import BadFrame, RoadFailed
from kvferry.kv.places import pack_slots
from kvferry.kv.roads.same_host import TOKEN_BYTES, SameHostSource, enter, lay
from kvferry.messages import Frame

BLOCK_BYTES = 4 * KV_BYTES
OWNER = """
import sys
from kvferry.engine.fake import BytesMemory
from kvferry.kv.roads.same_host import lay
memory = BytesMemory(8, 4, fill=0x11)
source = lay(memory)
print(repr(source.offer), flush=True)
sys.stdin.read()
"""
READER = """
import ast, asyncio, os, sys
from kvferry.errors import RoadFailed
from kvferry.kv.places import pack_slots
from kvferry.kv.roads.same_host import enter
from kvferry.messages import Frame
offer, user = map(ast.literal_eval, sys.argv[1:])
if user:
    os.setgroups([]), os.setgid(user), os.setuid(user)
async def main():
    try:
        inlet = await enter(offer, b"")
        for line in sys.stdin:
            copy = bytearray(256)
            await inlet.arrive(Frame(0, b"", b"", pack_slots([int(line)])), 1, 256)
            inlet.copy(0, memoryview(copy))
            print(repr(bytes(copy)), flush=True)
    except RoadFailed as failed:
        print(repr(failed.message), flush=True)
asyncio.run(main())
"""


@contextlib.contextmanager
def process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, *map(repr, arguments)]
    root = Path(kvferry.__file__).parents[1]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def heard(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    return ast.literal_eval(child.stdout.readline())


def asked(child: subprocess.Popen[str], slot: int) -> Any:
    """What the reading process copied out of it."""
    assert child.stdin is not None
    child.stdin.write(f"{slot}\n")
    child.stdin.flush()
    return heard(child)


def laid(memory: BytesMemory) -> SameHostSource:
    source = lay(memory)
    assert source is not None
    return source


def changed(offer: bytes, **fields: object) -> bytes:
    names = ("host", "pid", "token_address", "token", "address", "num_slots")
    values = dict(zip(names, msgpack.unpackb(offer), strict=True)) | fields
    return msgpack.packb(list(values.values()))


async def copy_of(offer: bytes, slot: int, num_bytes: int = BLOCK_BYTES) -> bytes:
    inlet, copy = await enter(offer, b""), bytearray(num_bytes)
    await inlet.arrive(Frame(0, b"", b"", pack_slots([slot])), 1, num_bytes)
    inlet.copy(0, memoryview(copy))
    inlet.close()
    return bytes(copy)


def open_files() -> list[str]:
    return os.listdir("/proc/self/fd")


def mapped_files() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if len(line.split()) > 5}


def test_another_process_copies_what_the_slots_hold_and_what_is_written_into_them_later():
    """Its parent's memory: not even a descendant of the reader is needed."""
    memory = BytesMemory(8, 4)
    source = laid(memory)
    with process(READER, source.offer, 0) as reader:
        for k in range(1, 4):
            for slot in (1, 8):
                memory.view(slot)[:] = block = bytes([k * 10 + slot]) * BLOCK_BYTES
                assert asked(reader, slot) == block


async def test_an_offer_is_believed_only_as_it_was_told():
    memory = BytesMemory(8, 4, fill=0x22)
    source = laid(memory)
    assert await copy_of(source.offer, 8) == b"\x22" * BLOCK_BYTES
    token_address = msgpack.unpackb(source.offer)[2]
    with process(OWNER) as owner:
        theirs = heard(owner)
        assert await copy_of(theirs, 8) == b"\x11" * BLOCK_BYTES
        for wrong in (
            dict(host="another machine"),
            dict(pid=owner.pid),
            dict(pid=os.getppid()),
            dict(pid=0),
            dict(pid=2**31 - 1),
            dict(pid=2**63 - 1),
            dict(token=bytes(TOKEN_BYTES)),
            dict(token=b""),
            dict(token=bytes(TOKEN_BYTES + 1)),
            dict(token_address=0),
            dict(token_address=token_address + 1),
            dict(token_address=2**63 - 1),
        ):
            with pytest.raises(RoadFailed, match="the source's memory cannot be read"):
                await enter(changed(source.offer, **wrong), b"")
        with pytest.raises(RoadFailed):
            await enter(changed(theirs, pid=os.getpid()), b"")


@pytest.mark.parametrize("field", ["pid", "token_address", "address", "num_slots"])
@pytest.mark.parametrize("lie", [-1, 2**63, 2**64 - 1, -(2**63), True, 1.5, None, "1", b"1", [1]])
async def test_an_offer_with_a_field_that_is_none_is_no_road(field, lie):
    source = laid(BytesMemory(8, 4))
    with pytest.raises(RoadFailed):
        await enter(changed(source.offer, **{field: lie}), b"")


@pytest.mark.parametrize("lie", [dict(address=0), dict(address=2**62), dict(address=2**63 - 1)])
async def test_slots_that_are_not_where_the_offer_says_break_the_road(lie):
    source = laid(BytesMemory(8, 4))
    with pytest.raises(RoadFailed):
        await copy_of(changed(source.offer, **lie), 1)


async def test_only_slots_that_were_offered_are_copied():
    source = laid(BytesMemory(8, 4))
    await copy_of(source.offer, 8)
    with pytest.raises(BadFrame, match="slot 9 lies beyond"):
        await copy_of(source.offer, 9)
    with pytest.raises(RoadFailed):
        await copy_of(changed(source.offer, num_slots=2**62), 2**40 - 1)


async def test_a_block_of_which_only_a_part_can_be_read_breaks_the_road():
    size, libc = mmap.PAGESIZE, ctypes.CDLL(None)
    pages = mmap.mmap(-1, 4 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert libc.mprotect(ctypes.c_void_p(address + 3 * size), ctypes.c_size_t(size), 0) == 0
    source = SameHostSource(address, 1)
    assert await copy_of(source.offer, 0, 2 * size) == bytes(2 * size)
    with pytest.raises(RoadFailed, match=f"{size} of {2 * size} bytes"):
        await copy_of(source.offer, 1, 2 * size)


async def test_an_owner_that_is_killed_breaks_the_road_and_leaves_nothing():
    files, mapped = open_files(), mapped_files()
    with process(OWNER) as owner:
        offer, copy = heard(owner), bytearray(BLOCK_BYTES)
        inlet = await enter(offer, b"")
        await inlet.arrive(Frame(0, b"", b"", pack_slots([1, 2])), 2, BLOCK_BYTES)
        inlet.copy(0, memoryview(copy))
        assert copy == b"\x11" * BLOCK_BYTES
        owner.kill()  # SIGKILL
        owner.wait()
        with pytest.raises(RoadFailed, match=f"reading the memory of process {owner.pid}"):
            inlet.copy(1, memoryview(copy))
        with pytest.raises(RoadFailed):
            await enter(offer, b"")
        inlet.close()
    assert open_files() == files
    assert mapped_files() == mapped
    assert not [name for name in os.listdir("/dev/shm") if "kvferry" in name]


async def test_a_fetch_opens_no_file_and_maps_none():
    with process(OWNER) as owner:
        offer = heard(owner)
        await copy_of(offer, 1)
        files, mapped = open_files(), mapped_files()
        inlet, copy = await enter(offer, b""), bytearray(BLOCK_BYTES)
        await inlet.arrive(Frame(0, b"", b"", pack_slots([1])), 1, BLOCK_BYTES)
        inlet.copy(0, memoryview(copy))
        assert (open_files(), mapped_files()) == (files, mapped)
        inlet.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_a_process_of_another_user_is_not_let_in():
    source = laid(BytesMemory(8, 4))
    with process(READER, source.offer, 65534) as reader:
        assert "Operation not permitted" in heard(reader)
