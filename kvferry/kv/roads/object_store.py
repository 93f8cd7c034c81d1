"""Ray's object store: for two workers that are actors of one Ray cluster, on one node or on two.

The reader calls the source actor's streaming-generator method with the fetch's ticket, and so owns the references to what it yields:
one object a frame, a list of flat uint8 arrays, one a block, which the reader views in the store without copying and drops before the
next. An owner that dies, or a call that fails, breaks the road, and what had arrived stays. The cluster's control store is asked for a
source's actor once in the actor's life. Nothing here imports ray in a process that is no actor.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgpack
import numpy as np

from kvferry.errors import BadFrame, RoadFailed
from kvferry.kv.memory import BlockMemory
from kvferry.kv.road import MIB, Cargo, Road, copy_bytes
from kvferry.messages import Frame

logger = logging.getLogger(__name__)

METHOD = "ship_blocks"
"""What an actor with a worker inside must have: an async generator method that yields what `shipments(ticket)` does."""
OBJECT_TIMEOUT_S = 10.0
"""The notice of a frame comes after its blocks were handed to the store: an object that takes longer than this is lost."""
LOOK_UP_TIMEOUT_S = 5.0
MAX_ACTORS = 4096

Shipment = list[np.ndarray[Any, np.dtype[np.uint8]]]
_opened: dict[bytes, "asyncio.Future[asyncio.Queue[Shipment | None]]"] = {}
"""By ticket. The reader's call and its fetch come over two lines: either may be first."""
_actors: dict[bytes, Any] = {}
"""Of sources that were found, by offer, and so one a life; forgotten when a fetch from it breaks."""


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
    def __init__(self, generator: Any, forget: Callable[[], object]):
        self._generator: Any = generator
        self._forget = forget
        self._arrays: Shipment = []

    async def arrive(self, frame: Frame, num_blocks: int, block_bytes: int) -> None:
        del frame
        self._arrays = []  # the object before this one is given back
        try:
            async with asyncio.timeout(OBJECT_TIMEOUT_S):
                reference = await anext(self._generator)
                arrays: Any = await reference
        except StopAsyncIteration:
            self._forget()
            raise RoadFailed("the source's actor ended before the frame was there") from None
        except TimeoutError as error:
            self._forget()
            raise RoadFailed(f"an object did not come within {OBJECT_TIMEOUT_S:g} s") from error
        except _ray().exceptions.RayError as error:
            self._forget()
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
        logger.warning(
            "no blocks of this worker can go through Ray's object store: its actor has no name to find it by"
        )
        return None
    offer = msgpack.packb([context.namespace, name, context.get_actor_id()])
    assert isinstance(offer, bytes)
    return ObjectStoreSource(memory, offer)


async def enter(offer: bytes, ticket: bytes) -> ObjectStoreInlet:
    ray = _ray()
    if ray is None:
        raise RoadFailed("this worker is not an actor of a Ray cluster")
    actor = _actors.get(offer)
    if actor is None:
        try:
            actor = await _found(ray, offer)
        except RoadFailed as failed:
            logger.warning("no road through Ray's object store: %s", failed.message)
            raise
        _actors[offer] = actor
        while len(_actors) > MAX_ACTORS:
            del _actors[next(iter(_actors))]
    generator = getattr(actor, METHOD).options(num_returns="streaming").remote(ticket)
    return ObjectStoreInlet(generator, lambda: _actors.pop(offer, None))


async def _found(ray: Any, offer: bytes) -> Any:
    """The source's actor. Raises RoadFailed."""
    try:
        namespace, name, actor_id = msgpack.unpackb(offer)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RoadFailed(f"the source names no actor: {error}") from error
    try:
        async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
            actor = await asyncio.to_thread(_look_up, ray, namespace, name, actor_id)
    except TimeoutError as error:
        raise RoadFailed(f"Ray's control store does not say within {LOOK_UP_TIMEOUT_S:g} s where {name} is") from error
    except (ValueError, TypeError, OSError, ray.exceptions.RayError) as error:
        raise RoadFailed(f"Ray's control store does not say where {name} is: {error}") from error
    if actor is None:
        raise RoadFailed(f"no actor {name} with id {actor_id} is in this worker's Ray cluster")
    if getattr(actor, METHOD, None) is None:
        raise RoadFailed(f"actor {name} has no method {METHOD}")
    return actor


def _look_up(ray: Any, namespace: str, name: str, actor_id: str) -> Any:
    """None if there is none. Asks the control store: not for an event loop's thread."""
    for one in _namespaces(ray, namespace, name):
        with contextlib.suppress(ValueError):
            actor = ray.get_actor(name, one)
            if actor._actor_id.hex() == actor_id:
                return actor
    return None


def _namespaces(ray: Any, first: str, name: str) -> Iterator[str]:
    """An actor knows the namespace of its job, and may have been put into another one."""
    yield first
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["name"] == name and one["namespace"] != first:
            yield one["namespace"]


# An object costs some milliseconds, whatever its size.
ROAD = Road("ray", rank=30, frame_bytes=48 * MIB, lay=lay, enter=enter)
