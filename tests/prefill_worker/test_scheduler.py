"""The prefill policy alone: no model, no clock, no event loop."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.budget import StepBudget
from kvferry.engine.plan import StepResult
from kvferry.errors import InvalidRequest
from kvferry.kv.pool import BlockPool
from kvferry.messages import Source
from prefill_worker.scheduler import ChainState, PrefillScheduler

SIZE = 16


class Stepped(PrefillScheduler):
    step = 0


def scheduler(num_slots=100, max_tokens=64):
    pool = BlockPool(num_slots)
    return Stepped(pool, SIZE, StepBudget(1e9, SIZE, max_tokens, 400.0)), pool


def run_step(made, failures=()):
    made.step += 1
    plan = made.plan(made.step, 0.0)
    if plan is not None:
        failed = {chunk.sequence_id: "broken" for chunk in plan.chunks if chunk.sequence_id in failures}
        made.commit(plan, StepResult({}, failed), 0.0)
    return plan


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=8),
    st.integers(1, 10),
    st.integers(12, 40),
    st.sets(st.integers(0, 7)),
)
def test_every_chain_is_done_and_no_shared_block_is_computed_twice(chains, budget, num_slots, leave):
    made, pool = scheduler(num_slots, budget * SIZE)
    admitted = [made.admit(tuple(range(f * 1000, f * 1000 + n * SIZE)), b"root", p) for n, f, p in chains]
    computed = 0
    for step in range(500):
        plan = run_step(made)
        computed += plan.num_tokens if plan else 0
        assert not pool.audit().errors
        if step == 1:
            for number in leave & set(range(len(admitted))):
                made.abort(admitted[number])
        if made.is_idle:
            break
        assert plan is not None
    assert all(chain.state is ChainState.DONE for n, chain in enumerate(admitted) if n not in leave)
    assert pool.audit().is_clean
    if not pool.num_evictions:
        distinct = {f: max(n for n, g, _ in chains if g == f) for _, f, _ in chains}
        assert computed <= sum(distinct.values()) * SIZE


def test_a_step_packs_chunks_of_several_prompts_up_to_its_budget():
    made, _ = scheduler(max_tokens=96)
    for family in range(3):
        made.admit(tuple(range(family * 1000, family * 1000 + 40 // SIZE * SIZE)), b"root", 0)
    assert [len(chunk.tokens) for chunk in run_step(made).chunks] == [32, 32, 32]


def test_the_more_urgent_goes_first_and_its_equal_waits_without_computing():
    made, _ = scheduler(max_tokens=32)
    lazy = made.admit(tuple(range(64)), b"root", 0)
    urgent = made.admit(tuple(range(64)), b"root", 5)
    plan = run_step(made)
    assert [chunk.sequence_id for chunk in plan.chunks] == [urgent.sequence.sequence_id]
    made.abort(urgent)
    while not made.is_idle:
        run_step(made)
    assert lazy.state is ChainState.DONE


def test_a_chain_that_does_not_fit_now_waits_and_one_that_never_fits_is_refused():
    made, _ = scheduler(num_slots=4)
    first = made.admit(tuple(range(48)), b"root", 0)
    second = made.admit(tuple(range(1000, 1048)), b"root", 0)
    run_step(made)
    assert (first.state, second.state) == (ChainState.DONE, ChainState.WAITING)
    run_step(made)
    assert second.state is ChainState.DONE
    with pytest.raises(InvalidRequest):
        made.admit(tuple(range(80)), b"root", 0)


def test_a_failed_step_fails_its_chains_only():
    made, pool = scheduler()
    bad = made.admit(tuple(range(32)), b"root", 0)
    good = made.admit(tuple(range(1000, 1032)), b"root", 0)
    run_step(made, {bad.sequence.sequence_id})
    assert (bad.state, good.state) == (ChainState.FAILED, ChainState.DONE)
    assert bad.failure == "broken"
    assert pool.audit().is_clean


def test_holders_are_read_before_anything_is_computed():
    made, _ = scheduler()
    chain = made.admit(tuple(range(64)), b"root", 0, (Source("d1", "d1"), Source("d2", "d2")))
    assert run_step(made) is None
    ((reading, holder),) = made.take_reads()
    assert (reading, holder.worker_id, chain.state) == (chain, "d1", ChainState.READING)
    for _ in range(3):
        chain.sequence.received(chain.sequence.hold.take())
    made.read_ended(chain)
    ((_, holder),) = made.take_reads()
    assert holder.worker_id == "d2"
    made.read_ended(chain)
    assert run_step(made).num_tokens == SIZE
    assert chain.state is ChainState.DONE


def test_a_short_prompt_passes_a_long_one_that_still_gets_half_of_each_step():
    """T049: neither holds up the other."""
    made, _ = scheduler(num_slots=2000, max_tokens=128)
    long = made.admit(tuple(range(100_000, 107_504)), b"root", 0)
    run_step(made)
    for number in range(30):
        before = long.num_missing_tokens
        short = made.admit(tuple(range(number * 1000, number * 1000 + 64)), b"root", 0)
        run_step(made)
        assert short.state is ChainState.DONE, "a step of its own length is enough"
        assert before - long.num_missing_tokens >= 64


def test_with_a_budget_of_one_block_short_prompts_and_a_long_one_have_every_other_step():
    """T049 on a worker so slow that a block takes all of a step's time."""
    made, _ = scheduler(num_slots=2000, max_tokens=SIZE)
    long = made.admit(tuple(range(100_000, 108_000)), b"root", 0)
    run_step(made)
    for number in range(30):
        before = long.num_missing_tokens
        short = made.admit(tuple(range(number * 1000, number * 1000 + 32)), b"root", 0)
        plans = [run_step(made) for _ in range(4)]
        assert short.state is ChainState.DONE
        assert before - long.num_missing_tokens == 32
        assert {plan.num_tokens for plan in plans} == {SIZE}


@pytest.mark.parametrize(("max_tokens", "num_steps"), [(64, 110), (SIZE, 401)])
def test_many_short_prompts_cannot_starve_a_long_one(max_tokens, num_steps):
    made, _ = scheduler(num_slots=4000, max_tokens=max_tokens)
    long = made.admit(tuple(range(100_000, 103_200)), b"root", 0)
    for number in range(num_steps):
        for k in range(3):
            base = 10_000_000 + (3 * number + k) * 1000
            made.admit(tuple(range(base, base + 48)), b"root", 0)
        run_step(made)
    assert long.state is ChainState.DONE


def test_a_chain_that_does_not_fit_is_passed_by_no_more_than_its_own_size():
    made, _ = scheduler(num_slots=40, max_tokens=16)
    running = made.admit(tuple(range(480)), b"root", 0)
    run_step(made)
    large = made.admit(tuple(range(10_000, 10_320)), b"root", 0)
    shorts = [made.admit(tuple(range(20_000 + 100 * k, 20_000 + 100 * k + 32)), b"root", 0) for k in range(30)]
    run_step(made)
    assert large.state is ChainState.WAITING
    assert any(short.state is not ChainState.WAITING for short in shorts)
    while large.state is ChainState.WAITING:
        started = [short for short in shorts if short.state is not ChainState.WAITING]
        run_step(made)
    assert len(started) * 2 <= 20, "blocks of 32 tokens past a chain of 20 blocks"
    assert running.state is ChainState.DONE
