"""A road is one module in kvferry/kv/roads, and nothing else names it: one that is put there is offered, tried, chosen and taken."""

import random
from pathlib import Path

import pytest

from kvferry.kv import road, roads
from loadtest.virtual_time import run_virtual
from router.live import wait_all
from tests.hand_off import expected, tokens_of
from tests.in_process import BLOCK, deployment, limits_of

MODULE = '''
"""By way of a file: the source writes a frame's blocks there, the reader maps none of it and reads."""

import os
import shutil
import tempfile
from pathlib import Path

from kvferry.errors import RoadFailed
from kvferry.kv.road import Cargo, Road


class Outlet:
    def __init__(self, memory, folder, ticket):
        self._memory, self._folder = memory, Path(folder, ticket.hex())
        self._folder.mkdir()

    def load(self, slots):
        path = self._folder / str(slots[0])
        path.write_bytes(b"".join(self._memory.view(slot) for slot in slots))
        return Cargo(place=os.fsencode(path))

    def close(self):
        shutil.rmtree(self._folder)


class Source:
    def __init__(self, memory):
        self._memory, self._folder = memory, tempfile.TemporaryDirectory()
        self.offer = os.fsencode(self._folder.name)

    def open(self, ticket):
        return Outlet(self._memory, self._folder.name, ticket)


class Inlet:
    async def arrive(self, frame, num_blocks, block_bytes):
        self._content = Path(os.fsdecode(frame.place)).read_bytes()

    def copy(self, number, into):
        into[:] = self._content[number * len(into) : (number + 1) * len(into)]

    def close(self):
        pass


async def enter(offer, ticket):
    if not Path(os.fsdecode(offer)).is_dir():
        raise RoadFailed("its folder is not seen from here")
    return Inlet()


ROAD = Road("file", rank=5, frame_bytes=1, lay=Source, enter=enter)
'''


@pytest.fixture
def fifth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "by_file.py").write_text(MODULE)
    monkeypatch.setattr(roads, "__path__", [*roads.__path__, str(tmp_path)])
    road.known_roads.cache_clear()
    yield road.known_roads()["file"]
    road.known_roads.cache_clear()


def test_a_module_that_is_put_there_is_a_road(fifth):
    assert next(iter(road.known_roads())) == "file", "its rank says when it is tried"
    assert road.roads_called("file") == (fifth,)
    assert road.roads_called("auto")[0] is fifth
    prompt = [random.Random(k).randrange(1000) for k in range(6 * BLOCK + 3)]

    async def main():
        async with deployment(limits=limits_of()) as d:
            d.start("p1", roads=road.roads_called("auto"))
            d.start("d1", roads=road.roads_called("auto"))
            await d.ready()
            live = d.submit(prompt, 5)
            await wait_all([live])
            assert tokens_of(live) == expected(prompt, 5)
            assert live.summary().road == "file"
            await d.quiet()

    run_virtual(main)
