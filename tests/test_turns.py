from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.budget import StepBudget
from kvferry.turns import Turn, may_pass, start_in_order, turns


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=12),
    st.integers(1, 300),
    st.sampled_from([16, 32]),
    st.integers(1),
)
def test_of_two_steps_the_oldest_has_half_and_the_shorter_ones_what_they_need_of_the_rest(
    remaining, budget, size, step
):
    spent = []
    for number in (step, step + 1):
        found = turns(remaining, budget, size, number)
        assert sorted(turn.place for turn in found) == list(range(len(remaining)))
        passing = found[: [turn.place for turn in found].index(0)]
        assert all(remaining[turn.place] < remaining[0] for turn in passing)
        assert all(turn.max_tokens >= min(remaining[turn.place], size) for turn in passing), "a block, or all of it"
        spent.append(sum(min(remaining[turn.place], turn.max_tokens) for turn in passing))
        assert spent[-1] <= budget // 2 or budget < 2 * size
    assert sum(spent) <= budget
    shorter = [one for one in remaining if one < remaining[0]]
    if shorter and budget >= min(*shorter, size):
        assert sum(spent) >= min(*shorter, size), "the shortest has gone before the oldest"


def test_those_that_are_nearly_done_go_first():
    assert [turn.place for turn in turns([500, 90, 600, 20, 400], 256, 16, 1)][:2] == [3, 1]


def test_a_budget_of_one_block_is_the_short_ones_in_every_other_step():
    remaining = [8000, 5, 7, 4, 3, 90]
    theirs, oldests = (turns(remaining, 16, 16, step) for step in (1, 2))
    assert [(turn.place, turn.max_tokens) for turn in theirs][:4] == [(4, 16), (3, 13), (1, 9), (0, 16)]
    assert oldests[0] == Turn(0, 16)


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
    budget = StepBudget(0.4, 16, 2048, 400.0, itl_target_s=0.1)
    for _ in range(50):
        budget.measured(330, 0.4)
        budget.measured_yielding(0, 0.06)
    assert budget.num_tokens() == 320
    assert budget.num_tokens(is_yielding=True) == 32
    for _ in range(50):
        budget.measured_yielding(16, 0.2 + 16 / budget.tokens_per_s)
    assert budget.num_tokens(is_yielding=True) == 16, "tails go on even where the target is out of reach"
