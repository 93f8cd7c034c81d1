"""The index against a plain set of ids for each worker."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv.block_id import ANNOUNCED_EVERY, announced, chain
from router.index import MAX_LOOKED_FOR_ENDS, NUM_SHARDS, PrefixIndex, keys_of
from router.view import held_by_row

ROOT = b"r" * 16


def ids_of(num_blocks, seed=1):
    return chain(ROOT, [random.Random(f"{seed} {k}").randrange(999) for k in range(num_blocks)], 1)


LONG = ids_of(300)


def held(index, ids):
    found = {}
    for one in index.held(keys_of(ids)):
        for row in range(2000):
            if one.rows >> row & 1:
                found[row] = max(found.get(row, 0), one.num_blocks)
    return found


@given(st.lists(st.integers(0, 40), max_size=MAX_LOOKED_FOR_ENDS - 1), st.integers(0, 40), st.integers(1, 1500))
def test_each_worker_holds_as_much_as_it_told(lengths, asked, stride):
    index, ids = PrefixIndex(), ids_of(40)
    for number, length in enumerate(lengths):
        index.add(number * stride, keys_of(announced(ids[:length])))
    wanted = {}
    for number, length in enumerate(lengths):
        is_whole = asked >= length
        known = length if is_whole else max([k for k in range(1, asked + 1) if k % ANNOUNCED_EVERY == 0], default=0)
        if known:
            wanted[number * stride] = known
    assert {row: n for row, n in held(index, ids[:asked]).items() if row < 2000} == {
        row: n for row, n in wanted.items() if row < 2000
    }


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(0, 300))
def test_of_long_chains_the_longest_are_known_to_the_block_and_the_others_to_the_point(lengths, asked):
    """Each worker is found, never with more than it has; of the few that have most, and of all alike, with all that is asked for."""
    index, ids = PrefixIndex(), LONG
    for row, length in enumerate(lengths):
        index.add(row, keys_of(announced(ids[:length])))
    points = {row: min(length, asked) // ANNOUNCED_EVERY for row, length in enumerate(lengths)}
    longest = sorted({*points.values(), 0}, reverse=True)[:MAX_LOOKED_FOR_ENDS]
    wanted = {}
    for row, length in enumerate(lengths):
        is_end_known = length <= asked and points[row] in longest
        wanted[row] = length if is_end_known else points[row] * ANNOUNCED_EVERY
    assert held(index, ids[:asked]) == {row: blocks for row, blocks in wanted.items() if blocks}
    told = [one.num_blocks for one in index.held(keys_of(ids[:asked]))]
    assert told == sorted(told, reverse=True)


def test_few_lookups_find_who_holds_a_long_chain():
    """Each is a read of memory that is nowhere near: what placing a long prompt costs is their number."""
    index, ids = PrefixIndex(), LONG
    index.add(1, keys_of(announced(ids)))
    index.add(2, keys_of(announced(ids[:100])))
    asked: list[int] = []

    class Counting(dict[int, int]):
        def get(self, key: int, default: int = 0) -> int:  # type: ignore[override]
            asked.append(key)
            return super().get(key, default)

    index._shards = [Counting(shard) for shard in index._shards]
    assert held(index, ids) == {1: 300, 2: 100}
    assert len(asked) < 35
    asked.clear()
    assert held(index, ids_of(300, seed=2)) == {}
    assert len(asked) == ANNOUNCED_EVERY, "nobody knows its beginning"


def test_what_is_evicted_is_not_held():
    index, ids = PrefixIndex(), ids_of(24)
    index.add(3, keys_of(announced(ids)))
    index.remove(3, keys_of([ids[23]]))
    assert held(index, ids) == {3: 16}
    index.remove(3, keys_of([ids[7]]))
    assert held(index, ids) == {}, "without its beginning nothing is of use"


def test_another_chain_is_another_entry():
    index = PrefixIndex()
    index.add(1, keys_of(announced(ids_of(16))))
    assert held(index, ids_of(16, seed=2)) == {}


def test_a_worker_that_has_left_holds_nothing_at_once_and_its_row_is_free_once_it_is_swept():
    index, ids = PrefixIndex(), ids_of(16)
    for row in (1, 2):
        index.add(row, keys_of(announced(ids)))
    index.retire(1)
    assert held(index, ids) == {2: 16}
    freed = [index.sweep() for _ in range(NUM_SHARDS)]
    assert freed[-1] == 1
    assert set(freed[:-1]) == {None}
    assert not index.is_sweeping
    assert index.sweep() is None
    index.add(1, keys_of(announced(ids[:8])))
    assert held(index, ids) == {1: 8, 2: 16}
    index.retire(2)
    index.retire(1)
    while index.is_sweeping:
        index.sweep()
    assert len(index) == 0


def test_a_worker_that_begins_anew_has_what_it_tells_then():
    index, ids = PrefixIndex(), ids_of(16)
    index.add(1, keys_of(announced(ids)))
    index.remove_all(1)
    assert held(index, ids) == {}
    assert len(index) == 0


@given(st.lists(st.tuples(st.sets(st.integers(0, 99), max_size=40), st.integers(1, 50)), max_size=6))
def test_as_a_column_each_row_has_the_most_that_is_said_of_it(held):
    """Of few rows or of many, in whatever order; rows beyond the column are nobody's."""
    as_bits = [(sum(1 << row for row in rows), count) for rows, count in held]
    wanted = [max((count for rows, count in held if row in rows), default=0) for row in range(70)]
    assert held_by_row(as_bits, 70).tolist() == wanted
