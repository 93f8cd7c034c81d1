"""A reader as a process of its own: fetches the largest chain of a transport source over one road, again and again."""

import sys

from kvferry.kv.road import roads_called
from kvferry.process import run_process
from kvferry.rpc.links import GrpcDialer
from loadtest.transport_ends import SECRET, SIZES, ReaderEnd


async def fetch_for_ever(road: str, address: str) -> None:
    reader = ReaderEnd(GrpcDialer(SECRET), roads_called(road))
    while True:
        await reader.fetch(address, SIZES[-1])


if __name__ == "__main__":
    run_process(fetch_for_ever(*sys.argv[1:3]), with_parent=True)
