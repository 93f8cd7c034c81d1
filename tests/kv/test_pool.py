import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.errors import PoolExhausted
from kvferry.kv.pool import BlockPool

ROOT = b"root"


def fill(pool: BlockPool, ids: list[bytes], owner: str = "test"):
    hold = pool.open_hold(owner)
    hold.reserve(len(ids))
    for k, block_id in enumerate(ids):
        hold.seal(hold.take(), block_id, ids[k - 1] if k else ROOT)
    return hold


def test_a_reservation_is_whole_or_not_at_all():
    pool = BlockPool(4)
    hold = pool.open_hold("a")
    hold.reserve(3)
    with pytest.raises(PoolExhausted) as error:
        pool.open_hold("b").reserve(2)
    assert (error.value.num_wanted, error.value.num_available) == (2, 1)
    assert pool.counts.num_filling == 3


def test_slot_zero_is_never_handed_out():
    pool = BlockPool(8)
    hold = pool.open_hold("a")
    hold.reserve(8)
    assert sorted(hold.reserved) == list(range(1, 9))


def test_sealing_an_id_that_is_sealed_adopts_the_older_slot():
    pool = BlockPool(4)
    older = fill(pool, [b"x"])
    younger = pool.open_hold("younger")
    younger.reserve(1)
    assert younger.seal(younger.take(), b"x", ROOT) == older.references[0]
    assert pool.counts.num_free == 3
    older.close()
    assert pool.counts.num_live == 1
    younger.close()
    assert pool.counts.num_cached == 1


def test_leaves_of_a_chain_are_evicted_before_its_beginning():
    pool = BlockPool(3)
    fill(pool, [b"1", b"2", b"3"]).close()
    touch = pool.open_hold("touch")
    touch.adopt(b"3")
    touch.close()  # the leaf is now the most recently used
    for gone, left in ((b"3", [b"1", b"2"]), (b"2", [b"1"])):
        pool.open_hold(f"evicts {gone!r}").reserve(1)
        assert sorted(pool.sealed_block_ids()) == left


def test_the_least_recently_used_chain_goes_first():
    pool = BlockPool(4)
    fill(pool, [b"a1", b"a2"]).close()
    fill(pool, [b"b1", b"b2"]).close()
    again = pool.open_hold("again")
    assert again.adopt(b"a1")
    assert again.adopt(b"a2")
    again.close()
    pool.open_hold("new").reserve(2)
    assert sorted(pool.sealed_block_ids()) == [b"a1", b"a2"]


def test_a_referenced_block_is_never_evicted():
    pool = BlockPool(2)
    hold = fill(pool, [b"1", b"2"])
    with pytest.raises(PoolExhausted):
        pool.open_hold("other").reserve(1)
    hold.close()
    pool.open_hold("other").reserve(2)


def test_an_idle_parent_whose_child_is_in_use_can_still_be_evicted():
    pool = BlockPool(2)
    fill(pool, [b"1", b"2"]).close()
    child = pool.open_hold("child only")
    child.adopt(b"2")
    pool.open_hold("other").reserve(1)
    assert list(pool.sealed_block_ids()) == [b"2"]


def test_the_audit_names_who_leaked():
    pool = BlockPool(4)
    fill(pool, [b"1"], owner="request 7")
    assert pool.audit().leaks == {"request 7": 1}
    assert not pool.audit().is_clean


def announce(pool, ids):
    for block_id in ids:
        pool.announce(block_id)


def test_a_watch_tells_the_last_thing_that_happened_to_each_block():
    pool = BlockPool(2)
    fill(pool, [b"old"]).close()
    announce(pool, [b"old"])
    watch = pool.watch()
    assert watch.take() == ({b"old"}, set())
    fill(pool, [b"1", b"2"]).close()
    announce(pool, [b"1", b"2"])
    assert watch.take() == ({b"1", b"2"}, {b"old"})
    pool.evict_all()
    fill(pool, [b"1"]).close()
    announce(pool, [b"1"])
    assert watch.take() == ({b"1"}, {b"2"})
    watch.start_again()
    assert watch.take() == ({b"1"}, set())
    watch.close()


def test_a_watch_tells_of_a_block_that_was_evicted_sealed_again_and_evicted_again():
    pool = BlockPool(2)
    fill(pool, [b"1"]).close()
    announce(pool, [b"1"])
    watch = pool.watch()
    watch.take()
    for _ in range(2):
        pool.evict_all()
        fill(pool, [b"1"]).close()
        announce(pool, [b"1"])
    pool.evict_all()
    assert watch.take() == (set(), {b"1"})


def test_a_watch_hears_nothing_of_blocks_that_were_never_announced():
    pool = BlockPool(2)
    watch = pool.watch()
    fill(pool, [b"1", b"2"]).close()
    announce(pool, [b"2", b"not here"])
    pool.evict_all()
    assert watch.take() == (set(), {b"2"})


def test_a_slot_moves_only_as_the_table_allows():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="cannot go from free to sealed"):
        pool.seal(1, b"x", ROOT)


class PoolMachine(RuleBasedStateMachine):
    """Random owners reserve, fill, adopt and leave; the pool's audit must hold after each step."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(12)
        self.holds = []

    @rule(count=st.integers(0, 6))
    def reserve(self, count):
        hold = self.pool.open_hold(f"hold {len(self.holds)}")
        available = self.pool.num_available
        try:
            hold.reserve(count)
            assert count <= available
        except PoolExhausted:
            assert count > available
        self.holds.append(hold)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), chain=st.integers(0, 3))
    def extend_a_chain(self, data, chain):
        hold = data.draw(st.sampled_from(self.holds))
        for k in range(6):
            block_id = f"{chain}.{k}".encode()
            if hold.adopt(block_id) is None:
                if hold.reserved:
                    hold.seal(hold.take(), block_id, f"{chain}.{k - 1}".encode() if k else ROOT)
                break

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def leave(self, data):
        hold = data.draw(st.sampled_from(self.holds))
        self.holds.remove(hold)
        hold.close()
        hold.close()

    @precondition(lambda self: any(hold.reserved for hold in self.holds))
    @rule()
    def take_and_put_back(self):
        hold = next(hold for hold in self.holds if hold.reserved)
        hold.put_back(hold.take())

    @invariant()
    def everything_adds_up(self):
        audit = self.pool.audit()
        assert not audit.errors
        counts = audit.counts
        assert counts.num_free + counts.num_filling + counts.num_live + counts.num_cached == 12
        assert self.pool.num_available == counts.num_free + counts.num_cached

    def teardown(self):
        for hold in self.holds:
            hold.close()
        audit = self.pool.audit()
        assert audit.is_clean
        assert audit.counts.num_live == audit.counts.num_filling == 0


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
