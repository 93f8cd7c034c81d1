"""A sequence inside a worker: tokens, how many of them have KV, and the slots that hold it.

Shared by both policies. It keeps the invariant that `slots[k]` covers tokens [k * block_size, (k + 1) * block_size), sealed and
referenced if whole, being filled otherwise; all of it lives in one hold. Knows no I/O and no clock.
"""

from kvferry.kv.block_id import ANNOUNCED_EVERY, extend_chain, num_whole_blocks_before_tail
from kvferry.kv.pool import BlockPool, Hold

PADDING_SLOT = 0


class Sequence:
    def __init__(
        self, sequence_id: int, tokens: list[int], root: bytes, block_size: int, pool: BlockPool, window: int = 0
    ):
        """`window`: a position sees so many, its own among them; 0: all."""
        self.sequence_id = sequence_id
        self.tokens = tokens
        self.root = root
        self.block_size = block_size
        self.slots: list[int] = []
        self.num_computed = 0
        self.num_skipped_blocks = 0
        """The first ones, which no position from the tail on sees: they have the padding slot."""
        self.window = window
        self.block_ids = extend_chain([], root, tokens, block_size)
        self._num_first_blocks = len(self.block_ids)  # of what it began with: a prompt's
        self._num_announced = 0
        self._pool = pool
        self._hold: Hold | None = None

    @property
    def num_sealed_blocks(self) -> int:
        return self.num_computed // self.block_size

    @property
    def is_at_block_edge(self) -> bool:
        return self.num_computed % self.block_size == 0

    @property
    def num_blocks_before_tail(self) -> int:
        return num_whole_blocks_before_tail(len(self.tokens), self.block_size)

    @property
    def num_unseen_blocks(self) -> int:
        """Whole blocks at the beginning that lie outside of the window of the tail's first token."""
        if not self.window:
            return 0
        return max(self.num_blocks_before_tail * self.block_size - self.window + 1, 0) // self.block_size

    @property
    def next_block_id(self) -> bytes | None:
        """Of the whole block that begins at `num_computed`; None in mid-block and where no whole block is left."""
        if not self.is_at_block_edge or self.num_sealed_blocks >= len(self.block_ids):
            return None
        return self.block_ids[self.num_sealed_blocks]

    def num_slots_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def hold(self) -> Hold:
        assert self._hold is not None, "the sequence has not started"
        return self._hold

    def start(self, num_tokens: int, max_adopted: int, num_skipped: int = 0) -> int:
        """Adopts sealed blocks before block `max_adopted` and reserves slots for the rest of `num_tokens`, in one piece.

        The first `num_skipped` blocks are left out: nobody will look at them. Returns the number of blocks adopted. Raises
        PoolExhausted, and then has changed nothing.
        """
        self.num_skipped_blocks = num_skipped
        self.slots, self.num_computed = [PADDING_SLOT] * num_skipped, num_skipped * self.block_size
        hold = self._pool.open_hold(f"sequence {self.sequence_id}")
        self._hold = hold
        try:
            adopted = self.adopt_sealed(max_adopted)
            hold.reserve(self.num_slots_for(num_tokens) - num_skipped - adopted)
        except BaseException:
            self.stop()
            raise
        return adopted

    def adopt_sealed(self, max_blocks: int) -> int:
        """Goes on over blocks that are sealed in the pool, up to block `max_blocks`; returns how many."""
        count = 0
        while (block_id := self.next_block_id) is not None and self.num_sealed_blocks < max_blocks:
            slot = self.hold.adopt(block_id)
            if slot is None:
                break
            self._append_sealed(slot)
            count += 1
        return count

    def _append_sealed(self, slot: int) -> None:
        self.slots.append(slot)
        self.num_computed += self.block_size

    def give_back_excess(self, num_tokens: int) -> None:
        """Returns reserved slots beyond what `num_tokens` need."""
        excess = len(self.slots) + len(self.hold.reserved) - self.num_slots_for(num_tokens)
        if excess > 0:
            self.hold.give_back(min(excess, len(self.hold.reserved)))

    def num_slots_lacking(self, target: int) -> int:
        """Slots that must be reserved before tokens up to `target` can be computed."""
        return max(self.num_slots_for(target) - len(self.slots) - len(self.hold.reserved), 0)

    def cover(self, target: int) -> tuple[int, ...]:
        """Takes reserved slots so that tokens up to `target` have one; returns the block table up to there."""
        while len(self.slots) < self.num_slots_for(target):
            self.slots.append(self.hold.take())
        return tuple(self.slots)

    def computed(self, target: int) -> int:
        """Tokens up to `target` have KV now: seals the blocks that became whole, and returns how many."""
        assert self.num_computed < target <= len(self.tokens)
        first, last = self.num_sealed_blocks, target // self.block_size
        for k in range(first, last):
            self.slots[k] = self.hold.seal(self.slots[k], self.block_ids[k], self.parent_of(k))
        self.num_computed = target
        self._announce(min(last, self._num_first_blocks))
        return last - first

    def received(self, slot: int) -> None:
        """A slot of the hold was filled with the next whole block, checked, by a fetch."""
        k = self.num_sealed_blocks
        self._append_sealed(self.hold.seal(slot, self.block_ids[k], self.parent_of(k)))
        self._announce(min(k + 1, self._num_first_blocks))

    def _announce(self, num_blocks: int) -> None:
        """Of the first `num_blocks`, which are sealed: every eighth, and the last one of what the sequence began with."""
        for k in range(self._num_announced, num_blocks):
            if (k + 1) % ANNOUNCED_EVERY == 0 or k + 1 == self._num_first_blocks:
                self._pool.announce(self.block_ids[k])
        self._num_announced = max(self._num_announced, num_blocks)

    def _announce_all(self) -> None:
        """It ends: what it generated may be a later prompt's beginning."""
        num_blocks = min(self.num_sealed_blocks, len(self.block_ids))
        self._announce(num_blocks)
        if num_blocks:
            self._pool.announce(self.block_ids[num_blocks - 1])

    def parent_of(self, k: int) -> bytes:
        return self.block_ids[k - 1] if k else self.root

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if len(self.tokens) % self.block_size == 0:
            extend_chain(self.block_ids, self.root, self.tokens, self.block_size)

    def stop(self) -> None:
        """Gives up everything in the pool; tokens stay. What was sealed remains there as cache. Idempotent."""
        if self._hold is not None:
            self._announce_all()
            self._hold.close()
            self._hold = None
        self.slots = []
        self.num_computed = self.num_skipped_blocks = self._num_announced = 0
