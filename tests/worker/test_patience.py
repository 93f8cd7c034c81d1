import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.messages import FetchEnd, FetchEndReason, FetchOffers, FetchProgress, FetchState, Frame
from kvferry.worker.patience import FetchBudgets, Patience

BUDGETS = FetchBudgets(silence_s=3, queued_s=60, computing_s=30, sending_s=10)
SECONDS = {FetchState.QUEUED: 60, FetchState.COMPUTING: 30, FetchState.SENDING: 10}
WORDS = {FetchState.QUEUED: "wait", FetchState.COMPUTING: "computed", FetchState.SENDING: "sent none"}
FRAME = Frame(0, b"")
START = 1000.0

states = pytest.mark.parametrize("state", FetchState)


def said(state: FetchState, step: int = 1, num_sealed_blocks: int = 0) -> FetchProgress:
    return FetchProgress(step, state, num_sealed_blocks)


def patience_with(message: FetchProgress, until_s: int) -> Patience:
    """That has heard the same each second, from the beginning up to then."""
    patience = Patience(BUDGETS, START)
    for second in range(until_s + 1):
        patience.heard(message, START + second)
    return patience


def test_a_source_that_never_says_anything_is_silent_after_its_budget_and_not_before():
    patience = Patience(BUDGETS, START)
    assert patience.left_s(START) == 3
    assert patience.left_s(START + 2.5) == 0.5
    failed = patience.run_out(START + 3)
    assert failed.kind == "silent"
    assert "silent for 3 s" in failed.message


@states
def test_a_source_that_falls_silent_is_silent_whatever_it_did(state):
    patience = patience_with(said(state), until_s=5)
    assert patience.left_s(START + 5) == 3
    assert patience.left_s(START + 7.5) == 0.5
    assert patience.run_out(START + 8).kind == "silent"


@states
def test_a_source_that_speaks_and_does_not_get_on_has_the_budget_of_what_it_does_and_no_more(state):
    budget = SECONDS[state]
    patience = patience_with(said(state), until_s=budget - 1)
    assert patience.left_s(START + budget - 1) == 1
    assert patience.left_s(START + budget) == 0
    failed = patience.run_out(START + budget)
    assert failed.kind == state.value
    assert WORDS[state] in failed.message
    assert failed.message.endswith(f"for {budget} s")


@states
def test_a_frame_begins_the_budget_anew(state):
    budget = SECONDS[state]
    patience = patience_with(said(state), until_s=budget - 1)
    patience.heard(FRAME, START + budget - 0.5)
    for second in range(budget, 2 * budget - 1):
        patience.heard(said(state), START + second)
        assert patience.left_s(START + second) > 0
    assert patience.left_s(START + 2 * budget - 0.5) == 0
    assert patience.run_out(START + 2 * budget - 0.5).kind == state.value


@states
@pytest.mark.parametrize("other", FetchState)
def test_to_do_something_else_begins_the_budget_anew(state, other):
    at = SECONDS[state] - 1
    patience = patience_with(said(state), until_s=at)
    patience.heard(said(other), START + at)
    patience.heard(said(other), START + at + 2)
    has_changed = state is not other
    left_s = SECONDS[other] - 2 if has_changed else -1
    assert patience.left_s(START + at + 2) == min(left_s, 3)


@pytest.mark.parametrize("more", [dict(step=2), dict(num_sealed_blocks=1)])
def test_a_new_step_and_a_new_block_are_progress_of_a_source_that_computes(more):
    patience = patience_with(said(FetchState.COMPUTING), until_s=29)
    patience.heard(said(FetchState.COMPUTING, **more), START + 29)
    for second in range(30, 59):
        patience.heard(said(FetchState.COMPUTING, **more), START + second)
        assert patience.left_s(START + second) > 0
    assert patience.left_s(START + 59) == 0
    assert patience.run_out(START + 59).kind == "computing"


@pytest.mark.parametrize("state", [FetchState.QUEUED, FetchState.SENDING])
def test_steps_for_others_are_no_progress_of_a_source_that_lets_wait_or_should_send(state):
    patience = Patience(BUDGETS, START)
    budget = SECONDS[state]
    for second in range(budget):
        patience.heard(said(state, step=second, num_sealed_blocks=second), START + second)
        assert patience.left_s(START + second) > 0
    assert patience.left_s(START + budget) == 0
    assert patience.run_out(START + budget).kind == state.value


def test_a_source_may_take_its_whole_budget_for_each_of_the_things_it_does():
    patience, now = Patience(BUDGETS, START), START
    for state in (FetchState.QUEUED, FetchState.COMPUTING, FetchState.SENDING):
        for _ in range(SECONDS[state]):
            patience.heard(said(state), now)
            assert patience.left_s(now) > 0
            now += 1


@pytest.mark.parametrize("message", [FRAME, FetchEnd(FetchEndReason.COMPLETE, 0), FetchOffers("i", ())])
def test_frames_from_a_source_that_shows_no_progress_are_enough(message):
    """Only silence can run out then."""
    patience = Patience(BUDGETS, START)
    for second in range(0, 1000, 2):
        patience.heard(message, START + second)
        assert patience.left_s(START + second) == 3
    assert patience.run_out(START + 998 + 3).kind == "silent"


messages = st.one_of(
    st.just(FRAME), st.builds(FetchProgress, st.integers(0, 2), st.sampled_from(FetchState), st.integers(0, 2))
)


@given(st.lists(st.tuples(st.floats(0, 20), messages), max_size=30), st.floats(0, 100))
def test_what_runs_out_has_run_out_and_was_the_first_to(heard, later_s):
    patience, now, advanced, state = Patience(BUDGETS, START), START, START, None
    mark: object = None
    for wait_s, message in heard:
        now += wait_s
        patience.heard(message, now)
        if isinstance(message, Frame):
            advanced = now
            continue
        is_computing = message.state is FetchState.COMPUTING
        new_mark = (message.state, message.step, message.num_sealed_blocks) if is_computing else message.state
        if new_mark != mark:
            advanced, mark, state = now, new_mark, message.state
    silent_at = now + 3
    stuck_at = advanced + SECONDS[state] if state else float("inf")
    at = now + later_s
    assert patience.left_s(at) == min(silent_at, stuck_at) - at
    if patience.left_s(at) <= 0:
        kind = patience.run_out(at).kind
        assert kind == ("silent" if silent_at <= at else state.value)
