from dataclasses import replace

import pytest

from kvferry.messages import Role, WorkerDescription
from router.suspicion import MAX_CRASHES, VERDICT_S, Death, Suspicion

BACK = WorkerDescription("d1", "second", Role.DECODE, "a:1", "model", "float32", "n", 16, 64, 1000, 500, 1000, 8)


def deaths(*more, was_alone=False):
    made = Suspicion()
    for death in more or (Death("d1", "first", 0.0, was_alone),):
        made.add(death)
    return made


def test_at_first_nothing_is_held_against_anybody():
    assert not deaths().is_suspect(1.0)
    assert not deaths().waits_for_verdict(1.0)


@pytest.mark.parametrize("end", ["signal 9", "signal 15", "signal 2"])
def test_a_signal_from_outside_clears_everybody(end):
    found = deaths(was_alone=True)
    found.learn(replace(BACK, previous_end=end))
    for now in (1.0, VERDICT_S + 1):
        assert not found.is_suspect(now)
        assert not found.is_guilty(now)


@pytest.mark.parametrize("end", ["signal 11", "signal 6", "code 1"])
def test_a_crash_makes_suspects_who_run_apart_and_the_one_that_crashes_alone_is_guilty(end):
    found, alone = deaths(), deaths(was_alone=True)
    for one in (found, alone):
        one.learn(replace(BACK, previous_end=end))
    assert found.is_suspect(1.0)
    assert not found.is_guilty(1.0)
    assert alone.is_guilty(1.0)


def test_a_worker_that_is_still_the_same_has_not_died():
    found = deaths()
    found.learn(replace(BACK, incarnation="first"))
    assert not found.is_suspect(VERDICT_S + 1)


def test_without_a_word_from_outside_a_death_counts_after_a_while():
    assert not deaths().is_suspect(VERDICT_S - 1)
    assert deaths().is_suspect(VERDICT_S)


def test_who_was_alone_or_lost_several_waits_for_the_verdict_and_no_longer():
    several = deaths(*(Death(f"d{k}", "x", 0.0, False) for k in range(3)))
    for one in (deaths(was_alone=True), several):
        assert one.waits_for_verdict(1.0)
        assert not one.waits_for_verdict(VERDICT_S)


def test_going_on_elsewhere_clears():
    found = deaths()
    found.learn(replace(BACK, previous_end="signal 11"))
    assert found.survived()
    assert not found.is_suspect(99.0)
    assert not found.survived()


def test_who_hung_two_workers_without_a_token_in_between_runs_apart_and_who_hangs_that_one_too_is_guilty():
    found = Suspicion()
    found.hung("d1", was_alone=False)
    assert not found.is_open
    assert not found.is_suspect(99.0)
    found.hung("d2", was_alone=False)
    assert found.is_open
    assert found.is_suspect(0.0)
    assert not found.is_guilty(99.0)
    found.hung("d3", was_alone=False)
    assert not found.is_guilty(99.0), "others were there"
    found.hung("d4", was_alone=True)
    assert found.is_guilty(0.0)
    assert found.last == "d4"


def test_a_token_after_hangs_clears():
    found = Suspicion()
    for _ in range(2):
        found.hung("d1", was_alone=False)
    assert found.survived()
    assert not found.is_suspect(99.0)
    found.hung("d1", was_alone=True)
    assert not found.is_open
    assert not found.survived()


def test_too_many_crashes_are_enough_wherever_they_were():
    found = deaths(*(Death(f"d{k}", "x", 0.0, False) for k in range(MAX_CRASHES)))
    assert found.is_guilty(VERDICT_S)
