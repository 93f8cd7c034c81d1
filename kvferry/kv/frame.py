"""Frames: whole blocks on the wire, self-describing, and believed only after every check.

A frame is a msgpack header (version, layout, dtype, shape, token range, ids, digests) and the blocks' raw bytes, which come over a
road. A digest is xxh3-128 over the block's id and bytes: content and identity in one. A reader unpacks a header with what it
expects, and checks the digests over its own copies; anything else raises `BadFrame`, whose `kind` is counted. No pickle; the header
is bounded before it is parsed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgpack
import xxhash

from kvferry.errors import BadFrame
from kvferry.kv.memory import BlockFormat

FRAME_VERSION = 1
MAX_HEADER_BYTES = 64 * 1024
MAX_BLOCKS = 1024
"""In one frame, so that the header stays within its bound."""
PROBE_IDS = (bytes(16),) * MAX_BLOCKS
"""Ids and digests in the frame of a probe: its blocks are whatever some slots hold, and nobody keeps them."""
FIELDS: tuple[str, ...] = ("version", "layout", "dtype", "shape", "first_token", "num_tokens", "ids", "digests")


def block_digest(block_id: bytes, block: bytes | memoryview) -> bytes:
    """16 bytes over identity and content."""
    digest = xxhash.xxh3_128(block_id)
    digest.update(block)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class FrameBlock:
    """One block of a checked header: its place in the chain, its id, and the digest that the reader's copy must have."""

    position: int
    block_id: bytes
    digest: bytes


def pack_header(
    block_format: BlockFormat, first_block: int, block_ids: Sequence[bytes], digests: Sequence[bytes]
) -> bytes:
    """The header of the blocks `first_block`... of a chain."""
    header = msgpack.packb(
        [
            FRAME_VERSION,
            block_format.layout,
            block_format.dtype,
            list(block_format.shape),
            first_block * block_format.block_size,
            len(block_ids) * block_format.block_size,
            list(block_ids),
            list(digests),
        ],
        use_bin_type=True,
    )
    assert isinstance(header, bytes)
    return header


def unpack_header(
    header: bytes, block_format: BlockFormat, first_block: int, chain_ids: Sequence[bytes]
) -> list[FrameBlock]:
    """The blocks that a frame says it has, if they are the next ones of the chain: `first_block` is expected next.

    Their bytes come over a road (kvferry/kv/road.py) and are believed by `check_block`.
    """
    fields = _parse(header)
    if fields["version"] != FRAME_VERSION:
        raise BadFrame("version", f"frame version {fields['version']!r}, this worker reads {FRAME_VERSION}")
    for name, expected in (
        ("layout", block_format.layout),
        ("dtype", block_format.dtype),
        ("shape", list(block_format.shape)),
    ):
        if fields[name] != expected:
            raise BadFrame(
                "layout" if name != "shape" else "shape", f"frame {name} {fields[name]!r}, expected {expected!r}"
            )
    ids, digests, size = fields["ids"], fields["digests"], block_format.block_size
    if not ids or len(ids) != len(digests) or fields["num_tokens"] != len(ids) * size:
        raise BadFrame("header", f"{len(ids)} ids, {len(digests)} digests and {fields['num_tokens']} tokens disagree")
    if fields["first_token"] != first_block * size:
        raise BadFrame("order", f"frame begins at token {fields['first_token']}, expected {first_block * size}")
    if list(ids) != list(chain_ids[first_block : first_block + len(ids)]):
        raise BadFrame("identity", f"frame names other blocks than those asked for at block {first_block}")
    return [FrameBlock(first_block + k, ids[k], digests[k]) for k in range(len(ids))]


def claimed_end(header: bytes) -> int:
    """The token behind those that the frame says it has, whatever is true of it; 0 if that cannot be read."""
    try:
        fields = _parse(header)
    except BadFrame:
        return 0
    return fields["first_token"] + fields["num_tokens"]


def check_block(block: FrameBlock, copy: memoryview) -> None:
    """Raises `BadFrame` unless the reader's own `copy` is what the digest says."""
    if block_digest(block.block_id, copy) != block.digest:
        raise BadFrame("digest", f"block {block.position} is damaged: its digest does not fit its bytes")


@lru_cache(maxsize=1)
def _parse(header: bytes) -> dict[str, Any]:
    """Nobody changes it: a reader looks at each header twice, when it comes and when its blocks are taken."""
    if len(header) > MAX_HEADER_BYTES:
        raise BadFrame("header", f"header of {len(header)} bytes, at most {MAX_HEADER_BYTES}")
    try:
        values = msgpack.unpackb(header, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise BadFrame("header", f"not a frame header: {error}") from error
    if not isinstance(values, list) or len(values) != len(FIELDS):
        raise BadFrame("header", "not a frame header: wrong number of fields")
    fields: dict[str, Any] = dict(zip(FIELDS, values, strict=True))
    kinds = {
        "version": int,
        "layout": str,
        "dtype": str,
        "shape": list,
        "first_token": int,
        "num_tokens": int,
        "ids": list,
    }
    for name, kind in (*kinds.items(), ("digests", list)):
        if type(fields[name]) is not kind:
            raise BadFrame("header", f"field {name} is {type(fields[name]).__name__}, not {kind.__name__}")
    for name in ("ids", "digests"):
        if not all(type(item) is bytes and len(item) == 16 for item in fields[name]):
            raise BadFrame("header", f"{name} are not all of 16 bytes")
    return fields
