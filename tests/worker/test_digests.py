"""Digests of a worker's blocks: those that it takes are the blocks', those that it keeps are of what lies there now."""

import pytest

from kvferry.engine.fake import BytesMemory
from kvferry.kv.frame import block_digest
from kvferry.kv.pool import BlockPool
from kvferry.worker import digests as digests_module
from kvferry.worker.digests import BlockDigests

NUM_SLOTS = 4
ROOT = b"root"


class Blocks:
    """Sealed blocks of a small pool, and how many digests were taken of them."""

    def __init__(self, monkeypatch):
        self.memory, self.pool, self.num_taken = BytesMemory(NUM_SLOTS, 16), BlockPool(NUM_SLOTS), 0
        self.digests = BlockDigests(self.pool, self.memory)
        monkeypatch.setattr(digests_module, "block_digest", self._take)

    def _take(self, block_id, block):
        self.num_taken += 1
        return block_digest(block_id, block)

    def seal(self, block_id, content):
        """The slot that was filled, and the one that has the block from now on."""
        hold = self.pool.open_hold("test")
        hold.reserve(1)
        slot = hold.take()
        self.memory.view(slot)[:] = bytes([content]) * len(self.memory.view(slot))
        sealed = hold.seal(slot, block_id, ROOT)
        hold.close()
        return slot, sealed

    def of(self, block_id, slot):
        (found,) = self.digests.of([block_id], [slot])
        assert found == block_digest(block_id, self.memory.view(slot))
        return found


@pytest.fixture
def blocks(monkeypatch):
    return Blocks(monkeypatch)


def test_a_digest_is_taken_once_for_as_long_as_the_slot_holds_the_block(blocks):
    slot, _ = blocks.seal(b"one", 1)
    assert blocks.of(b"one", slot) == blocks.of(b"one", slot)
    assert blocks.num_taken == 1
    blocks.pool.evict_all()
    while blocks.seal(b"one", 2)[1] != slot:
        blocks.pool.evict_all()
    blocks.of(b"one", slot)
    assert blocks.num_taken == 2


def test_what_was_checked_is_not_taken_again(blocks):
    slot, _ = blocks.seal(b"one", 1)
    blocks.digests.keep(b"one", slot, block_digest(b"one", blocks.memory.view(slot)))
    blocks.of(b"one", slot)
    assert blocks.num_taken == 0


def test_what_was_checked_in_a_slot_that_lost_is_not_taken_for_the_block_that_was_there_before(blocks):
    """Its bytes may be others: computed by another kernel."""
    first, _ = blocks.seal(b"one", 1)
    second, sealed = blocks.seal(b"one", 2)
    assert sealed == first != second
    blocks.digests.keep(b"one", second, block_digest(b"one", blocks.memory.view(second)))
    blocks.of(b"one", first)
    assert blocks.num_taken == 1


def test_some_are_known_and_some_are_not(blocks):
    slots = [blocks.seal(id_, k)[0] for k, id_ in enumerate((b"a", b"b", b"c"))]
    blocks.of(b"b", slots[1])
    expected = [
        block_digest(id_, blocks.memory.view(slot)) for id_, slot in zip((b"a", b"b", b"c"), slots, strict=True)
    ]
    assert blocks.digests.of((b"a", b"b", b"c"), slots) == expected
    assert blocks.num_taken == 3
