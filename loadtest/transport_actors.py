"""`kvferry bench transport` over Ray's object store: source and reader as two actors of a Ray that is started for it.

Compared with put + get + one copy of the same arrays, in objects of the same sizes, between the same two actors.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import ray

from kvferry.kv.road import roads_called
from kvferry.kv.roads.object_store import Shipment, shipments
from kvferry.rpc.links import GrpcDialer
from kvferry.worker.allocation import keep_freed_memory
from loadtest.transport_ends import SECRET, ReaderEnd, Size, SourceEnd

STORE_BYTES = 1024 * 1024 * 1024
ROAD = "ray"


class SourceActor:
    """A source within an actor."""

    async def start(self) -> str:
        """Its address."""
        keep_freed_memory()
        self._end = SourceEnd(roads_called(ROAD))
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.ensure_future(self._end.serve(address.set_result))
        return await address

    async def ship_blocks(self, ticket: bytes) -> AsyncIterator[Shipment]:
        async for shipment in shipments(ticket):
            yield shipment

    async def put(self, size: Size, blocks_per_object: int) -> list[Any]:
        """References to the blocks, put as they are."""
        blocks = [np.frombuffer(block, np.uint8) for block in self._end.blocks_of(size)]
        return [ray.put(blocks[k : k + blocks_per_object]) for k in range(0, len(blocks), blocks_per_object)]


class ReaderActor:
    """A reader within an actor."""

    async def measure(
        self, source: Any, address: str, sizes: Sequence[Size], num_rounds: int
    ) -> tuple[int, list[list[list[float]]]]:
        """Bytes of a block; by size the seconds of fetches and of what they are compared with."""
        keep_freed_memory()
        (road,) = roads_called(ROAD)
        dialer = GrpcDialer(SECRET)
        reader = ReaderEnd(dialer, (road,))
        blocks_per_object, measured = reader.frame_bytes(road) // reader.block_bytes, list[list[list[float]]]()
        for size in sizes:
            fetches, bares = list[float](), list[float]()
            await reader.fetch(address, size)
            for _ in range(num_rounds):
                fetches.append(await reader.fetch(address, size))
                bares.append(await _bare(reader, source, size, blocks_per_object))
            measured.append([fetches, bares])
        await dialer.close()
        return reader.block_bytes, measured


async def _bare(reader: ReaderEnd, source: Any, size: Size, blocks_per_object: int) -> float:
    slot, began = 1, time.perf_counter()
    for reference in await source.put.remote(size, blocks_per_object):
        for array in await reference:
            reader.memory.view(slot)[:] = array.data
            slot += 1
    return time.perf_counter() - began


@contextlib.contextmanager
def _local_ray() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace=f"kvferry-bench-{os.getpid()}",
    )
    try:
        yield
    finally:
        ray.shutdown()


def measure_in_actors(sizes: Sequence[Size], num_rounds: int) -> tuple[int, list[list[list[float]]]]:
    """As `ReaderActor.measure`."""
    with _local_ray():
        source: Any = ray.remote(SourceActor).options(name="source", num_cpus=0).remote()
        reader: Any = ray.remote(ReaderActor).options(name="reader", num_cpus=0).remote()
        address = ray.get(source.start.remote())
        return ray.get(reader.measure.remote(source, address, sizes, num_rounds))
