import asyncio

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import BadFrame
from kvferry.kv.block_id import chain, chain_root
from kvferry.kv.frame import block_digest, check_block, pack_header, unpack_header
from kvferry.kv.memory import BlockFormat
from kvferry.kv.roads.inline import InlineInlet
from kvferry.messages import Frame

FORMAT = BlockFormat("uint8", (1, 1, 1, 16, 4), 16, 64)
IDS = chain(chain_root("m", "uint8"), list(range(96)), 16)
BLOCKS = [memoryview(bytes([k]) * 64) for k in range(6)]
PAYLOAD = b"".join(BLOCKS[2:5])
HEADER = pack_header(FORMAT, 2, IDS[2:5], [block_digest(IDS[k], BLOCKS[k]) for k in (2, 3, 4)])


def read(header=HEADER, payload=PAYLOAD, first=2, ids=IDS, form=FORMAT) -> list[bytes]:
    blocks = unpack_header(header, form, first, ids)
    inlet, copies = InlineInlet(), [bytearray(form.block_bytes) for _ in blocks]
    asyncio.run(inlet.arrive(Frame(0, header, payload), len(blocks), form.block_bytes))
    for number, copy in enumerate(copies):
        inlet.copy(number, memoryview(copy))
    for block, copy in zip(blocks, copies, strict=True):
        check_block(block, memoryview(copy))
    return [bytes(copy) for copy in copies]


def test_what_is_packed_is_what_is_read():
    assert read() == [bytes(block) for block in BLOCKS[2:5]]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (dict(payload=PAYLOAD[:-1]), "truncated"),
        (dict(payload=PAYLOAD + b"x"), "truncated"),
        (dict(payload=b""), "truncated"),
        (dict(payload=PAYLOAD[64:128] + PAYLOAD[:64] + PAYLOAD[128:]), "digest"),
        (dict(first=1), "order"),
        (dict(ids=chain(chain_root("m", "uint8", b"other"), list(range(96)), 16)), "identity"),
        (dict(form=BlockFormat("float32", (1, 1, 1, 16, 4), 16, 64)), "layout"),
        (dict(form=BlockFormat("uint8", (1, 1, 2, 16, 2), 16, 64)), "shape"),
        (dict(header=b""), "header"),
        (dict(header=b"\x80\x04\x95pickle"), "header"),
        (dict(header=HEADER + b"x"), "header"),
        (dict(header=b"\x91" * 100_000), "header"),
    ],
)
def test_anything_else_is_refused_by_kind(change, kind):
    with pytest.raises(BadFrame) as error:
        read(**change)
    assert error.value.kind == kind


def test_a_header_that_lies_is_refused():
    fields = msgpack.unpackb(HEADER)
    for position, lie in (
        (0, 2),
        (1, "other"),
        (4, 16),
        (4, -1),
        (5, 16),
        (5, 2**60),
        (6, []),
        (7, [b"x"]),
        (6, "x"),
        (3, {}),
    ):
        lied = list(fields)
        lied[position] = lie
        with pytest.raises(BadFrame):
            read(header=msgpack.packb(lied))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_damaged_frame_is_ever_believed(data):
    raw = bytearray(HEADER + PAYLOAD)
    kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
    at = data.draw(st.integers(0, len(raw) - 1))
    if kind == "flip":
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del raw[at : at + data.draw(st.integers(1, 40))]
    else:
        raw[at:at] = data.draw(st.binary(min_size=1, max_size=10))
    with pytest.raises(BadFrame):
        read(bytes(raw[: len(HEADER)]), bytes(raw[len(HEADER) :]))
