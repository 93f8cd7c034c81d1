"""Ray's object store: for two workers that are actors of one Ray cluster, on one node or on two.

The reader calls the source actor's streaming-generator method with the fetch's ticket, and so owns the references to what it yields:
one object a frame, a list of flat uint8 arrays, one a block, which the reader views in the store without copying and drops before the
next. An owner that dies, or a call that fails, breaks the road, and what had arrived stays. Nothing here imports ray in a process
that is no actor.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgpack
import numpy as np

from kvferry.errors import BadFrame, RoadFailed
from kvferry.kv.memory import BlockMemory
from kvferry.kv.road import MIB, Cargo, Road, copy_bytes
from kvferry.messages import Frame

METHOD = "ship_blocks"
"""What an actor with a worker inside must have: an async generator method that yields what `shipments(ticket)` does."""
OBJECT_TIMEOUT_S = 10.0
"""The notice of a frame comes after its blocks were handed to the store: an object that takes longer than this is lost."""
LOOK_UP_TIMEOUT_S = 5.0

Shipment = list[np.ndarray[Any, np.dtype[np.uint8]]]
_opened: dict[bytes, "asyncio.Future[asyncio.Queue[Shipment | None]]"] = {}
"""By ticket. The reader's call and its fetch come over two lines: either may be first."""


def _ray() -> Any:
    """The module, in a process that is an actor; None in any other."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return None
    return ray


async def shipments(ticket: bytes) -> AsyncIterator[Shipment]:
    """What the source loads for the fetch of that ticket, until the fetch ends; an unknown ticket gets nothing."""
    opened = _opened.setdefault(ticket, asyncio.get_running_loop().create_future())
    try:
        async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
            queue = await asyncio.shield(opened)
    except TimeoutError:
        return
    finally:
        if not opened.done() and _opened.get(ticket) is opened:
            del _opened[ticket]
    while (shipment := await queue.get()) is not None:
        yield shipment


class ObjectStoreSource:
    def __init__(self, memory: BlockMemory, offer: bytes):
        self._memory, self.offer = memory, offer

    def open(self, ticket: bytes) -> "ObjectStoreOutlet":
        return ObjectStoreOutlet(self._memory, ticket)


class ObjectStoreOutlet:
    def __init__(self, memory: BlockMemory, ticket: bytes):
        self._memory, self._ticket = memory, ticket
        self._queue: asyncio.Queue[Shipment | None] = asyncio.Queue()
        opened = _opened.get(ticket)
        if opened is None or opened.done():
            opened = _opened[ticket] = asyncio.get_running_loop().create_future()
        opened.set_result(self._queue)

    def load(self, slots: Sequence[int]) -> Cargo:
        self._queue.put_nowait([np.frombuffer(self._memory.view(slot), np.uint8) for slot in slots])
        return Cargo()

    def close(self) -> None:
        self._queue.put_nowait(None)
        _opened.pop(self._ticket, None)


class ObjectStoreInlet:
    def __init__(self, generator: Any):
        self._generator: Any = generator
        self._arrays: Shipment = []

    async def arrive(self, frame: Frame, num_blocks: int, block_bytes: int) -> None:
        del frame
        self._arrays = []  # the object before this one is given back
        try:
            async with asyncio.timeout(OBJECT_TIMEOUT_S):
                reference = await anext(self._generator)
                arrays: Any = await reference
        except StopAsyncIteration:
            raise RoadFailed("the source's actor ended before the frame was there") from None
        except TimeoutError as error:
            raise RoadFailed(f"an object did not come within {OBJECT_TIMEOUT_S:g} s") from error
        except _ray().exceptions.RayError as error:
            raise RoadFailed(f"the object is lost: {error}") from error
        is_shipment = isinstance(arrays, list) and all(
            isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.nbytes == block_bytes
            for array in arrays
        )
        if not is_shipment or len(arrays) != num_blocks:
            raise BadFrame("truncated", f"an object that is not {num_blocks} blocks of {block_bytes} bytes")
        self._arrays = arrays

    def copy(self, number: int, into: memoryview) -> None:
        copy_bytes(self._arrays[number].data, into)

    def close(self) -> None:
        """Dropping the generator drops what it has yielded; the source ends it with the fetch."""
        self._generator, self._arrays = None, []


def lay(memory: BlockMemory) -> ObjectStoreSource | None:
    ray = _ray()
    if ray is None:
        return None
    context = ray.get_runtime_context()
    name = context.get_actor_name()
    if not name:
        return None
    offer = msgpack.packb([context.namespace, name, context.get_actor_id()])
    assert isinstance(offer, bytes)
    return ObjectStoreSource(memory, offer)


async def enter(offer: bytes, ticket: bytes) -> ObjectStoreInlet:
    ray = _ray()
    if ray is None:
        raise RoadFailed("this worker is not an actor of a Ray cluster")
    try:
        namespace, name, actor_id = msgpack.unpackb(offer)
        async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
            actor: Any = await asyncio.to_thread(ray.get_actor, name, namespace)
    except (ValueError, TypeError, TimeoutError, msgpack.UnpackException, ray.exceptions.RayError) as error:
        raise RoadFailed(f"the source's actor cannot be found: {error}") from error
    if actor._actor_id.hex() != actor_id:
        raise RoadFailed(f"actor {name} is another one than was met")
    method = getattr(actor, METHOD, None)
    if method is None:
        raise RoadFailed(f"actor {name} has no method {METHOD}")
    return ObjectStoreInlet(method.options(num_returns="streaming").remote(ticket))


ROAD = Road("ray", rank=30, frame_bytes=16 * MIB, lay=lay, enter=enter)
