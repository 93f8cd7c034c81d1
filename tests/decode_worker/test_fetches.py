"""What is on its way to whom: each order is opened once and dropped once, or neither."""

from decode_worker.choice import Choice
from decode_worker.fetches import Fetches
from kvferry.engine.sequence import Sequence
from kvferry.kv.pool import BlockPool
from kvferry.messages import Sampling, Source

SIZE = 16
SOURCE = Source("p1", "here")


def choice_of(num_blocks):
    """Of so many whole blocks before the tail, all with the same beginning."""
    sequence = Sequence(num_blocks, list(range(num_blocks * SIZE + 1)), b"root", SIZE, BlockPool(100))
    return Choice(num_blocks, 0, sequence, len(sequence.tokens), Sampling(1, 4, 0.0), (SOURCE,))


def test_what_is_dropped_before_the_service_heard_of_it_was_never_there():
    fetches, choice = Fetches(), choice_of(3)
    fetches.warm(choice)
    fetches.open(choice)
    assert choice in fetches
    fetches.drop(choice)
    assert fetches.take() == ([], [])
    assert choice not in fetches


def test_what_is_dropped_afterwards_is_told_once_and_its_end_is_nobodys():
    fetches, choice = Fetches(), choice_of(3)
    fetches.warm(choice)
    fetches.open(choice)
    opened, _ = fetches.take()
    assert [order.is_warm for order in opened] == [True, False]
    fetches.drop(choice)
    fetches.drop(choice)
    _, dropped = fetches.take()
    assert sorted(dropped, key=opened.index) == opened
    assert not fetches.ended(opened[1])


def test_a_fetch_that_ends_is_not_dropped_but_the_warming_that_kept_its_place_is():
    fetches, choice = Fetches(), choice_of(3)
    fetches.warm(choice)
    fetches.open(choice)
    (warming, fetch), _ = fetches.take()
    assert fetches.ended(fetch)
    assert not fetches.ended(fetch)
    assert fetches.take() == ([], [warming])


def test_a_block_is_brought_by_the_first_fetch_that_asks_for_it_until_that_one_is_over():
    fetches, short, long = Fetches(), choice_of(2), choice_of(4)
    fetches.open(short)
    fetches.open(long)
    first, last = long.sequence.block_ids[0], long.sequence.block_ids[3]
    assert fetches.brings(first)
    assert fetches.brings(last)
    fetches.drop(long)
    assert fetches.brings(first)
    assert not fetches.brings(last)
    fetches.drop(short)
    assert not fetches.brings(first)
    assert not fetches.brings(None)
