"""Whom a lost worker accuses."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.messages import LostSource, Role, WorkerDescription, WorkerProgress
from router.losses import Losses
from router.members import Member
from router.suspicion import MAX_HANGS, RETURN_S, VERDICT_S, Suspicion
from router.view import WorkerView

P1 = WorkerDescription("p1", "first", Role.PREFILL, "a:1", "model", "float32", "n", 16, 64, 1000, 500, 1000, 8)
SILENCE_S = 3.0


def member_of(description: WorkerDescription = P1, is_draining: bool = False, fell_silent: bool = False) -> Member:
    made = Member(description, WorkerView())
    made.progress, made.fell_silent = WorkerProgress(is_draining=is_draining), fell_silent
    return made


def live_of(has_begun: bool = True, runs_apart: bool = False) -> Any:
    return SimpleNamespace(has_begun=has_begun, runs_apart=runs_apart, suspicion=Suspicion())


def losses() -> Losses:
    return Losses(SILENCE_S)


def lost(is_hung: bool = False) -> LostSource:
    return LostSource("p1", "first", is_hung)


def test_only_who_took_part_is_accused_and_nobody_by_a_worker_that_drains():
    for is_draining, accused in ((False, [True, False]), (True, [False, False])):
        lives = [live_of(), live_of(has_begun=False)]
        losses().decode_lost(member_of(is_draining=is_draining), lives, False, 0, 1.0)
        assert [live.suspicion.is_open for live in lives] == accused


@pytest.mark.parametrize("apart_s", [0.1, SILENCE_S])
def test_of_two_that_fall_silent_together_only_the_first_accuses_whoever_sees_it(apart_s):
    """Their streams to the router may fall silent before they are missed as members."""
    of, lives = losses(), [live_of(), live_of()]
    for number, live in enumerate(lives):
        of.decode_lost(member_of(), [live], True, 0, 1.0 + number * apart_s)
    assert [bool(live.suspicion.last) for live in lives] == [True, apart_s == SILENCE_S]


def test_a_source_is_held_against_a_request_whether_the_router_missed_it_before_or_after():
    for is_missed_first in (False, True):
        of, live, member = losses(), live_of(), member_of()
        if is_missed_first:
            of.source_left(member, [live], True, 1.0)
            of.source_lost(live, lost(), None, 1.1)
        else:
            of.source_lost(live, lost(), member, 1.0)
            of.source_left(member, [live], True, 1.1)
        assert live.suspicion.has_lost_source
        assert not live.suspicion.is_suspect(2.0)
        live.suspicion.learn(replace(P1, incarnation="second", previous_end="signal 11"))
        assert live.suspicion.is_suspect(2.0)


def test_how_it_ended_may_be_known_before_it_is_said_to_be_lost():
    for end, is_suspect in (("signal 11", True), ("signal 9", False)):
        of, live = losses(), live_of()
        of.source_left(member_of(), [live], True, 1.0)
        of.source_lost(live, lost(), member_of(replace(P1, incarnation="second", previous_end=end)), 4.0)
        assert live.suspicion.is_suspect(4.0) is is_suspect


def test_a_source_that_falls_silent_hangs():
    of, live = losses(), live_of()
    for number in range(MAX_HANGS):
        name, at_s = f"p{number}", 10.0 * number
        member = member_of(replace(P1, worker_id=name), fell_silent=True)
        of.source_lost(live, LostSource(name, "first", is_hung=True), member, at_s)
        assert live.suspicion.has_just_lost(member.description, at_s + RETURN_S - 1)
        of.source_left(member, [live], True, at_s + 1)
    assert live.suspicion.is_suspect(30.0)
    assert not live.suspicion.unclear(30.0)


@pytest.mark.parametrize("is_missed", [False, True])
def test_a_source_that_drains_accuses_nobody(is_missed):
    of, live, member = losses(), live_of(), member_of(is_draining=True)
    if is_missed:
        of.source_left(member, [live], True, 1.0)
    of.source_lost(live, lost(), None if is_missed else member, 1.1)
    assert not live.suspicion.is_open


def test_a_source_that_is_still_a_member_was_not_lost():
    of, live, member = losses(), live_of(), member_of()
    members: Any = SimpleNamespace(get=lambda name: member)
    of.source_lost(live, lost(is_hung=True), member, 1.0)
    of.look_again(live, members, 1.0 + SILENCE_S)
    assert live.suspicion.has_lost_source
    of.look_again(live, members, 1.0 + 2 * SILENCE_S)
    assert not live.suspicion.has_lost_source
    assert not live.suspicion.is_suspect(1.0 + VERDICT_S)


def test_a_suspect_that_was_alone_in_its_step_is_guilty_once_it_is_clear_that_it_was_a_crash():
    of, live = losses(), live_of(runs_apart=True)
    of.source_lost(live, lost(), None, 1.0)
    assert live.suspicion.waits_for_verdict(2.0)
    assert not live.suspicion.is_guilty(2.0)
    live.suspicion.learn(replace(P1, incarnation="second", previous_end="signal 11"))
    assert live.suspicion.is_guilty(2.0)
