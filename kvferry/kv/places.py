"""How a frame names slots of the source's memory, on roads whose readers look there. Read as a stranger's word: bounded, checked."""

from collections.abc import Sequence
from typing import Any

import msgpack

from kvferry.errors import BadFrame

MAX_SLOT = 2**40


def pack_slots(slots: Sequence[int]) -> bytes:
    packed = msgpack.packb(list(slots))
    assert isinstance(packed, bytes)
    return packed


def unpack_slots(place: bytes, num_blocks: int) -> list[int]:
    """Raises BadFrame unless it is `num_blocks` slot numbers."""
    if num_blocks < 1 or len(place) > 16 + 9 * num_blocks:
        raise BadFrame("place", f"a place of {len(place)} bytes for {num_blocks} blocks")
    try:
        slots: Any = msgpack.unpackb(place)
    except (ValueError, msgpack.UnpackException) as error:
        raise BadFrame("place", f"not a list of slots: {error}") from error
    if not isinstance(slots, list) or len(slots) != num_blocks:
        raise BadFrame("place", f"not {num_blocks} slots")
    if not all(type(slot) is int and 0 <= slot < MAX_SLOT for slot in slots):
        raise BadFrame("place", "a slot is not a number of one")
    return slots
