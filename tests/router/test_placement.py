from dataclasses import replace

from router.placement import Demand, WorkerSnapshot, place

IDLE = WorkerSnapshot("d1", 0, 8, 0, 1000, 0, 0)
DEMAND = Demand(num_tokens=200, num_choices=1, num_kv_tokens=300, num_blocks_before_tail=12, block_size=16)


def worker(name, **changes):
    return replace(IDLE, worker_id=name, **changes)


def test_nobody_can_take_it_is_none():
    assert place(DEMAND, [], [], 16) is None
    assert place(DEMAND, [worker("d1", pool_tokens=299)], [], 16) is None
    assert place(DEMAND, [worker("d1", num_active=8, active_tokens=10)], [], 16) is None
    assert place(DEMAND, [worker("d1", num_active=1, active_tokens=900)], [], 16) is None


def test_the_least_loaded_decode_worker_is_picked_and_equals_take_turns():
    assert place(DEMAND, [worker("d1", num_active=2), worker("d2", num_active=1)], [], 16).decode_id == "d2"
    assert place(DEMAND, [worker("d1", num_placed=5), worker("d2", num_placed=4)], [], 16).decode_id == "d2"


def test_among_equally_loaded_ones_the_holder_of_the_prefix_is_picked():
    assert place(DEMAND, [worker("d1"), worker("d2", num_held_blocks=3, num_placed=9)], [], 16).decode_id == "d2"


def test_no_source_below_the_threshold_of_missing_tokens():
    prefill = [worker("p1")]
    assert place(DEMAND, [worker("d1")], prefill, 16).source_ids == ("p1",)
    assert place(DEMAND, [worker("d1")], prefill, 192).source_ids == ()
    assert place(DEMAND, [worker("d1", num_held_blocks=11)], prefill, 16).source_ids == ()
    assert place(DEMAND, [worker("d1", num_held_blocks=10)], prefill, 16).source_ids == ("p1",)


def test_sources_are_ordered_by_what_they_have_to_compute_and_those_that_failed_are_left_out():
    prefill = [worker("p1", active_tokens=500), worker("p2"), worker("p3", num_held_blocks=12)]
    assert place(DEMAND, [worker("d1")], prefill, 16).source_ids == ("p3", "p2", "p1")
    failed = replace(DEMAND, failed_worker_ids=frozenset({"p3", "p2"}))
    assert place(failed, [worker("d1")], prefill, 16).source_ids == ("p1",)


def test_a_source_whose_pool_cannot_hold_the_chain_is_none():
    assert place(DEMAND, [worker("d1")], [worker("p1", pool_tokens=191)], 16).source_ids == ()


def test_holders_are_named_when_they_have_more_than_source_and_decode_worker():
    decode = [worker("d1"), worker("d2", num_active=3, num_held_blocks=9)]
    assert place(DEMAND, decode, [worker("p1")], 16).holder_ids == ("d2",)
    assert place(DEMAND, decode, [worker("p1", num_held_blocks=9)], 16).holder_ids == ()


def test_a_decode_worker_that_has_it_all_is_the_first_source_and_whoever_computes_the_second():
    decode = [worker("d1"), worker("d2", num_active=3, num_held_blocks=12)]
    assert place(DEMAND, decode, [worker("p1")], 16).source_ids == ("d2", "p1")
    assert place(DEMAND, decode, [], 16).source_ids == ("d2",)
    failed = replace(DEMAND, failed_worker_ids=frozenset({"d2"}))
    assert place(failed, decode, [worker("p1")], 16).source_ids == ("p1",)
    decode = [worker("d1"), worker("d2", num_active=3, num_held_blocks=11)]
    assert place(DEMAND, decode, [worker("p1")], 16).source_ids == ("p1",)
