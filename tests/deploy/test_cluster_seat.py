"""A seat through its lives: pauses that grow, and a node that has something else installed. In virtual time, without Ray."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

import kvferry
from deploy.cluster import actors
from deploy.cluster.actors import SILENCE_S, why_dead
from deploy.cluster.program import digest_of
from deploy.cluster.reservations import Reservation
from deploy.cluster.seat import PLACING_S, Asked, Seat, Surroundings
from loadtest.virtual_time import run_virtual

READY = {
    "version": 1,
    "order": 1,
    "role": "decode",
    "state": "ready",
    "share": 1.0,
    "details": {},
    "code": None,
    "private_bytes": 1,
}


class FakeActor:
    """Is ready at once, and lost after `life_s`."""

    def __init__(self, life_s, version=kvferry.__version__, is_placed=True, begin_s=0.0, secret="", num_unheard=0):
        self._ends_s, self._version, self._is_placed = asyncio.get_running_loop().time() + life_s, version, is_placed
        self._begin_s, self.told, self.num_unheard = begin_s, [], num_unheard
        self._where = {
            "version": self._version,
            "address": "10.0.0.7",
            "host": "seven",
            "secret_digest": digest_of(secret),
        }

    def __getattr__(self, method):
        return SimpleNamespace(
            remote=lambda *arguments: SimpleNamespace(future=lambda: self._answer(method, arguments))
        )

    def _answer(self, method, arguments):
        coming = Future()
        if method == "where" and not self._is_placed:
            return coming
        if method == "where":
            coming.set_result(self._where)
        elif method == "report" and arguments == (0,):
            coming.set_result(READY)
        elif method == "report":
            loop = asyncio.get_running_loop()
            if self.num_unheard:
                self.num_unheard -= 1
            elif self._ends_s < loop.time() + 5:
                loop.call_at(self._ends_s, coming.set_exception, RayActorError())
            else:
                loop.call_later(5, coming.set_result, READY)
        else:
            self.told.append((method, *arguments[:1]))
            asyncio.get_running_loop().call_later(self._begin_s * (method == "begin"), coming.set_result, 1)
        return coming


@pytest.fixture
def given(monkeypatch):
    """Actors that the seat gets, one a life; a seat for them, and when it began each."""

    async def inline(function, *arguments):
        return function(*arguments)

    def begin(*actors, is_room_lost=False):
        left, began = list(actors), list[float]()

        async def room(seat):
            began.append(asyncio.get_running_loop().time())
            return Reservation("07", {}, None)

        async def has_room(seat):
            return not is_room_lost

        monkeypatch.setattr(Seat, "_find_or_create", lambda seat, room: left.pop(0)())
        around = Surroundings("space", "", room, has_room, lambda seat: Asked(seat.role, []), lambda seat: None)
        return Seat("decode-1", "decode", around), began

    monkeypatch.setattr(asyncio, "to_thread", inline)
    monkeypatch.setattr(actors.ray, "kill", lambda actor: None)
    return begin


def test_pauses_grow_to_half_a_minute_and_begin_anew_after_a_steady_life(given):
    lives_s = [1, 1, 1, 1, 1, 1, 1, 1, 100, 1]

    async def main():
        seat, began = given(*(lambda life_s=life_s: FakeActor(life_s) for life_s in [*lives_s, 1000]))
        running = asyncio.ensure_future(seat.run())
        while len(began) <= len(lives_s):
            await asyncio.sleep(1)
        assert seat.status.num_starts == len(lives_s) + 1
        running.cancel()
        return began

    began = run_virtual(main)
    pauses = [after - before - life_s for before, after, life_s in zip(began, began[1:], lives_s, strict=False)]
    assert pauses == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30, 0.5, 1], abs=0.01)


def test_another_version_of_kvferry_on_a_node_is_refused_with_the_nodes_name(given):
    async def main():
        seat, began = given(lambda: FakeActor(100, version="0.0.1"), lambda: FakeActor(100))
        running = asyncio.ensure_future(seat.run())
        while seat.status.state != "waiting":
            await asyncio.sleep(0.01)
        assert f"node 10.0.0.7 (seven) has kvferry 0.0.1, not {kvferry.__version__}" in seat.status.reason
        assert seat.status.has_failed, "`up` gives up at once"
        while len(began) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)
        assert seat.status.is_ready, "once it is mended"
        running.cancel()

    run_virtual(main)


def test_an_actor_that_waits_on_a_node_that_was_lost_is_no_failure_and_another_is_asked_for(given):
    async def main():
        seat, began = given(lambda: FakeActor(0, is_placed=False), lambda: FakeActor(100), is_room_lost=True)
        running = asyncio.ensure_future(seat.run())
        while not seat.status.is_ready:
            assert not seat.status.has_failed
            await asyncio.sleep(0.01)
        assert began[1] - began[0] == pytest.approx(PLACING_S + 0.5, abs=0.02)
        running.cancel()

    run_virtual(main)


def test_an_actor_that_takes_long_to_begin_is_waited_for_as_long_as_it_has_its_room(given):
    async def main():
        seat, began = given(lambda: FakeActor(0, is_placed=False))
        running = asyncio.ensure_future(seat.run())
        await asyncio.sleep(20 * PLACING_S)
        assert (len(began), seat.status.num_starts) == (1, 1)
        running.cancel()

    run_virtual(main)


def test_what_changes_while_an_actor_is_told_what_to_run_is_told_it_next(given):
    async def main():
        actor = FakeActor(100, begin_s=1)
        seat, _ = given(lambda: actor)
        running = asyncio.ensure_future(seat.run())
        await asyncio.sleep(0.5)
        seat.change("prefill")
        await asyncio.sleep(1)
        seat.leave()
        await asyncio.sleep(1)
        assert actor.told == [("begin", "decode"), ("begin", "prefill"), ("drain",)]
        running.cancel()

    run_virtual(main)


def test_a_seat_is_settled_once_it_runs_what_it_was_told_last(given):
    async def main():
        seat, _ = given(lambda: FakeActor(100, begin_s=1))
        running = asyncio.ensure_future(seat.run())
        await asyncio.sleep(0.5)
        assert not seat.is_settled, "it was not told yet"
        await asyncio.sleep(1)
        assert seat.is_settled
        seat.change("decode")
        assert not seat.is_settled
        await asyncio.sleep(0.1)
        assert seat.is_settled, "that is what it runs"
        seat.change("prefill")
        await asyncio.sleep(2)
        assert not seat.is_settled, "it says that it still runs the other"
        running.cancel()

    run_virtual(main)


def test_a_seat_is_not_ready_as_what_it_does_not_run_yet(given):
    async def main():
        seat, _ = given(lambda: FakeActor(100))
        running = asyncio.ensure_future(seat.run())
        while not seat.status.is_ready:
            await asyncio.sleep(0.01)
        seat.change("prefill")
        assert seat.status.state == "ready", "the decode program has not heard of it"
        assert not seat.status.is_ready
        running.cancel()

    run_virtual(main)


def test_an_actor_of_another_secret_is_not_adopted_but_ended_and_another_one_begins(given):
    async def main():
        old, new = FakeActor(100, secret="of a deployment before"), FakeActor(100)
        seat, _ = given(lambda: old, lambda: new)
        running = asyncio.ensure_future(seat.run())
        while not seat.status.is_ready:
            assert not seat.status.has_failed
            await asyncio.sleep(0.01)
        assert (old.told, new.told) == ([], [("begin", "decode")])
        assert "secret" not in str(seat.as_dict()), "it is nobody's"
        running.cancel()

    run_virtual(main)


def test_of_what_ray_says_of_a_lost_actor_where_and_why_are_kept():
    traceback = ["ray::A (pid=1, ip=10.0.0.7)", *["  File some"] * 100, "ImportError: no such library"]
    failed = RayTaskError("begin", "\n".join(traceback), None)
    assert why_dead(ActorDiedError(failed)) == "ImportError: no such library (on node 10.0.0.7)"
    assert why_dead(RayError("short\n  text")) == "short text"
    said = why_dead(RayError(f"begins {'x' * 2000} ends"))
    assert said.startswith("begins x")
    assert said.endswith("x ends")
    assert len(said) < 700


def test_one_that_runs_and_answers_no_more_is_ended_and_begins_again(given):
    async def main():
        hung, next_one = FakeActor(10_000, num_unheard=2), FakeActor(10_000)
        seat, began = given(lambda: hung, lambda: next_one)
        running = asyncio.ensure_future(seat.run())
        while len(began) < 2:
            await asyncio.sleep(0.1)
        assert began[1] - began[0] == pytest.approx(2 * SILENCE_S + 0.5, abs=0.2)
        assert seat.status.previous_end == "it hangs: no answer for 30 s"
        await asyncio.sleep(1)
        assert (seat.status.is_ready, seat.status.num_starts) == (True, 2)
        running.cancel()

    run_virtual(main)


def test_one_question_without_an_answer_is_no_loss_nor_is_silence_while_it_loads(given, monkeypatch):
    async def main():
        unheard, loading = FakeActor(10_000, num_unheard=1), FakeActor(10_000, num_unheard=2)
        seat, began = given(lambda: unheard)
        running = asyncio.ensure_future(seat.run())
        await asyncio.sleep(200)
        assert (len(began), seat.status.is_ready) == (1, True), "it may be the controller that was stopped for a while"
        running.cancel()
        monkeypatch.setitem(READY, "state", "loading")
        seat, began = given(lambda: loading)
        running = asyncio.ensure_future(seat.run())
        await asyncio.sleep(200)
        assert (len(began), seat.status.state) == (1, "loading")
        running.cancel()

    run_virtual(main)
