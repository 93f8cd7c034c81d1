"""Bugs on purpose: each is planted into the product, and the router's schedules must find it within a few seeds.

What the schedules never find, they do not test. Without a plant the same seeds pass: they are among those of test_router_schedules.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import decode_worker.service
import kvferry.worker.reader
import kvferry.worker.source
import router.members
from decode_worker.choice import Choice
from decode_worker.scheduler import DecodeScheduler
from kvferry.engine.plan import Draw
from kvferry.kv.block_id import chain_root
from kvferry.kv.pool import BlockPool
from kvferry.messages import ChoiceStart
from router.admission import FairQueue
from router.dispatcher import Dispatcher
from router.index import PrefixIndex
from router.journal import Journal
from router.live import Live
from router.members import Members
from router.view import WorkerView
from tests.router_schedules import Schedule, carry_out_all, draw

Plant = Callable[[pytest.MonkeyPatch], None]
MAX_SEEDS = 24
"""In which a bug must be found, of those whose schedules can show it."""
UNFIT = (TypeError, AttributeError, NameError)
BUGS: dict[str, tuple[Plant, Callable[[Schedule], bool]]] = {}


def bug(can_show: Callable[[Schedule], bool] = lambda schedule: True) -> Callable[[Plant], Plant]:
    def keep(plant: Plant) -> Plant:
        BUGS[plant.__name__] = plant, can_show
        return plant

    return keep


def moves(schedule: Schedule) -> bool:
    """Streams go on elsewhere."""
    return schedule.has("kill -9", "crash", "cut", "stop", role="d") and len(schedule.workers) > 2


def gives_back(schedule: Schedule) -> bool:
    """Requests whose sources fail are handed back: their workers may still speak of them."""
    has_sources = any(name.startswith("p") for name in schedule.workers)
    return has_sources and any(w.max_local_tokens < 512 for w in schedule.workers.values()) and len(schedule.faults) > 1


# ------------------------------------------------------------------------------------------------------------ the journal


@bug(gives_back)
def tokens_of_older_attempts_are_taken(patch: pytest.MonkeyPatch) -> None:
    accept = Journal.accept
    patch.setattr(Dispatcher, "_current", lambda self, member, number, attempt: self._lives.get(number))
    patch.setattr(Journal, "accept", lambda self, new: accept(self, replace(new, attempt=self.attempt)))


@bug(lambda schedule: schedule.has("lose a token", role="d"))
def a_gap_in_the_tokens_is_ignored(patch: pytest.MonkeyPatch) -> None:
    accept = Journal.accept

    def closed(self: Journal, new: Any) -> Any:
        return accept(self, replace(new, index=min(new.index, len(self.choices[new.choice].tokens))))

    patch.setattr(Journal, "accept", closed)


@bug(moves)
def a_continuation_forgets_what_was_emitted(patch: pytest.MonkeyPatch) -> None:
    starts = Journal.starts
    patch.setattr(Journal, "starts", lambda self: tuple(ChoiceStart(start.choice) for start in starts(self)))


@bug(moves)
def a_continuation_forgets_the_last_token(patch: pytest.MonkeyPatch) -> None:
    starts = Journal.starts
    patch.setattr(
        Journal, "starts", lambda self: tuple(replace(s, emitted_tokens=s.emitted_tokens[:-1]) for s in starts(self))
    )


@bug(moves)
def a_continuation_begins_one_index_further(patch: pytest.MonkeyPatch) -> None:
    index = Choice.index.fget
    assert index is not None
    patch.setattr(
        Choice, "index", property(lambda self: index(self) + (self.num_start_tokens > self.num_prompt_tokens))
    )


@bug(moves)
def a_continuation_draws_as_if_it_began(patch: pytest.MonkeyPatch) -> None:
    drawn = DecodeScheduler._draw

    def anew(choice: Choice) -> Draw:
        draw = drawn(choice)
        return replace(draw, index=draw.index - (choice.num_start_tokens - choice.num_prompt_tokens))

    patch.setattr(DecodeScheduler, "_draw", staticmethod(anew))


@bug(moves)
def a_continuation_has_another_seed(patch: pytest.MonkeyPatch) -> None:
    sampling = Live.sampling.fget
    assert sampling is not None

    def reseeded(self: Live) -> Any:
        same = sampling(self)
        return replace(same, seed=same.seed + (self.journal.attempt > 1))

    patch.setattr(Live, "sampling", property(reseeded))


@bug(lambda schedule: schedule.has("kill -9", "crash", "cut", role="d") and len(schedule.workers) > 2)
def a_continuation_swaps_two_choices(patch: pytest.MonkeyPatch) -> None:
    starts = Journal.starts

    def swapped(self: Journal) -> tuple[ChoiceStart, ...]:
        found = starts(self)
        numbers = [start.choice for start in reversed(found)]
        return tuple(replace(start, choice=number) for start, number in zip(found, numbers, strict=True))

    patch.setattr(Journal, "starts", swapped)


# ------------------------------------------------------------------------------------------------------- blocks and slots


@bug(lambda schedule: any(worker.fault_of_roads == "damage" for worker in schedule.workers.values()))
def a_block_is_sealed_without_a_look_at_its_digest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kvferry.worker.reader, "check_block", lambda block, copy: None)


@bug()
def two_requests_share_a_slot(patch: pytest.MonkeyPatch) -> None:
    reserve = BlockPool.reserve

    def shared(self: BlockPool, count: int) -> list[int]:
        taken = reserve(self, count)
        if taken and self._num_seals % 8 == 3:
            self._free.append(taken[-1])
        return taken

    def move(self: BlockPool, number: int, state: Any) -> Any:
        self._slots[number].state = state
        return self._slots[number]

    patch.setattr(BlockPool, "reserve", shared)
    patch.setattr(BlockPool, "_move", move)


@bug()
def a_hold_is_not_closed_when_its_request_is_aborted(patch: pytest.MonkeyPatch) -> None:
    abort = DecodeScheduler.abort

    def careless(self: DecodeScheduler, choice: Choice) -> None:
        choice.sequence._hold = None
        abort(self, choice)

    patch.setattr(DecodeScheduler, "abort", careless)


@bug()
def the_salt_is_left_out_of_the_root(patch: pytest.MonkeyPatch) -> None:
    for module in (router.members, decode_worker.service, kvferry.worker.source):
        patch.setattr(module, "chain_root", lambda model_id, fidelity, salt=b"": chain_root(model_id, fidelity))


# --------------------------------------------------------------------------------------------------------- the dispatcher


@bug(lambda schedule: schedule.has("cut", "freeze", role="router"))
def tokens_of_a_lost_worker_are_taken(patch: pytest.MonkeyPatch) -> None:
    """Its stream goes on; between its loss and the next placement the attempt is still the same."""

    def current(self: Dispatcher, member: Any, number: int, attempt: int) -> Live | None:
        live = self._lives.get(number)
        return live if live is not None and live.journal.attempt == attempt else None

    def lost(self: Dispatcher, member: Any) -> None:
        if self._links.pop(member.worker_id, None) is not None:
            self.detached(member, "it is no longer a member", may_have_died=True)

    patch.setattr(Dispatcher, "_current", current)
    patch.setattr(Dispatcher, "_lost", lost)


@bug(lambda schedule: any(ask.request.sampling.max_tokens > 1000 for ask in schedule.asks))
def cancelling_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dispatcher, "_cancel_on", lambda self, member, live, choices=(): None)


@bug()
def load_is_not_taken_off_a_worker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dispatcher, "_release", lambda self, live: self._placed.pop(live.number, None))


@bug(lambda schedule: any(name.startswith("p") for name in schedule.workers))
def load_is_not_taken_off_a_source(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dispatcher, "_release_prefill", lambda self, live, placed: None)


@bug(moves)
def a_lost_request_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    again = Dispatcher._queue_again

    def some(self: Dispatcher, live: Live, why: str, **more: Any) -> None:
        if live.number % 2:
            again(self, live, why, **more)

    patch.setattr(Dispatcher, "_queue_again", some)


@bug()
def an_end_is_told_twice(patch: pytest.MonkeyPatch) -> None:
    end = Dispatcher._end

    def twice(self: Dispatcher, live: Live, *state: Any) -> None:
        end(self, live, *state)
        if live.number % 7 == 0:
            self.observe(live)

    patch.setattr(Dispatcher, "_end", twice)


@bug()
def the_first_reader_that_leaves_ends_it_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dispatcher, "leave", Dispatcher.cancel)


@bug(lambda schedule: any(worker.num_slots < 40 for worker in schedule.workers.values()))
def the_queue_loses_a_request_when_another_is_removed(patch: pytest.MonkeyPatch) -> None:
    remove = FairQueue.remove

    def careless(self: FairQueue, live: Live) -> None:
        remove(self, live)
        others = self._of_tenant.get(live.request.tenant)
        if others and len(others) > 2:
            _, lost = others.pop()
            del self._keys[lost.number]
            self._count(lost, -1)

    patch.setattr(FairQueue, "remove", careless)


# ------------------------------------------------------------------------------------------------- what is known of workers


@bug(lambda schedule: schedule.has("kill -9", "crash", "roll"))
def a_row_is_given_out_again_with_what_its_last_worker_held(patch: pytest.MonkeyPatch) -> None:
    leave = Members._leave

    def careless(self: Members, member: Any) -> None:
        is_member = self._members.get(member.worker_id) is member
        leave(self, member)
        if is_member:
            self.view.free_row(member.row)

    patch.setattr(PrefixIndex, "retire", lambda self, row: None)
    patch.setattr(Members, "_leave", careless)


@bug(lambda schedule: schedule.has("kill", "kill -9", "crash", "roll"))
def a_row_is_never_free_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerView, "free_row", lambda self, row: None)


@bug(lambda schedule: schedule.has("lose events"))
def lost_block_events_are_not_missed(patch: pytest.MonkeyPatch) -> None:
    take = Members._take_events

    def trusting(self: Members, member: Any, progress: Any) -> bool:
        if member.next_event is not None:
            member.next_event = progress.first_event
        return take(self, member, progress)

    patch.setattr(Members, "_take_events", trusting)


@bug(lambda schedule: schedule.has("lose events"))
def a_snapshot_does_not_replace_what_was_known(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixIndex, "remove_all", lambda self, row: None)


@bug(lambda schedule: schedule.num_routers == 2)
def the_load_of_other_routers_is_never_forgotten(patch: pytest.MonkeyPatch) -> None:
    progressed = WorkerView.progressed

    def sticky(self: WorkerView, row: int, *rest: Any) -> None:
        before = self.ints["foreign_active"][row]
        progressed(self, row, *rest)
        self.set(row, foreign_active=max(before, self.ints["foreign_active"][row]))

    patch.setattr(WorkerView, "progressed", sticky)


@bug(lambda schedule: sum(fault.kind == "drain" and fault.name[0] == "d" for fault in schedule.faults) == 1)
def a_worker_that_drains_gets_new_requests(patch: pytest.MonkeyPatch) -> None:
    progressed = WorkerView.progressed

    def deaf(self: WorkerView, row: int, *rest: Any) -> None:
        progressed(self, row, *rest)
        self.set(row, is_draining=False)

    patch.setattr(WorkerView, "progressed", deaf)


# ----------------------------------------------------------------------------------------------------------------- the test


def seeds_that_can_show(can_show: Callable[[Schedule], bool]) -> list[int]:
    """Those with most faults first."""
    seeds = [seed for seed in range(300) if can_show(draw(seed))]
    return sorted(seeds, key=lambda seed: -len(draw(seed).faults))[:MAX_SEEDS]


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_and_without_it_the_same_schedule_is_right(name, monkeypatch):
    plant, can_show = BUGS[name]
    plant(monkeypatch)
    found = next((seed for seed in seeds_that_can_show(can_show) if goes_wrong(seed)), None)
    monkeypatch.undo()
    assert found is not None, f"{MAX_SEEDS} schedules do not find it"
    assert not goes_wrong(found)


def goes_wrong(seed: int) -> bool:
    try:
        carry_out_all([seed])
    except AssertionError as error:
        unfit = [cause for cause in causes(error) if isinstance(cause, UNFIT)]
        if unfit:
            raise ExceptionGroup("the plant does not fit into the product any more: it finds itself", unfit) from error
        return True
    return False


def causes(error: BaseException) -> Iterator[Exception]:
    """What it comes from in the end."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from causes(one)
    elif error.__cause__ is not None:
        yield from causes(error.__cause__)
    elif isinstance(error, Exception):
        yield error


def test_a_plant_that_does_not_fit_finds_nothing(monkeypatch):
    monkeypatch.setattr(Dispatcher, "_release", lambda self: None)
    with pytest.raises(ExceptionGroup, match="does not fit"):
        goes_wrong(0)
