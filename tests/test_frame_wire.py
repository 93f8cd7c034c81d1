import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry import messages as m
from kvferry.errors import InvalidRequest
from kvferry.rpc.frame_wire import fetch_down_from_bytes, fetch_down_to_bytes, fetch_up_from_bytes, fetch_up_to_bytes
from kvferry.rpc.v1 import fetch_pb2

FRAMES = st.builds(
    m.Frame, st.integers(0, 2**32 - 1), st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=300)
)


def plain(frame: m.Frame) -> m.Frame:
    return m.Frame(frame.frame_number, frame.header, bytes(frame.payload), frame.place)


@given(FRAMES)
def test_what_we_write_protobuf_reads_and_the_other_way_round(frame):
    ours = fetch_down_to_bytes(frame)
    wire = fetch_pb2.FetchResponse.FromString(ours).frame
    assert (wire.frame_number, wire.header, wire.payload, wire.place) == (
        frame.frame_number, frame.header, frame.payload, frame.place,
    )  # fmt: skip
    theirs = fetch_pb2.FetchResponse(frame=wire).SerializeToString()
    assert plain(fetch_down_from_bytes(theirs)) == plain(fetch_down_from_bytes(ours)) == frame


def test_pieces_are_joined_once_and_a_payload_is_a_slice_of_the_message():
    pieces = tuple(memoryview(bytes([k]) * 1000) for k in range(5))
    raw = fetch_down_to_bytes(m.Frame(300, b"header", pieces))
    frame = fetch_down_from_bytes(raw)
    assert bytes(frame.payload) == b"".join(pieces)
    assert isinstance(frame.payload, memoryview)
    assert frame.payload.obj is raw


@settings(max_examples=300)
@given(FRAMES, st.data())
@example(m.Frame(0, b"", b""), None)
def test_damaged_bytes_are_a_frame_or_an_error_and_never_anything_else(frame, data):
    raw = bytearray(fetch_down_to_bytes(frame))
    if data is not None:
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    for read in (fetch_down_from_bytes, fetch_up_from_bytes):
        try:
            read(bytes(raw))
        except InvalidRequest:
            pass


@pytest.mark.parametrize(
    "raw", [b"", b"\x12", b"\x12\x05ab", b"\x12" + b"\xff" * 11, b"\x80\x04\x95pickle", b"\x12\x02\x1a\x7f"]
)
def test_bytes_that_are_no_message_are_refused(raw):
    with pytest.raises(InvalidRequest):
        fetch_down_from_bytes(raw)


def test_messages_up_go_through_the_generated_classes():
    probe = m.FetchProbe("shm", b"t", 3)
    assert fetch_up_from_bytes(fetch_up_to_bytes(probe)) == probe
