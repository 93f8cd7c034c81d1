"""Messages of a fetch as bytes, and back, where a frame's blocks are copied no more often than they must be.

What is written is a `FetchResponse` (proto/kvferry/v1/fetch.proto), and read by any protobuf. A frame is put together in one copy,
from the slots into the message, and taken apart in none: its payload is a slice of what came. Everything else, and a frame with
fields that are not known here, goes through the generated classes.
"""

from google.protobuf.message import DecodeError

from kvferry import messages as m
from kvferry.errors import InvalidRequest
from kvferry.rpc import converter
from kvferry.rpc.v1 import fetch_pb2

DONE_UP = fetch_pb2.FetchRequest(done=fetch_pb2.FetchDone()).SerializeToString()
DONE_DOWN = fetch_pb2.FetchResponse(done=fetch_pb2.FetchDone()).SerializeToString()
"""Between two fetches of one call; no message of either."""

_FRAME = 0x12  # FetchResponse.frame: field 2, length-delimited
_NUMBER, _HEADER, _PAYLOAD, _PLACE = 0x08, 0x12, 0x1A, 0x22  # Frame's fields, 1 to 4


def fetch_down_to_bytes(value: m.FetchDown) -> bytes:
    if not isinstance(value, m.Frame):
        return converter.fetch_down_to_wire(value).SerializeToString()
    pieces = value.payload if isinstance(value.payload, tuple) else (value.payload,)
    num_payload_bytes = sum(len(piece) for piece in pieces)
    front = b"".join((bytes((_NUMBER,)), _varint(value.frame_number), _delimited(_HEADER, value.header)))
    if value.place:
        front += _delimited(_PLACE, value.place)
    front += bytes((_PAYLOAD,)) + _varint(num_payload_bytes)
    return b"".join((bytes((_FRAME,)), _varint(len(front) + num_payload_bytes), front, *pieces))


def fetch_down_from_bytes(raw: bytes) -> m.FetchDown:
    """Raises InvalidRequest for what is no such message."""
    if raw[:1] == bytes((_FRAME,)):
        frame = _frame_of(memoryview(raw))
        if frame is not None:
            return frame
    try:
        return converter.fetch_down_from_wire(fetch_pb2.FetchResponse.FromString(raw))
    except DecodeError as error:
        raise InvalidRequest(f"not a message of a fetch: {error}") from error


def fetch_up_to_bytes(value: m.FetchUp) -> bytes:
    return converter.fetch_up_to_wire(value).SerializeToString()


def fetch_up_from_bytes(raw: bytes) -> m.FetchUp:
    """Raises InvalidRequest for what is no such message."""
    try:
        return converter.fetch_up_from_wire(fetch_pb2.FetchRequest.FromString(raw))
    except DecodeError as error:
        raise InvalidRequest(f"not a message of a fetch: {error}") from error


def _frame_of(raw: memoryview) -> m.Frame | None:
    """None unless the message is one frame and nothing else, each field at most once."""
    number, fields = 0, dict[int, memoryview]()
    try:
        length, at = _read_varint(raw, 1)
        if at + length != len(raw):
            return None
        while at < len(raw):
            tag = raw[at]
            value, at = _read_varint(raw, at + 1)
            if tag == _NUMBER:
                number = value
            elif tag in (_HEADER, _PAYLOAD, _PLACE) and tag not in fields and at + value <= len(raw):
                fields[tag] = raw[at : at + value]
                at += value
            else:
                return None
    except IndexError:
        return None
    empty = raw[:0]
    header, place = bytes(fields.get(_HEADER, empty)), bytes(fields.get(_PLACE, empty))
    return m.Frame(number, header, fields.get(_PAYLOAD, empty), place) if number < 2**32 else None


def _delimited(tag: int, value: bytes) -> bytes:
    return bytes((tag,)) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(raw: memoryview, at: int) -> tuple[int, int]:
    """Value, and where it ends. Raises IndexError at the message's end, and for one of more than ten bytes."""
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError("a number too long")
