"""gRPC: the blocks ride in the frames of the fetch stream, several a message. Works between any two workers.

Backpressure is the stream's. The pieces of a payload are views of the slots; the wire's one copy joins them
(kvferry/rpc/frame_wire.py), and at the reader a block is a slice of the message that came.
"""

from collections.abc import Sequence

from kvferry.errors import BadFrame
from kvferry.kv.memory import BlockMemory
from kvferry.kv.road import MIB, Cargo, Road, copy_bytes
from kvferry.messages import Frame


class InlineSource:
    offer = b""

    def __init__(self, memory: BlockMemory):
        self._memory = memory

    def open(self, ticket: bytes) -> "InlineSource":
        """Nothing differs between two fetches: it is its own outlet."""
        del ticket
        return self

    def load(self, slots: Sequence[int]) -> Cargo:
        return Cargo(tuple(self._memory.view(slot).toreadonly() for slot in slots))

    def close(self) -> None:
        """Nothing is held."""


class InlineInlet:
    def __init__(self) -> None:
        self._pieces: list[memoryview] = []

    async def arrive(self, frame: Frame, num_blocks: int, block_bytes: int) -> None:
        payload = frame.payload
        if isinstance(payload, tuple):  # within one process the pieces come as they are
            if len(payload) != num_blocks or any(len(piece) != block_bytes for piece in payload):
                raise BadFrame("truncated", f"{len(payload)} pieces, expected {num_blocks} of {block_bytes} bytes")
            self._pieces = list(payload)
            return
        view = memoryview(payload)
        if len(view) != num_blocks * block_bytes:
            raise BadFrame("truncated", f"payload of {len(view)} bytes, expected {num_blocks * block_bytes}")
        self._pieces = [view[k * block_bytes : (k + 1) * block_bytes] for k in range(num_blocks)]

    def copy(self, number: int, into: memoryview) -> None:
        copy_bytes(self._pieces[number], into)

    def close(self) -> None:
        self._pieces = []


async def enter(offer: bytes, ticket: bytes) -> InlineInlet:
    del offer, ticket
    return InlineInlet()


ROAD = Road("grpc", rank=40, frame_bytes=8 * MIB, lay=InlineSource, enter=enter)
