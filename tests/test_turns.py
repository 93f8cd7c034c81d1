from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.budget import StepBudget
from kvferry.turns import may_pass, start_in_order, turns


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
    assert may_pass(10, 70, 80)
    assert not may_pass(11, 0, 80), "not much smaller"
    assert not may_pass(10, 71, 80)


class Job:
    def __init__(self, name, size, priority=0):
        self.name, self.size, self.priority, self.num_passed = name, size, priority, 0


def test_only_what_is_much_smaller_and_of_the_same_priority_passes_what_is_blocked():
    jobs = [Job("first", 50), Job("large", 800), Job("small", 100), Job("middling", 101), Job("late", 10, priority=-1)]
    started, asked = [], []

    def try_start(job):
        asked.append(job.name)
        if job.size == 800:
            return False
        started.append(job.name)
        return True

    start_in_order(jobs, try_start)
    assert started == ["first", "small"]
    assert asked == ["first", "large", "small"]
    assert jobs[1].num_passed == 100
    start_in_order([jobs[1], *[Job(k, 100) for k in range(20)]], try_start)
    assert jobs[1].num_passed == 800, "then nobody passes it any more"


def test_a_step_in_which_others_yield_keeps_their_target():
    budget = StepBudget(0.4, 16, 2048, itl_target_s=0.1)
    for _ in range(50):
        budget.measured(330, 0.4)
        budget.measured_yielding(0, 0.06)
    assert budget.num_tokens() == 320
    assert budget.num_tokens(is_yielding=True) == 32
    for _ in range(50):
        budget.measured_yielding(16, 0.2 + 16 / budget.tokens_per_s)
    assert budget.num_tokens(is_yielding=True) == 16, "tails go on even where the target is out of reach"
