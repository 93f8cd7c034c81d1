"""The decode policy alone: no model, no clock, no event loop."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.choice import Choice, State
from decode_worker.scheduler import (
    MAX_SCORED_TOKENS,
    Begun,
    DecodeLimits,
    DecodeScheduler,
    Ended,
    Paused,
    Scored,
    Token,
)
from kvferry.engine.budget import StepBudget
from kvferry.engine.plan import StepResult
from kvferry.engine.sequence import Sequence
from kvferry.kv.pool import BlockPool
from kvferry.messages import ChoiceEndReason, Sampling, Source, TokenLogprobs
from kvferry.worker.counters import Counters

SIZE = 16


class FixedBudget(StepBudget):
    def __init__(self, tokens):
        super().__init__(1.0, SIZE, 4096, 400.0)
        self.tokens = tokens

    def num_tokens(self, is_yielding=False):
        return self.tokens


class Rig:
    def __init__(self, num_slots=100, budget=64, max_sequences=8, max_local=32):
        self.pool, self.counters = BlockPool(num_slots), Counters()
        limits = DecodeLimits(8192, max_sequences, max_local)
        self.scheduler = DecodeScheduler(self.pool, SIZE, limits, FixedBudget(budget), self.counters)
        self.step, self.tokens, self.ends, self.scores, self.takes_part = 0, {}, {}, {}, {}

    def admit(self, name, tokens, max_tokens=4, sources=(), priority=0, window=0, **sampling):
        sequence = Sequence(self.scheduler.next_sequence_id(), list(tokens), b"root", SIZE, self.pool, window)
        sampled = Sampling(1, max_tokens, 0.0, **sampling)
        choice = Choice(name, 0, sequence, len(tokens), sampled, sources, priority)
        self.scheduler.admit(choice)
        return choice

    def run_step(self):
        """Plans and commits one step; returns the plan."""
        self.step += 1
        plan = self.scheduler.plan(self.step, float(self.step))
        if plan is not None:
            for chunk in plan.chunks:
                assert len(chunk.slots) == -(-(chunk.start + len(chunk.tokens)) // SIZE)
                assert len(set(chunk.slots)) == len(chunk.slots)
                assert 0 not in chunk.slots
            tokens = {chunk.sequence_id: self.step for chunk in plan.chunks if chunk.draw}
            scores = {
                chunk.sequence_id: tuple(TokenLogprobs(-float(token), 1) for token in chunk.scoring.targets)
                for chunk in plan.chunks
                if chunk.scoring
            }
            self.scheduler.commit(plan, StepResult(tokens, scores=scores), float(self.step))
        for event in self.scheduler.take_events():
            if isinstance(event, Begun | Paused):
                self.takes_part[event.choice.key] = isinstance(event, Begun)
                continue
            if isinstance(event, Token):
                assert event.index == len(self.tokens.setdefault(event.choice.key, []))
                self.tokens[event.choice.key].append(event.token)
            elif isinstance(event, Scored):
                assert event.position == 1 + len(self.scores.setdefault(event.choice.key, []))
                self.scores[event.choice.key] += [-one.logprob for one in event.logprobs]
            else:
                assert isinstance(event, Ended)
                assert event.choice.key not in self.ends
                self.ends[event.choice.key] = event.reason
        assert not self.pool.audit().errors
        return plan


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=8),
    st.integers(1, 130),
    st.integers(12, 60),
)
def test_whatever_the_lengths_budgets_and_pools_every_choice_gets_all_of_its_tokens(requests, budget, num_slots):
    rig = Rig(num_slots, budget)
    for name, (length, max_tokens, family) in enumerate(requests):
        rig.admit(name, range(family * 1000, family * 1000 + length), max_tokens)
    for _ in range(4000):
        if rig.scheduler.is_idle:
            break
        assert rig.run_step() is not None or rig.scheduler.is_idle, "nothing is planned although something waits"
    rig.run_step()
    for name, (length, max_tokens, _) in enumerate(requests):
        if length + max_tokens - 1 > num_slots * SIZE:
            assert rig.ends[name] is ChoiceEndReason.TOO_LARGE
        else:
            assert rig.ends[name] is ChoiceEndReason.LENGTH
            assert len(rig.tokens[name]) == max_tokens
    assert rig.pool.audit().is_clean
    assert rig.pool.counts.num_live == 0


def test_running_sequences_get_a_token_in_every_step_beside_a_long_prompt():
    rig = Rig(budget=32)
    rig.admit("short", range(10), 50)
    rig.run_step()
    rig.admit("long", range(1000, 1600), 2)
    for _ in range(10):
        plan = rig.run_step()
        assert {len(chunk.tokens) for chunk in plan.chunks} == {1, 32}
    assert len(rig.tokens["short"]) == 11


def test_equal_prompts_share_local_computing():
    rig = Rig(budget=1000)
    for name in range(3):
        rig.admit(name, range(100), 2)
    plans = [rig.run_step() for _ in range(3)]
    assert sum(len(chunk.tokens) for chunk in plans[0].chunks) == 100
    assert sum(plan.num_tokens for plan in plans if plan) < 100 + 3 * (4 + 2) + 10


def test_the_youngest_of_the_least_urgent_is_preempted_and_keeps_its_tokens():
    rig = Rig(num_slots=10, budget=1000)
    rig.admit("old", range(16), 100)
    rig.admit("urgent", range(200, 216), 60, priority=1)
    victim = rig.admit("young", range(400, 416), 100)
    while not rig.counters.values["preemptions"]:
        rig.run_step()
    assert victim.state is State.WAITING
    kept = len(rig.tokens["young"])
    assert len(victim.sequence.tokens) == 16 + kept
    while not rig.scheduler.is_idle:
        rig.run_step()
    assert {len(tokens) for tokens in rig.tokens.values()} == {100, 60}
    assert rig.counters.values["recomputed_tokens"] > 0


def test_penalties_see_prompt_and_answer_whole_through_preemptions():
    rig = Rig(num_slots=10, budget=1000)
    rig.admit("old", range(16), 100)
    young = rig.admit("young", range(400, 416), 100, frequency_penalty=0.5)
    while not rig.scheduler.is_idle:
        draws = [chunk.draw for chunk in rig.run_step().chunks if chunk.sequence_id == young.sequence.sequence_id]
        for history in (draw.history for draw in draws if draw):
            ids, counts = history.of_answer
            assert history.of_prompt.tolist() == list(range(400, 416))
            assert Counter(dict(zip(ids.tolist(), counts.tolist(), strict=True))) == Counter(rig.tokens["young"])
    assert rig.counters.values["preemptions"]
    assert len(rig.tokens["young"]) == 100


def test_only_one_of_two_that_want_the_same_blocks_fetches_and_the_next_takes_over():
    rig = Rig()
    source = (Source("p1", "p1"),)
    first, second = rig.admit("a", range(100), sources=source), rig.admit("b", range(100), sources=source)
    rig.run_step()
    (order,), _ = rig.scheduler.take_fetches()
    assert order.choice is first
    assert order.num_blocks == 6
    slot = first.sequence.hold.take()
    first.sequence.received(slot)
    rig.scheduler.abort(first)
    rig.run_step()
    (taken,), (dropped,) = rig.scheduler.take_fetches()
    assert dropped is order
    assert taken.choice is second
    assert taken.first_block == 1, "the block that arrived is adopted"


def test_sources_are_tried_in_order_then_computing_then_handing_back():
    for length, expected in ((40, ChoiceEndReason.LENGTH), (200, ChoiceEndReason.UNPLACED)):
        rig = Rig(max_local=32)
        choice = rig.admit("a", range(length), 1, (Source("p1", "p1"), Source("p2", "p2")))
        for name in ("p1", "p2"):
            rig.run_step()
            (order,), _ = rig.scheduler.take_fetches()
            assert order.source.worker_id == name
            rig.scheduler.fetch_ended(order, "gone", is_source_bad=True)
        rig.run_step()
        rig.run_step()
        assert rig.ends["a"] is expected
        assert choice.failed_source_ids == ["p1", "p2"]


def test_without_sources_any_length_is_computed_here():
    rig = Rig(max_local=32)
    rig.admit("a", range(500), 1)
    while not rig.scheduler.is_idle:
        rig.run_step()
    assert rig.ends["a"] is ChoiceEndReason.LENGTH


@pytest.mark.parametrize("num_cached_blocks", [13, 6, 0])
def test_a_choice_that_begins_anew_without_its_window_counts_its_hits_once(num_cached_blocks):
    rig = Rig(max_local=1000, budget=1000)
    if num_cached_blocks:
        rig.admit("first", range(num_cached_blocks * SIZE + 1), 1)
        rig.run_step()
    choice = rig.admit("second", range(250), 1, sources=(Source("p", "p"),), window=40)
    rig.run_step()
    (order,), _ = rig.scheduler.take_fetches()
    assert choice.sequence.num_skipped_blocks == 12
    rig.scheduler.fetch_ended(order, "gone", is_source_bad=True)
    plan = rig.run_step()
    assert plan.num_tokens == 250 - num_cached_blocks * SIZE, "the others were found"
    assert rig.counters.values["cache_hit_tokens"] == choice.num_local_tokens == num_cached_blocks * SIZE


def test_a_source_that_lost_a_block_is_asked_again_while_it_makes_progress():
    rig = Rig()
    choice = rig.admit("a", range(100), 1, (Source("p1", "p1"), Source("p2", "p2")))
    rig.run_step()
    (order,), _ = rig.scheduler.take_fetches()
    choice.sequence.received(choice.sequence.hold.take())
    rig.scheduler.fetch_ended(order, "missing", is_source_bad=False)
    rig.run_step()
    (again,), _ = rig.scheduler.take_fetches()
    assert (again.source.worker_id, again.first_block) == ("p1", 1)
    rig.scheduler.fetch_ended(again, "missing", is_source_bad=False)
    rig.run_step()
    (other,), _ = rig.scheduler.take_fetches()
    assert other.source.worker_id == "p2"


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(0, 5), st.integers(12, 40), st.integers(1, 200), st.integers(0, 2))
def test_every_place_of_a_scored_prompt_is_told_once_in_order(length, max_tokens, num_slots, budget, num_others):
    """Although its blocks are sealed already, and although it may be preempted meanwhile."""
    rig = Rig(num_slots, budget)
    for other in range(num_others):
        rig.admit(other, range(length // 2 + 1), 60)
    for _ in range(3):
        rig.run_step()
    rig.admit("scored", range(length), max_tokens, num_prompt_logprobs=0)
    for _ in range(3000):
        if rig.scheduler.is_idle:
            break
        rig.run_step()
    rig.run_step()
    if length + max(max_tokens - 1, 0) > num_slots * SIZE:
        assert rig.ends["scored"] is ChoiceEndReason.TOO_LARGE
    else:
        assert rig.ends["scored"] is ChoiceEndReason.LENGTH
        assert rig.scores.get("scored", []) == list(range(1, length))
        assert len(rig.tokens.get("scored", [])) == max_tokens
    assert rig.pool.audit().is_clean


def test_of_all_scored_prompts_together_a_step_has_so_many_positions():
    """Their logits lie in memory at the same time: a row of the whole vocabulary for each."""
    rig = Rig(num_slots=400, budget=1000)
    for name in range(5):
        rig.admit(name, range(1000 * name, 1000 * name + 300), 1, num_prompt_logprobs=0)
    while not rig.scheduler.is_idle:
        plan = rig.run_step()
        assert plan is None or sum(len(chunk.scoring.targets) for chunk in plan.chunks) <= MAX_SCORED_TOKENS
    rig.run_step()
    assert rig.scores == {name: list(range(1000 * name + 1, 1000 * name + 300)) for name in range(5)}


def test_short_prompts_pass_a_long_one_that_still_gets_half_of_each_step():
    rig = Rig(num_slots=400, budget=64)
    rig.admit("long", range(10_000, 12_000), 1)
    rig.run_step()
    for name in range(40):
        rig.admit(name, range(100 * name, 100 * name + 60), 1)
        plan = rig.run_step()
        assert max(len(chunk.tokens) for chunk in plan.chunks) >= 32, "the long one goes on"
    assert len(rig.ends) >= 10
    while not rig.scheduler.is_idle:
        rig.run_step()
    assert set(rig.ends.values()) == {ChoiceEndReason.LENGTH}


@pytest.mark.parametrize("is_scored", [False, True])
def test_with_a_budget_of_one_block_tails_and_a_long_prompt_have_every_other_step(is_scored):
    """T049 beside so many streams that a block takes all that their target leaves."""
    rig = Rig(num_slots=400, budget=SIZE, max_sequences=64)
    long = rig.admit("long", range(10_000, 13_000), 1, **({"num_prompt_logprobs": 0} if is_scored else {}))
    rig.admit("stream", range(10), 200)
    for _ in range(2):
        rig.run_step()
    for first in range(0, 80, 4):
        before = long.num_missing_tokens
        for name in range(first, first + 4):
            rig.admit(name, range(100 * name, 100 * name + 4), 1)
        plans = [rig.run_step() for _ in range(2)]
        assert all(rig.ends.get(name) is ChoiceEndReason.LENGTH for name in range(first, first + 4))
        assert before - long.num_missing_tokens == SIZE
        assert max(plan.num_tokens for plan in plans) <= 1 + SIZE, "the stream's token, and a block"
    assert len(rig.tokens["stream"]) > 40


def test_a_step_keeps_to_its_budget_but_for_the_first_that_catches_up():
    """Which may exceed it to reach a block's edge."""
    rig = Rig(budget=20)
    rig.admit("tail", range(5), 1)
    rig.admit("long", range(1000, 1100), 1)
    assert [len(chunk.tokens) for chunk in rig.run_step().chunks] == [5]
    assert [len(chunk.tokens) for chunk in rig.run_step().chunks] == [SIZE]
    rig = Rig(budget=3)
    rig.admit("long", range(1000, 1100), 1)
    assert [len(chunk.tokens) for chunk in rig.run_step().chunks] == [SIZE]


def test_a_blocked_choice_is_passed_by_no_more_than_its_own_size():
    rig = Rig(num_slots=20, budget=1000)
    rig.admit("running", range(5000, 5160), 60)
    rig.run_step()
    rig.admit("large", range(1000, 1240), 2)
    for name in range(30):
        rig.admit(name, range(100 * name, 100 * name + 30), 1)
    while "large" not in rig.ends:
        rig.run_step()
    passed = sum(30 for name in rig.ends if isinstance(name, int))
    assert 100 <= passed <= 240 + 8 * 30  # what was running beside it when it ended counts too


def test_who_is_left_out_of_a_step_is_said_to_take_no_part_in_it_until_it_does_again():
    """For want of budget, and where it is preempted."""
    rig = Rig(budget=32)
    for name in (1, 2):
        rig.admit(name, range(1000 * name, 1000 * name + 200), max_tokens=2)
    seen = set()
    while plan := rig.run_step():
        ids = {chunk.sequence_id for chunk in plan.chunks}
        assert {name for name, takes_part in rig.takes_part.items() if takes_part and name not in rig.ends} <= ids
        assert all(rig.takes_part[name] for name in ids)
        seen.add(frozenset(ids))
    assert len(seen) > 1
    assert rig.ends == dict.fromkeys((1, 2), ChoiceEndReason.LENGTH)
    rig = Rig(num_slots=10, budget=1000)
    for name in ("old", "young"):
        rig.admit(name, range(len(name), len(name) + 16), 100)
    for _ in range(99):
        if not rig.counters.values["preemptions"]:
            rig.run_step()
    assert rig.takes_part == {"old": True, "young": False}
