"""The block pool: which slot is free, being filled, or holds which block; who refers to it; what goes first.

It counts slots and names and never looks inside a request, and never touches the bytes (engine/block memory does). What a
request has of the pool, it has through one `Hold`; closing the hold gives everything back. Slot 0 is for padding, never for a
block. Not thread-safe: it belongs to the worker's event loop. Pure: no clock, no I/O; recency is a count of uses.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, KeysView
from dataclasses import dataclass
from enum import Enum

from kvferry.errors import PoolExhausted
from kvferry.messages import SlotCounts


class SlotState(Enum):
    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"


TRANSITIONS = frozenset(
    {
        (SlotState.FREE, SlotState.FILLING),  # reserved by one hold
        (SlotState.FILLING, SlotState.FREE),  # given back
        (SlotState.FILLING, SlotState.SEALED),  # whole, checked, named
        (SlotState.SEALED, SlotState.FREE),  # evicted
    }
)


@dataclass(slots=True)
class _Slot:
    state: SlotState = SlotState.FREE
    num_references: int = 0
    last_use: int = 0
    seal_number: int = 0
    block_id: bytes = b""
    parent_id: bytes = b""
    is_announced: bool = False


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """Taken when a loop is idle. `leaks` names every hold that is still open, with its slots."""

    counts: SlotCounts
    leaks: dict[str, int]
    errors: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        return not self.leaks and not self.errors


class PoolWatch:
    """What was announced, and evicted after it had been, since the last `take`; the first one has all that is announced.

    An id is in at most one of the two: the last thing that happened to it counts. An evicted one may never have been told. Both are as
    they happened, and not as a set has them: the same run is the same, whatever process it is in.
    """

    def __init__(self, pool: "BlockPool"):
        self._pool = pool
        self.sealed: dict[bytes, None] = {}
        self.evicted: dict[bytes, None] = {}
        self.start_again()

    def start_again(self) -> None:
        """The next `take` has everything."""
        self.sealed, self.evicted = dict.fromkeys(self._pool.announced_block_ids()), {}

    def take(self) -> tuple[KeysView[bytes], KeysView[bytes]]:
        """(sealed, evicted): no id is in both."""
        changes = self.sealed.keys(), self.evicted.keys()
        self.sealed, self.evicted = {}, {}
        return changes

    def close(self) -> None:
        self._pool.unwatch(self)


class BlockPool:
    """`num_slots` slots besides the padding slot 0. The pool owns the states; holds own the references."""

    def __init__(self, num_slots: int):
        if num_slots < 1:
            raise ValueError(f"a pool needs at least one slot, got {num_slots}")
        self.num_slots = num_slots
        self._slots = [_Slot() for _ in range(num_slots + 1)]
        self._free = list(range(num_slots, 0, -1))
        self._index: dict[bytes, int] = {}
        self._num_children: Counter[bytes] = Counter()  # sealed blocks by their parent's id
        self._evictable: list[tuple[int, int]] = []  # heap of (last use, slot); stale entries are skipped
        self._num_cached = 0
        self._num_filling = 0
        self._clock = 0
        self._num_seals = 0
        self._holds: set[Hold] = set()
        self._watches: list[PoolWatch] = []
        self.num_evictions = 0

    def open_hold(self, owner: str) -> "Hold":
        """`owner` is for people: it names the leak, should there be one."""
        hold = Hold(self, owner)
        self._holds.add(hold)
        return hold

    def __contains__(self, block_id: bytes) -> bool:
        return block_id in self._index

    def num_sealed_prefix(self, block_ids: list[bytes]) -> int:
        """How many of a chain's first blocks are sealed here."""
        for count, block_id in enumerate(block_ids):
            if block_id not in self._index:
                return count
        return len(block_ids)

    @property
    def num_available(self) -> int:
        """Slots that a reservation can have now: free ones and those that can be evicted."""
        return len(self._free) + self._num_cached

    @property
    def counts(self) -> SlotCounts:
        return SlotCounts(
            num_free=len(self._free),
            num_filling=self._num_filling,
            num_live=len(self._index) - self._num_cached,
            num_cached=self._num_cached,
        )

    def seal_number(self, number: int) -> int:
        """Of what a sealed slot holds: never the same again, whatever is sealed there later."""
        return self._slots[number].seal_number

    def sealed_block_ids(self) -> Iterator[bytes]:
        return iter(self._index)

    def announced_block_ids(self) -> Iterator[bytes]:
        return (slot.block_id for slot in self._slots if slot.is_announced)

    def announce(self, block_id: bytes) -> None:
        """Others shall know that this block is here, if it is. Idempotent."""
        number = self._index.get(block_id)
        if number is None or self._slots[number].is_announced:
            return
        self._slots[number].is_announced = True
        for watch in self._watches:
            watch.evicted.pop(block_id, None)
            watch.sealed[block_id] = None

    def watch(self) -> PoolWatch:
        """To be closed by who opened it."""
        watch = PoolWatch(self)
        self._watches.append(watch)
        return watch

    def unwatch(self, watch: PoolWatch) -> None:
        self._watches.remove(watch)

    def evict_all(self) -> int:
        """Gives up every block that nobody refers to; returns how many."""
        count = 0
        while self._num_cached:
            self._evict_one()
            count += 1
        return count

    def audit(self) -> PoolAudit:
        """Counts everything anew. `errors` is empty unless the pool itself is broken."""
        states = Counter(slot.state for slot in self._slots[1:])
        references = Counter(slot for hold in self._holds for slot in hold.references)
        errors: list[str] = []
        children = Counter(slot.parent_id for slot in self._slots if slot.state is SlotState.SEALED)
        if children != self._num_children:
            errors.append("the counts of blocks by parent are not those of the sealed slots")
        for number, slot in enumerate(self._slots[1:], start=1):
            if slot.num_references != references[number]:
                errors.append(f"slot {number}: {slot.num_references} references, holds know {references[number]}")
            if slot.state is SlotState.SEALED and self._index.get(slot.block_id) != number:
                errors.append(f"slot {number} is sealed, but its id is not indexed to it")
        if states[SlotState.FREE] != len(self._free) or len(set(self._free)) != len(self._free):
            errors.append(f"{states[SlotState.FREE]} slots are free, the free list has {len(self._free)}")
        if states[SlotState.SEALED] != len(self._index):
            errors.append(f"{states[SlotState.SEALED]} slots are sealed, the index has {len(self._index)}")
        reserved = sum(len(hold.reserved) + len(hold.filling) for hold in self._holds)
        if states[SlotState.FILLING] != reserved:
            errors.append(f"{states[SlotState.FILLING]} slots are filling, holds own {reserved}")
        leaks = {hold.owner: len(hold.references) + len(hold.reserved) + len(hold.filling) for hold in self._holds}
        return PoolAudit(self.counts, leaks, tuple(errors))

    # ------------------------------------------------------------------------------------------ called by holds only

    def _move(self, number: int, state: SlotState) -> _Slot:
        slot = self._slots[number]
        if (slot.state, state) not in TRANSITIONS:
            raise AssertionError(f"slot {number} cannot go from {slot.state.value} to {state.value}")
        self._num_filling += (state is SlotState.FILLING) - (slot.state is SlotState.FILLING)
        slot.state = state
        return slot

    def slot_of(self, block_id: bytes) -> int | None:
        return self._index.get(block_id)

    def closed(self, hold: "Hold") -> None:
        self._holds.discard(hold)

    def reserve(self, count: int) -> list[int]:
        if count > self.num_available:
            raise PoolExhausted(count, self.num_available)
        while len(self._free) < count:
            self._evict_one()
        taken = [self._free.pop() for _ in range(count)]
        for number in taken:
            self._move(number, SlotState.FILLING)
        return taken

    def give_back(self, number: int) -> None:
        self._move(number, SlotState.FREE)
        self._free.append(number)

    def refer(self, number: int) -> None:
        slot = self._slots[number]
        if slot.num_references == 0:
            self._num_cached -= 1
        slot.num_references += 1

    def unrefer(self, number: int) -> None:
        slot = self._slots[number]
        slot.num_references -= 1
        assert slot.num_references >= 0
        self._clock += 1
        slot.last_use = self._clock
        if slot.num_references == 0:
            self._num_cached += 1
            self._offer_for_eviction(number)

    def _offer_for_eviction(self, number: int) -> None:
        slot = self._slots[number]
        if self._is_evictable(slot.last_use, number):
            heapq.heappush(self._evictable, (slot.last_use, number))
            if len(self._evictable) > 4 * self.num_slots + 64:
                self._evictable = [entry for entry in set(self._evictable) if self._is_evictable(*entry)]
                heapq.heapify(self._evictable)

    def _is_evictable(self, last_use: int, number: int) -> bool:
        slot = self._slots[number]
        is_idle = slot.state is SlotState.SEALED and slot.num_references == 0
        return is_idle and slot.last_use == last_use and not self._num_children[slot.block_id]

    def seal(self, number: int, block_id: bytes, parent_id: bytes) -> int:
        """Names a filling slot; an id that is sealed already adopts the older slot. Returns the slot, referenced once."""
        older = self._index.get(block_id)
        if older is not None:
            self.give_back(number)
            self.refer(older)
            return older
        slot = self._move(number, SlotState.SEALED)
        self._num_seals += 1
        slot.seal_number = self._num_seals
        slot.block_id, slot.parent_id, slot.num_references = block_id, parent_id, 1
        self._index[block_id] = number
        self._num_children[parent_id] += 1
        return number

    def _evict_one(self) -> None:
        while self._evictable:
            last_use, number = heapq.heappop(self._evictable)
            if self._is_evictable(last_use, number):
                break
        else:
            # Idle blocks remain, but each has a child in use: give up the least recently used of them.
            idle = (n for n, s in enumerate(self._slots) if s.state is SlotState.SEALED and s.num_references == 0)
            number = min(idle, key=lambda n: self._slots[n].last_use)
        slot = self._move(number, SlotState.FREE)
        del self._index[slot.block_id]
        self._num_cached -= 1
        self.num_evictions += 1
        self._num_children[slot.parent_id] -= 1
        if not self._num_children[slot.parent_id]:
            del self._num_children[slot.parent_id]
            parent = self._index.get(slot.parent_id)
            if parent is not None:
                self._offer_for_eviction(parent)
        if slot.is_announced:
            slot.is_announced = False
            for watch in self._watches:
                watch.sealed.pop(slot.block_id, None)
                watch.evicted[slot.block_id] = None
        slot.block_id = slot.parent_id = b""
        self._free.append(number)


class Hold:
    """What one owner has of a pool: reserved slots, slots that it fills, references to sealed blocks."""

    __slots__ = ("_pool", "filling", "is_open", "owner", "references", "reserved")

    def __init__(self, pool: BlockPool, owner: str):
        self._pool = pool
        self.owner = owner
        self.reserved: list[int] = []
        self.filling: set[int] = set()
        self.references: list[int] = []
        self.is_open = True

    def reserve(self, count: int) -> None:
        """All `count` slots at once, or `PoolExhausted` and none."""
        assert self.is_open
        self.reserved.extend(self._pool.reserve(count))

    def take(self) -> int:
        """A reserved slot, to be filled by this hold's owner."""
        number = self.reserved.pop()
        self.filling.add(number)
        return number

    def give_back(self, count: int = 1) -> None:
        """Returns reserved slots that are not needed after all."""
        for _ in range(count):
            self._pool.give_back(self.reserved.pop())

    def put_back(self, number: int) -> None:
        """A slot that was being filled is not, after all: it is reserved again."""
        self.filling.remove(number)
        self.reserved.append(number)

    def adopt(self, block_id: bytes) -> int | None:
        """Refers to the sealed block of that id and returns its slot; None if there is none."""
        assert self.is_open
        number = self._pool.slot_of(block_id)
        if number is not None:
            self._pool.refer(number)
            self.references.append(number)
        return number

    def seal(self, number: int, block_id: bytes, parent_id: bytes) -> int:
        """Names a slot that this hold filled. Returns the slot that has the block from now on, referenced."""
        self.filling.remove(number)
        kept = self._pool.seal(number, block_id, parent_id)
        self.references.append(kept)
        return kept

    def release(self, number: int) -> None:
        """Drops one reference."""
        self.references.remove(number)
        self._pool.unrefer(number)

    def close(self) -> None:
        """Gives everything back, the chain's end first, so that its beginning is the last to be evicted. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        for number in reversed(self.references):
            self._pool.unrefer(number)
        for number in (*self.reserved, *self.filling):
            self._pool.give_back(number)
        self.references.clear()
        self.reserved.clear()
        self.filling.clear()
        self._pool.closed(self)
