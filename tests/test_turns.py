from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.budget import StepBudget
from kvferry.turns import may_pass, turns


@given(st.lists(st.integers(1, 500), max_size=12), st.integers(1, 20), st.sampled_from([16, 32]))
def test_everybody_has_one_turn_and_the_oldest_half_of_the_budget(remaining, blocks, size):
    budget = blocks * size
    found = turns(remaining, budget, size)
    assert sorted(turn.place for turn in found) == list(range(len(remaining)))
    spent = 0
    for turn in found:
        if turn.place == 0:
            break
        spent += min(remaining[turn.place], turn.max_tokens)
        assert remaining[turn.place] < remaining[0]
    assert spent <= max(budget // 2, 0) or not spent
    assert not remaining or budget - spent >= min(size, budget)


def test_those_that_are_nearly_done_go_first():
    assert [turn.place for turn in turns([500, 90, 600, 20, 400], 256, 16)][:2] == [3, 1]


def test_nobody_is_passed_by_more_than_its_own_size():
    assert may_pass(10, 0, 10)
    assert not may_pass(11, 0, 10)
    assert not may_pass(6, 5, 10)


def test_a_step_in_which_others_yield_keeps_their_target():
    budget = StepBudget(0.4, 16, 2048, itl_target_s=0.1)
    for _ in range(50):
        budget.measured(330, 0.4)
        budget.measured_yielding(0.06)
    assert budget.num_tokens() == 320
    assert budget.num_tokens(is_yielding=True) == 32
    for _ in range(50):
        budget.measured_yielding(0.2)
    assert budget.num_tokens(is_yielding=True) == 16, "tails go on even where the target is out of reach"
