"""Who is kept free for a request that must be alone, and for how long."""

from dataclasses import replace
from types import SimpleNamespace

from kvferry.messages import Role, WorkerDescription, WorkerProgress
from router.apart import Apart
from router.members import Member
from router.view import WorkerView

DECODE = WorkerDescription("d", "x", Role.DECODE, "a:1", "model", "float32", "n", 16, 64, 1000, 500, 1000, 8)


def members(*loads):
    view = WorkerView()
    made = [Member(replace(DECODE, worker_id=f"d{k}"), view) for k in range(len(loads))]
    for member, load in zip(made, loads, strict=True):
        member.is_attached, member.num_active = True, load
    return made


def suspect(number=1, is_suspect=True):
    return SimpleNamespace(number=number, suspicion=SimpleNamespace(is_suspect=lambda now: is_suspect))


def apart_with(*lives):
    apart = Apart()
    for live in lives:
        apart.push(live)
    return apart


def test_the_idlest_worker_is_kept_free_while_a_suspect_waits_and_no_longer():
    decode, one = members(3, 1, 2), suspect()
    apart = apart_with(one)
    apart.reserve(decode, 0.0)
    apart.reserve(decode, 1.0)
    assert [member.is_alone for member in decode] == [False, True, False]
    apart.discard(one)
    apart.reserve(decode, 2.0)
    assert not any(member.is_alone for member in decode)
    assert apart.is_idle


def test_nothing_is_kept_free_for_one_that_is_not_suspected():
    decode = members(1)
    apart_with(suspect(is_suspect=False)).reserve(decode, 0.0)
    assert not decode[0].is_alone


def test_where_a_suspect_runs_another_worker_is_kept_free_for_the_next():
    decode = members(0, 1)
    apart = apart_with(suspect(1), suspect(2))
    apart.reserve(decode, 0.0)
    apart.took(decode[0])
    apart.reserve(decode, 1.0)
    assert [member.is_alone for member in decode] == [True, True]


def test_a_worker_that_leaves_or_drains_is_kept_free_no_longer_and_another_one_is():
    decode = members(0, 1, 2)
    apart = apart_with(suspect())
    apart.reserve(decode, 0.0)
    decode[0].leave()
    apart.reserve(decode[1:], 1.0)
    assert [member.is_alone for member in decode[1:]] == [True, False]
    decode[1].progress = WorkerProgress(is_draining=True)
    apart.reserve(decode[1:], 2.0)
    assert [member.is_alone for member in decode[1:]] == [False, True]
