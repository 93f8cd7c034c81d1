"""The router's cases in virtual time: losses, overload, fairness, draining, slow workers, and what it counts."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvferry.engine.engine import Engine, fake_engine
from kvferry.engine.plan import Plan, StepResult
from kvferry.errors import DeadlineExceeded, EngineFailure, EngineLost, InvalidRequest, NoWorker, Overloaded
from kvferry.messages import Refusal, Sampling
from loadtest.virtual_time import run_virtual
from router.idempotency import seed_of
from router.journal import FinishReason
from router.live import Live, LiveState, wait_all
from router.metrics import RouterMetrics
from router.openai_answer import numbers_of
from router.refused import REFUSED_S
from router.request import GenerationRequest
from router.retry_budget import LEAST
from router.suspicion import MAX_CRASHES, MAX_HANGS, MAX_UNCLEAR, VERDICT_S
from tests.cluster import Cluster, PacedExecutor, Router, cluster
from tests.hand_off import POISON, answered, counters, expected, poisoned, prompt_of, start_life, tokens_of
from tests.in_process import BLOCK, Deployment, Node, deployment, limits_of
from tests.router_schedules import Reading, Wanted, wanted

MARKED = 13


async def until(is_so: Callable[[], Any], limit_s: float = 60.0) -> float:
    """How long it took."""
    began = now()
    async with asyncio.timeout(limit_s):
        while not is_so():
            await asyncio.sleep(0.005)
    return now() - began


def now() -> float:
    return asyncio.get_running_loop().time()


def state_of(d: Deployment, name: str) -> str:
    member = d.members.get(name)
    return "gone" if member is None else member.state


def is_used(router: Router, name: str) -> bool:
    member = router.members.get(name)
    return member is not None and member.state == "ready"


def share(lives: list[Live]) -> Counter[str]:
    return Counter(live.decode_id for live in lives)


# ------------------------------------------------------------------------------------------------- what must move with it

PROMPT = tuple(prompt_of(70, "moved"))
SEEDED = Sampling(7, 40, 1.0)
UNDISTURBED = wanted(GenerationRequest(PROMPT, SEEDED), 0).tokens
REFERENCE = [f"{token} " for token in UNDISTURBED]
HALF_OF_A_STOP = 20
LATE = next(token for k, token in enumerate(UNDISTURBED) if k > HALF_OF_A_STOP + 2 and token not in UNDISTURBED[:k])
"""It comes only once the stream has been moved."""
MOVED = {
    "a seed": GenerationRequest(PROMPT, SEEDED),
    "penalties": GenerationRequest(PROMPT, replace(SEEDED, frequency_penalty=1.5, repetition_penalty=1.2)),
    "three choices": GenerationRequest(PROMPT, SEEDED, num_choices=3),
    "log-probabilities": GenerationRequest(PROMPT, replace(SEEDED, num_logprobs=2)),
    "half a stop string": GenerationRequest(PROMPT, SEEDED, stops=("".join(REFERENCE[HALF_OF_A_STOP - 2 : HALF_OF_A_STOP + 2]),)),
    "a stop token": GenerationRequest(PROMPT, replace(SEEDED, stop_token_ids=(LATE,)), num_choices=2),
}  # fmt: skip


@pytest.mark.parametrize("loss", ["kill", "hang", "drop to silence"])
@pytest.mark.parametrize("what", MOVED)
def test_a_stream_that_is_moved_is_what_it_had_been_undisturbed(what, loss):
    """T035: the reader has read all along, and sees no seam. Lost when half of the stop string has been generated."""

    async def main() -> None:
        request = MOVED[what]
        async with cluster(1, limits_of(16)) as made:
            for name in ("p1", "d1", "d2"):
                made.start(name)
            await made.ready()
            dispatcher = made.routers[0].dispatcher
            live = dispatcher.submit(request)
            reading = Reading(live)
            while len(live.journal.choices[0].tokens) < HALF_OF_A_STOP:
                await asyncio.sleep(0.001)
                reading.read()
            assert live.journal.choices[0].finish is None
            victim = live.decode_id
            if loss == "kill":
                await made.kill(victim)
            else:
                made.nodes[victim].executor.hang.clear()
                if loss == "drop to silence":
                    made.network.freeze(victim)
            while not live.has_ended:
                await live.changed.wait()
                reading.read()
            assert live.state is LiveState.FINISHED, live.error
            assert (live.journal.attempt, live.decode_id == victim) == (2, False)
            reading.check(request)
            assert all(finish is not None for finish in reading.finishes)
            for choice in live.journal.choices:
                assert [-one.logprob for one in choice.logprobs] == (choice.tokens if "log" in what else [])
            if loss != "kill":
                made.network.thaw(victim)
                made.nodes[victim].executor.hang.set()
                await made.ready()
            await made.quiet()

    run_virtual(main, 120)


def test_the_cases_of_what_is_moved_end_as_they_should_where_nothing_happens():
    stopped = wanted(MOVED["half a stop string"], 0)
    assert stopped == Wanted(
        [int(t) for t in REFERENCE[: HALF_OF_A_STOP + 2]], "".join(REFERENCE[:18]), FinishReason.STOP
    )
    assert len({tuple(wanted(MOVED["three choices"], choice).tokens) for choice in range(3)}) == 3
    assert wanted(MOVED["penalties"], 0).tokens != wanted(MOVED["a seed"], 0).tokens


def test_a_worker_that_does_not_fit_puts_out_nobody_of_its_name():
    async def main() -> None:
        async with cluster(1, limits_of(16)) as made:
            for name in ("d1", "d2"):
                made.start(name)
            await made.ready()
            router = made.routers[0]
            before = router.members.get("d1")
            assert before is not None
            lives = [router.dispatcher.submit(GenerationRequest(tuple(prompt_of(40, k)), SEEDED)) for k in range(4)]
            await until(lambda: all(tokens_of(live) for live in lives))
            stream = made.network.join(router.name)
            await stream.send(replace(before.description, model_id="another", incarnation="misfit"))
            refusal = await stream.receive()
            assert isinstance(refusal, Refusal)
            assert refusal.field == "model_id"
            await wait_all(lives)
            assert router.members.get("d1") is before
            assert router.dispatcher.counters["worker_losses"] == 0
            await made.quiet()

    run_virtual(main)


def engine_with(**identity: str) -> Engine:
    engine = fake_engine(400, BLOCK)
    return replace(engine, identity=replace(engine.identity, **identity))


@pytest.mark.parametrize("change", [{"model_id": "another"}, {"fidelity": "coarser"}])
def test_a_stream_does_not_go_on_with_another_model_and_a_request_without_a_token_is_answered_by_it(change):
    async def main() -> None:
        async with cluster(1, limits_of(16)) as made:
            made.start("d1")
            await made.ready()
            dispatcher = made.routers[0].dispatcher
            live = dispatcher.submit(GenerationRequest(PROMPT, replace(SEEDED, max_tokens=200)))
            await until(lambda: len(tokens_of(live)) > 50)
            fresh = dispatcher.submit(GenerationRequest(PROMPT, SEEDED))
            await made.kill("d1")
            await asyncio.sleep(1)
            assert live.state is fresh.state is LiveState.QUEUED
            made.start("d2", engine=engine_with(**change))
            with pytest.raises(NoWorker, match=r"began with model fake-1000 .*whose workers have all left") as caught:
                await wait_all([live])
            assert caught.value.retry_after_s >= 1
            await wait_all([fresh])
            assert tokens_of(fresh) == wanted(fresh.request, 0).tokens
            await made.quiet()

    run_virtual(main, 100)


def test_a_continuation_goes_where_numerics_are_equal_and_where_they_are_not_it_says_so():
    async def main() -> None:
        async with cluster(1, limits_of(16)) as made:
            made.start("d1")
            await made.ready()
            dispatcher = made.routers[0].dispatcher
            request = GenerationRequest(PROMPT, replace(SEEDED, max_tokens=300))
            live = dispatcher.submit(request)
            for name, numerics_id in (("d2", "others"), ("d3", "fake")):
                made.start(name, engine=engine_with(numerics_id=numerics_id))
            await made.ready()
            beside = [dispatcher.submit(GenerationRequest(tuple(prompt_of(40, k)), SEEDED)) for k in range(4)]
            await until(lambda: len(tokens_of(live)) > 20)
            await made.kill("d1")
            await until(lambda: live.decode_id == "d3")
            await until(lambda: len(tokens_of(live)) > 60)
            assert not live.summary().has_changed_numerics
            await made.kill("d3")
            await wait_all([live, *beside])
            assert live.decode_id == "d2"
            assert tokens_of(live) == wanted(request, 0).tokens
            assert numbers_of(live.summary())["numerics_changed"] is True
            assert dispatcher.counters["numerics_changed"] >= 1
            unmoved = dispatcher.submit(request)
            await wait_all([unmoved])
            assert "numerics_changed" not in numbers_of(unmoved.summary())
            await made.quiet()

    run_virtual(main, 100)


# ------------------------------------------------------------------------------------------------------ hung, or only busy


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_hung_engine_is_left_in_bounded_time_and_is_used_again_when_it_heals(is_frozen):
    """T041: its listener may still answer, or nothing of it may."""

    async def main() -> None:
        async with deployment("p1", "d1", "d2", limits=limits_of(16)) as d:
            for k in range(12):  # steps have been measured
                await answered(d, prompt_of(60, k), 4)
            lives = [d.submit(prompt_of(50, k), 200) for k in range(6)]
            await until(lambda: all(tokens_of(live) for live in lives))
            d.nodes["d1"].executor.hang.clear()
            if is_frozen:
                d.network.freeze("d1")
            assert await until(lambda: state_of(d, "d1") != "ready") < 7
            assert d.dispatcher.is_ready
            await wait_all(lives)
            assert [tokens_of(live) for live in lives] == [expected(prompt_of(50, k), 200) for k in range(6)]
            later = [d.submit(prompt_of(20, ("later", k)), 4) for k in range(6)]
            await wait_all(later)
            assert share(later) == {"d2": 6}
            d.network.thaw("d1")
            d.nodes["d1"].executor.hang.set()
            assert await until(lambda: state_of(d, "d1") == "ready") < 5
            healed = [d.submit(prompt_of(20, ("healed", k)), 4) for k in range(6)]
            await wait_all(healed)
            assert share(healed)["d1"] >= 1
            await d.quiet()

    run_virtual(main, 120)


def test_the_only_decode_worker_hung_is_not_ready_and_its_stream_goes_on_when_it_heals():
    async def main() -> None:
        async with deployment("d1") as d:
            await answered(d, prompt_of(60), 4)
            live = d.submit(prompt_of(50), 300)
            await until(lambda: len(tokens_of(live)) > 30)
            d.nodes["d1"].executor.hang.clear()
            assert await until(lambda: not d.dispatcher.is_ready) < 7
            with pytest.raises(NoWorker, match="decode pool"):
                d.submit(prompt_of(5), 4)
            await asyncio.sleep(20)
            d.nodes["d1"].executor.hang.set()
            await wait_all([live])
            assert tokens_of(live) == expected(prompt_of(50), 300)
            await d.quiet()

    run_virtual(main, 120)


def test_a_hung_prefill_worker_is_used_no_more_although_it_joins_again_and_again_until_it_heals():
    async def main() -> None:
        async with deployment("p1", "p2", "d1", limits=limits_of(0), num_slots=2000) as d:
            for k in range(10):  # steps have been measured
                await answered(d, prompt_of(60, k), 4)
            d.nodes["p1"].executor.hang.clear()
            lives = [d.submit(prompt_of(200, k), 2) for k in range(4)]
            await until(lambda: state_of(d, "p1") != "ready", 30)
            states: set[str] = set()
            for k in range(40):
                live = await answered(d, prompt_of(100, ("later", k)), 2)
                assert live.source_ids == ("p2",)
                states.add(state_of(d, "p1"))
                await asyncio.sleep(0.3)
            assert states == {"attaching", "gone"}
            assert not d.dispatcher.is_degraded
            await wait_all(lives)
            d.nodes["p1"].executor.hang.set()
            assert await until(lambda: state_of(d, "p1") == "ready") < 5
            await d.quiet()

    run_virtual(main)


@pytest.mark.parametrize("base_s", [0.5, 2.5])
def test_a_busy_worker_whose_steps_are_long_is_not_declared_dead(base_s):
    """T042: three minutes of long steps beside long prefills, the first request after a cold start among them."""

    async def main() -> None:
        step = dict(base_s=base_s, s_per_token=0.005)
        async with deployment("p1", "d1", "d2", step=step, step_target_s=10.0, itl_target_s=10.0) as d:
            began, number = now(), 0
            while now() - began < 180:
                lives = [d.submit(prompt_of(300 + 40 * k, (number, k)), 6) for k in range(4)]
                await wait_all(lives)
                assert all(live.journal.attempt == 1 for live in lives)
                number += 1
            assert number >= 3
            assert d.dispatcher.counters["worker_losses"] == d.dispatcher.counters["continuations"] == 0
            assert not sum(count for name in d.nodes for key, count in counters(d, name).items() if "failed" in key)
            await d.quiet()

    run_virtual(main, 600)


# ---------------------------------------------------------------------------------------------------- no worker, or no room


def test_without_a_decode_worker_the_refusal_comes_at_once_and_names_pool_and_time():
    """T046 (a), (d)."""

    async def main() -> None:
        async with deployment("p1") as d:
            with pytest.raises(NoWorker, match="decode pool is empty") as caught:
                d.submit(prompt_of(20), 4)
            assert caught.value.retry_after_s >= 1
            assert d.dispatcher.counters["accepted"] == 0

    run_virtual(main)


def test_where_all_are_at_capacity_the_refusal_names_pool_and_time_and_who_waits_does_so_no_longer_than_allowed():
    """T046 (c)."""

    async def main() -> None:
        limits = limits_of(16, max_queued=5, queue_timeout_s=3.0)
        async with deployment("p1", "d1", limits=limits, max_sequences=2) as d:
            running = [d.submit(prompt_of(50, k), 2000) for k in range(2)]
            waiting = [d.submit(prompt_of(50, ("waits", k)), 4) for k in range(5)]
            with pytest.raises(Overloaded, match="decode pool") as caught:
                d.submit(prompt_of(50), 4)
            assert caught.value.retry_after_s >= 1
            assert d.dispatcher.counters["rejected_overloaded"] == 1
            began = now()
            for live in waiting:
                with pytest.raises(Overloaded, match="decode pool: it is full"):
                    await wait_all([live])
                assert live.error is not None
            assert now() - began < 3.2
            await wait_all(running)
            await d.quiet()

    run_virtual(main)


def test_a_refusal_names_the_prefill_pool_where_decode_workers_are_full_of_what_waits_for_it():
    async def main() -> None:
        limits = limits_of(0, max_queued=3, queue_timeout_s=3.0)
        step = dict(s_per_token=0.01)
        async with deployment("p1", "d1", limits=limits, num_slots=1000, max_sequences=6, step=step) as d:
            taken = [d.submit(prompt_of(1000, k), 2) for k in range(9)]
            with pytest.raises(Overloaded, match="waiting for the prefill pool"):
                d.submit(prompt_of(1000, "refused"), 2)
            await until(lambda: sum(live.has_ended for live in taken) >= 3)
            expired = [live.error for live in taken if live.error is not None]
            assert expired
            assert all(isinstance(e, Overloaded) and "for the prefill pool" in e.message for e in expired), expired
            await until(lambda: all(live.has_ended for live in taken), 200)
            await d.quiet()

    run_virtual(main)


# ----------------------------------------------------------------------------------------------------- long ones, large ones


@pytest.mark.parametrize(("length", "local_tokens"), [(20, 16), (150, 0)])
def test_beside_a_very_long_prompt_that_is_always_there_short_ones_come_within_five_times_their_time_alone(
    length, local_tokens
):
    """T049: the 99th percentile, for a minute; computed where it decodes, or by the source that has the long one."""

    async def main() -> None:
        async with deployment("p1", "d1", limits=limits_of(local_tokens), num_slots=1400) as d:
            alone = [await answered(d, prompt_of(length, ("alone", k)), 1) for k in range(5)]
            alone_s = max(live.instants_s["first_token"] for live in alone)
            others_are_there = True

            async def keep_one_there() -> None:
                number = 0
                while others_are_there:
                    number += 1
                    await answered(d, prompt_of(7500, ("long", number)), 4)

            keeping = asyncio.ensure_future(keep_one_there())
            times_s: list[float] = []
            for k in range(60):
                await asyncio.sleep(1)
                live = await answered(d, prompt_of(length, k), 1)
                times_s.append(live.instants_s["first_token"])
            others_are_there = False
            await keeping
            assert sorted(times_s)[58] < 5 * alone_s, (alone_s, sorted(times_s)[50:])
            await d.quiet()

    run_virtual(main)


@pytest.mark.parametrize(
    ("prefill", "decode", "is_refused"),
    [(64, (64,), True), (64, (200,), False), (200, (64,), True), (64, (64, 200), False)],
)
def test_what_the_deployment_cannot_hold_is_refused_at_once_and_what_it_can_holds_up_nobody(
    prefill, decode, is_refused
):
    """T050: 1,500 tokens, pools of about a thousand on either side, or of different sizes within one pool."""

    async def main() -> None:
        async with deployment() as d:
            d.start("p1", num_slots=prefill)
            for k, num_slots in enumerate(decode):
                d.start(f"d{k + 1}", num_slots=num_slots)
            await d.ready()
            large = None
            if is_refused:
                with pytest.raises(InvalidRequest, match="1024 tokens") as caught:
                    d.submit(prompt_of(1500), 8)
                assert caught.value.code == "context_length_exceeded"
            else:
                large = d.submit(prompt_of(1500), 8)
            small = [d.submit(prompt_of(40, k), 4) for k in range(10)]
            await wait_all(small)
            assert max(live.instants_s["first_token"] for live in small) < 1.5
            assert [tokens_of(live) for live in small] == [expected(prompt_of(40, k), 4) for k in range(10)]
            if large is not None:
                await wait_all([large])
                assert large.decode_id == f"d{len(decode)}"
                assert tokens_of(large) == expected(prompt_of(1500), 8)
            await d.quiet()

    run_virtual(main)


def test_fifty_times_after_everything_is_aborted_the_next_request_starts_at_once():
    """T052: driven to full, all of it aborted at once, idle; then one that needs sixty per cent of the pool."""

    async def main() -> None:
        async with deployment("p1", "d1", num_slots=50, max_sequences=8) as d:
            rng = random.Random(52)
            for number in range(50):
                lives = [d.submit(prompt_of(rng.randrange(20, 200), (number, k)), 100) for k in range(12)]
                await asyncio.sleep(rng.random() * 0.8)
                assert len(d.dispatcher._queue), "it is full"
                for live in lives:
                    d.dispatcher.cancel(live)
                await asyncio.sleep(1.2)
                live = d.submit(prompt_of(470, number), 2)
                assert live.state is LiveState.PLACED
                await wait_all([live])
                assert live.instants_s["first_token"] < 0.8
                assert tokens_of(live) == expected(prompt_of(470, number), 2)
            await d.quiet()

    run_virtual(main)


# ------------------------------------------------------------------------------------------------------------ what is counted


async def leave_at_random(d: Deployment, live: Live, after_s: float) -> None:
    await asyncio.sleep(after_s)
    d.dispatcher.cancel(live)


def test_after_a_thousand_requests_of_which_many_left_or_failed_the_counts_are_zero_and_the_next_split_evenly():
    """T056: four in ten leave at random phases, one in twenty fails; a decode worker restarts; then 200 in peace."""

    async def main() -> None:
        async with deployment("p1", "p2", limits=limits_of(0, policy="cost")) as d:
            for name in ("d1", "d2"):
                d.start(name, engine=poisoned())
            await d.ready()
            rng, leaving, lives = random.Random(56), list[asyncio.Task[None]](), list[Live]()
            for number in range(1000):
                prompt = prompt_of(rng.randrange(1, 90), number)
                is_bad = rng.random() < 0.05
                in_the_tail = [*prompt_of(len(prompt) // BLOCK * BLOCK, number), *POISON]
                live = d.submit(in_the_tail if is_bad else prompt, rng.randrange(1, 24))
                lives.append(live)
                if not is_bad and rng.random() < 0.42:
                    leaving.append(
                        asyncio.ensure_future(leave_at_random(d, live, rng.choice((0.0, rng.random() * 0.6))))
                    )
                await asyncio.sleep(rng.choice((0.0, 0.0, 0.03)))
            await asyncio.gather(*leaving)
            await until(lambda: all(live.has_ended for live in lives))
            ends = Counter(live.state for live in lives)
            assert 30 <= ends[LiveState.FAILED] <= 75, ends
            assert ends[LiveState.CANCELLED] >= 300, ends
            await d.quiet()
            await d.kill("d2")
            await asyncio.sleep(1)
            start_life(d, "d2", 2)
            await d.ready()
            placed = {member.worker_id: member.num_placed for member in d.members}
            calm = list[Live]()
            for number in range(200):
                calm.append(d.submit(prompt_of(60, ("calm", number)), 8))
                await asyncio.sleep(0.02)
            await wait_all(calm)
            for pool in (("d1", "d2"), ("p1", "p2")):
                taken = [
                    member.num_placed - placed[name] for name in pool if (member := d.members.get(name)) is not None
                ]
                assert sum(taken) == 200, taken
                assert abs(taken[0] - 100) <= 20, f"{pool} within ten points of a half: {taken}"
            await d.quiet()

    run_virtual(main)


def test_no_gauge_is_ever_negative_and_what_began_has_ended():
    """T089: leaving in all phases, failures, kills, restarts and duplicates, scraped all the while."""

    async def main() -> None:
        async with deployment("p1", "p2") as d:
            for name in ("d1", "d2", "d3"):
                d.start(name, engine=poisoned())
            await d.ready()
            metrics, rng = RouterMetrics(d.dispatcher), random.Random(89)
            samples: Counter[str] = Counter()

            async def scrape() -> None:
                while True:
                    for line in metrics.render().splitlines():
                        if not line.startswith("#"):
                            name, value = line.rsplit(" ", 1)
                            assert float(value) >= 0, line
                            samples[re.split(r"[{ ]", name)[0]] += float(value) > 0
                    await asyncio.sleep(0.25)

            async def break_things() -> None:
                for life in range(2, 8):
                    await asyncio.sleep(1.5)
                    name = rng.choice(("d1", "d2", "d3", "p1"))
                    await d.kill(name)
                    await asyncio.sleep(0.4)
                    start_life(d, name, life, previous_end="signal 9")
                    await d.ready()

            async def ask(number: int) -> None:
                await asyncio.sleep(rng.random() * 10)
                prompt = tuple([*prompt_of(rng.randrange(1, 200), number), *(POISON if number % 17 == 0 else ()), 1])
                request = GenerationRequest(
                    prompt, Sampling(1, rng.randrange(1, 60), 0.0), timeout_s=rng.choice((None, 2.0))
                )
                try:
                    (live,) = d.dispatcher.submit_all([request], f"key {number}")
                    if rng.random() < 0.3:
                        d.dispatcher.submit_all([request], f"key {number}")
                except (NoWorker, Overloaded):
                    samples["refused"] += 1
                    return
                try:
                    async with asyncio.timeout(rng.choice((None, rng.random()))):
                        while not live.has_ended:
                            await live.changed.wait()
                except TimeoutError:
                    for _ in range(live.num_readers):
                        d.dispatcher.leave(live)

            scraping = asyncio.ensure_future(scrape())
            async with asyncio.TaskGroup() as group:
                group.create_task(break_things())
                for number in range(250):
                    group.create_task(ask(number))
            await d.quiet()
            assert not scraping.done()
            scraping.cancel()
            for name in (
                "kvferry_requests",
                "kvferry_worker_active",
                "kvferry_queued_tokens",
                "kvferry_worker_sequences",
            ):
                assert samples[name] or name == "kvferry_queued_tokens", (name, samples)
            counts = d.dispatcher.counters
            assert counts["accepted"] == counts["finished"] + counts["failed"] + counts["cancelled"] >= 200
            assert min(counts["finished"], counts["failed"], counts["cancelled"], counts["joined"]) > 0, counts
            idle = [
                line
                for line in metrics.render().splitlines()
                if line.startswith(("kvferry_requests{", "kvferry_queued"))
            ]
            assert len(idle) == 4
            assert all(line.endswith(" 0.0") for line in idle), idle

    run_virtual(main)


# ---------------------------------------------------------------------------------------------------------- readers, bursts


def test_a_reader_that_never_reads_costs_its_journal_and_holds_up_nobody():
    """T057: fifty of them beside fifty that read; the worker has given up everything long before anybody reads."""

    async def main() -> None:
        async def pace(num_idle: int) -> float:
            async with deployment("p1", "d1", num_slots=2500, max_sequences=128) as d:
                idle = [d.submit(prompt_of(20, ("idle", k)), 300) for k in range(num_idle)]
                read = [d.submit(prompt_of(20, k), 300) for k in range(100 - num_idle)]
                readings = [Reading(live) for live in read]
                began = now()
                while not all(live.has_ended for live in read):
                    for reading in readings:
                        reading.read()
                    await asyncio.sleep(0.05)
                took_s = now() - began
                await until(lambda: all(live.has_ended for live in idle))
                await d.quiet()
                assert not d.dispatcher._links["d1"][0]._outbox
                for k, live in enumerate(idle):
                    assert len(live.journal.choices[0]._pieces) == 301, "one for each token, and the rest"
                    reading = Reading(live)
                    reading.read()
                    assert reading.tokens[0] == expected(prompt_of(20, ("idle", k)), 300)
                return took_s

        assert await pace(50) == pytest.approx(await pace(0), rel=0.02)

    run_virtual(main)


def test_three_hundred_at_once_of_all_sizes_are_all_answered():
    """T058: from idle, within one turn of the event loop; three rounds."""

    async def main() -> None:
        async with deployment("p1", "p2", "d1", "d2", num_slots=600) as d:
            rng = random.Random(58)
            for number in range(3):
                asked = [
                    (prompt_of(rng.choice((1, 17, 60, 300)), (number, k)), rng.choice((1, 1, 2, 4))) for k in range(300)
                ]
                lives = [d.submit(prompt, 6, n=n) for prompt, n in asked]
                await wait_all(lives)
                for live, (prompt, n) in zip(lives, asked, strict=True):
                    assert [choice.tokens for choice in live.journal.choices] == [expected(prompt, 6)] * n
                await d.quiet()
            assert d.dispatcher.counters["worker_losses"] == 0
            assert len(d.nodes) == 4

    run_virtual(main)


# -------------------------------------------------------------------------------------------------------- who is next, or none


def test_a_tenant_with_two_hundred_that_wait_does_not_hold_up_another():
    async def main() -> None:
        async with deployment("p1", "d1", limits=limits_of(16, queue_timeout_s=600), max_sequences=4) as d:
            alone = await answered(d, prompt_of(60, "alone"), 20, tenant=b"few")
            many = [d.submit(prompt_of(60, k), 20, tenant=b"many") for k in range(200)]
            await asyncio.sleep(0.5)
            for number in range(5):
                await asyncio.sleep(0.1)  # so that others have taken the room that the last one left
                live = await answered(d, prompt_of(60, ("few", number)), 20, tenant=b"few")
                assert live.instants_s["closed"] < 4 * alone.instants_s["closed"]
            assert sum(not live.has_ended for live in many) > 100
            await wait_all(many)
            await d.quiet()

    run_virtual(main)


def test_who_would_get_its_first_token_too_late_is_refused_when_it_comes_and_who_is_taken_gets_it_in_time():
    async def main() -> None:
        limits = limits_of(16, slo_ttft_s=2.0)
        async with deployment("p1", "d1", limits=limits, max_sequences=4) as d:
            taken, refusals = list[Live](), list[Overloaded]()
            for number in range(400):  # about twice of what it can do
                try:
                    taken.append(d.submit(prompt_of(40, number), 40))
                except Overloaded as error:
                    refusals.append(error)
                await asyncio.sleep(0.08)
            await wait_all(taken)
            assert len(refusals) > 50
            assert all("would wait" in error.message and error.retry_after_s >= 1 for error in refusals)
            times_s = sorted(live.instants_s["first_token"] for live in taken)
            assert times_s[int(0.95 * len(times_s))] < 2.5, times_s[-20:]
            assert len(taken) > 100, "what it can do, it does"
            impatient = d.submit(prompt_of(40, "impatient"), 4, slo_ttft_s=0.001)
            await wait_all([impatient])  # nothing waits: it is taken, whatever it wishes
            await d.quiet()

    run_virtual(main)


# --------------------------------------------------------------------------------------------------------- whose fault it was


class KillerExecutor(PacedExecutor):
    """Its worker dies in the step in which a marked prompt's tail runs."""

    die: Callable[[], None] = staticmethod(lambda: None)

    async def execute(self, plan: Plan) -> StepResult:
        if any(chunk.tokens.count(MARKED) >= BLOCK for chunk in plan.chunks):
            self.die()
            await asyncio.get_running_loop().create_future()
        return await super().execute(plan)


class Mortal:
    """Decode workers that crash under a marked prompt and are started again a moment later, as a supervisor does."""

    def __init__(self, made: Cluster, *names: str):
        self.made, self.num_deaths, self._lives = made, 0, 1
        for name in names:
            self._start(name, "")

    def _start(self, name: str, previous_end: str) -> Node:
        node = self.made.start(name, self._lives, previous_end=previous_end)
        executor = KillerExecutor(node.engine.runner)
        executor.die = lambda: self._die(name)
        node.executor = executor
        node.worker.loop._executor = executor  # type: ignore[union-attr]
        return node

    def _die(self, name: str) -> None:
        self.made.group.create_task(self._die_and_come_back(name))

    async def _die_and_come_back(self, name: str) -> None:
        self.num_deaths += 1
        await self.made.kill(name)
        await asyncio.sleep(1.0)
        self._lives += 1
        self._start(name, "signal 11")


KILLER = GenerationRequest((*prompt_of(30, "killer"), *[MARKED] * BLOCK), Sampling(0, 8, 0.0))


def test_a_request_that_kills_its_worker_is_found_out_and_refused_and_the_innocent_go_on_exactly():
    """Also where the worker dies at the very beginning of the step: who takes part in it has been said before."""

    async def main() -> None:
        async with cluster(1, limits_of(16)) as made:
            mortal = Mortal(made, "d1", "d2", "d3")
            await made.ready()
            dispatcher = made.routers[0].dispatcher
            innocents = [GenerationRequest(tuple(prompt_of(50, k)), Sampling(k, 400, 1.0)) for k in range(9)]
            streams = [dispatcher.submit(request) for request in innocents]
            await until(lambda: all(tokens_of(live) for live in streams))
            killer = dispatcher.submit(KILLER)
            with pytest.raises(EngineFailure, match="killed the decode worker"):
                await wait_all([killer])
            num_deaths = mortal.num_deaths
            assert num_deaths <= MAX_UNCLEAR + 2, "until it waits for a verdict, and once apart"
            await wait_all(streams)
            for request, live in zip(innocents, streams, strict=True):
                assert tokens_of(live) == wanted(request, 0).tokens
            assert any(live.journal.attempt > 1 for live in streams)
            await made.ready()
            for same in (KILLER, replace(KILLER, sampling=replace(KILLER.sampling, seed=5))):
                with pytest.raises(InvalidRequest, match="refused") as caught:
                    dispatcher.submit(same)
                assert caught.value.code == "request_refused"
            for request in innocents[:3]:
                live = dispatcher.submit(replace(request, sampling=replace(request.sampling, max_tokens=4)))
                await wait_all([live])
            assert mortal.num_deaths == num_deaths
            await made.quiet()
            await asyncio.sleep(REFUSED_S)
            assert dispatcher.submit(KILLER).state is LiveState.PLACED, "it is not refused for ever"
            for live in dispatcher.lives:
                dispatcher.cancel(live)
            await asyncio.sleep(3)
            await made.ready()
            await made.quiet()

    run_virtual(main)


class HangingExecutor(PacedExecutor):
    """The step in which a marked prompt's tail runs never ends."""

    async def execute(self, plan: Plan) -> StepResult:
        if any(chunk.tokens.count(MARKED) >= BLOCK for chunk in plan.chunks):
            await asyncio.get_running_loop().create_future()
        return await super().execute(plan)


def test_a_request_that_hangs_its_workers_is_found_out_and_refused_before_it_has_hung_the_pool():
    """A hung engine's worker joins again and again, as the life that it was."""

    async def main() -> None:
        async with cluster(1, limits_of(16)) as made:
            names = ("d1", "d2", "d3", "d4")
            for name in names:
                node = made.start(name)
                node.executor = node.worker.loop._executor = HangingExecutor(node.engine.runner)  # type: ignore[union-attr]
            await made.ready()
            dispatcher = made.routers[0].dispatcher
            innocents = [GenerationRequest(tuple(prompt_of(50, k)), Sampling(k, 900, 1.0)) for k in range(8)]
            streams = [dispatcher.submit(request) for request in innocents]
            await until(lambda: all(tokens_of(live) for live in streams))
            killer = dispatcher.submit(KILLER)
            with pytest.raises(EngineFailure, match="hung the decode worker"):
                await wait_all([killer])
            assert killer.journal.attempt == MAX_HANGS + 1
            with pytest.raises(InvalidRequest, match="killed or hung") as caught:
                dispatcher.submit(KILLER)
            assert caught.value.code == "request_refused"
            assert dispatcher.is_ready
            await wait_all(streams)
            for request, live in zip(innocents, streams, strict=True):
                assert tokens_of(live) == wanted(request, 0).tokens
            await made.stop()

    run_virtual(main)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_who_was_there_when_two_workers_were_stopped_in_a_row_runs_apart_at_worst_and_goes_on(is_stopped):
    """Before its first token or after; the workers heal."""

    async def main() -> None:
        async with cluster(1, limits_of(16)) as made:
            for name in ("d1", "d2", "d3"):
                made.start(name, step=dict(base_s=0.05))
            await made.ready()
            router = made.routers[0]
            requests = [GenerationRequest(tuple(prompt_of(300, k)), Sampling(k, 40, 1.0)) for k in range(9)]
            lives = [router.dispatcher.submit(request) for request in requests]
            for _ in range(2):
                await until(lambda: any(live.has_begun for live in lives if not live.has_ended))
                victim = Counter(live.decode_id for live in lives if live.has_begun).most_common(1)[0][0]
                made.nodes[victim].executor.hang.clear()
                if is_stopped:
                    made.network.freeze(victim)
                await until(lambda victim=victim: not is_used(router, victim))
                made.network.thaw(victim)
                made.nodes[victim].executor.hang.set()
            await wait_all(lives)
            for request, live in zip(requests, lives, strict=True):
                assert tokens_of(live) == wanted(request, 0).tokens
            assert router.dispatcher.counters["worker_losses"] > 2
            assert max(live.journal.attempt for live in lives) > MAX_HANGS
            await made.ready()
            await made.quiet()

    run_virtual(main)


def test_twenty_kills_from_outside_hold_nothing_against_anybody():
    """A long stream loses its worker twenty times, and is neither blamed nor set apart."""

    async def main() -> None:
        async with cluster(1, limits_of(16)) as made:
            for name in ("d1", "d2"):
                made.start(name)
            await made.ready()
            dispatcher, requests = made.routers[0].dispatcher, list[GenerationRequest]()
            for k in range(3):
                requests.append(GenerationRequest(tuple(prompt_of(40, k)), Sampling(1 + k, 1500, 1.0)))
            lives = [dispatcher.submit(request) for request in requests]
            for life in range(2, 22):
                num_tokens = len(tokens_of(lives[0]))
                await until(lambda num_tokens=num_tokens: len(tokens_of(lives[0])) > num_tokens + 5)
                victim = lives[0].decode_id
                await made.kill(victim)
                await asyncio.sleep(0.3)
                made.start(victim, life, previous_end="signal 9")
                await made.ready()
                assert not any(live.suspicion.is_suspect(now()) for live in lives)
                assert not any(member.is_alone for member in made.routers[0].members)
            await wait_all(lives)
            assert lives[0].journal.attempt == 21
            for request, live in zip(requests, lives, strict=True):
                assert tokens_of(live) == wanted(request, 0).tokens
            again = dispatcher.submit(replace(requests[0], sampling=replace(requests[0].sampling, max_tokens=4)))
            await wait_all([again])
            await made.quiet()

    run_virtual(main)


def test_a_stream_that_outlives_one_drained_worker_after_the_other_is_blamed_for_none_of_them():
    """Rolled over to new names, so that nobody comes back to tell how the old ones ended."""

    async def main() -> None:
        async with cluster(1, limits_of(16)) as made:
            made.start("d0", num_slots=600, step=dict(base_s=0.05))
            await made.ready()
            dispatcher = made.routers[0].dispatcher
            request = GenerationRequest(tuple(prompt_of(40, 1)), Sampling(1, 3000, 1.0))
            live = dispatcher.submit(request)
            for k in range(1, MAX_CRASHES + 2):
                await asyncio.sleep(2)
                old = live.decode_id
                made.nodes[old].worker.body.is_draining = True
                made.start(f"d{k}", num_slots=600, step=dict(base_s=0.05))
                await made.ready(f"d{k}")
                await asyncio.sleep(12)
                await made.kill(old)  # its grace has ended
                await asyncio.sleep(VERDICT_S / 5)
                assert live.decode_id == f"d{k}"
                assert not live.suspicion.is_open
            assert live.journal.attempt == MAX_CRASHES + 2
            await wait_all([live])
            assert tokens_of(live) == wanted(request, 0).tokens
            await made.quiet()

    run_virtual(main)


def test_placements_that_fail_before_a_first_token_are_made_again_within_a_budget():
    """Their source is silent, and the decode worker hands back what it may not compute itself: all at once."""

    async def main() -> None:
        async with deployment("p1", "d1", limits=limits_of(0), max_local_tokens=0) as d:
            d.network.freeze("p1")
            lives = [d.submit(prompt_of(100, k), 4) for k in range(30)]
            await until(lambda: all(live.has_ended for live in lives))
            failed = [live for live in lives if live.state is LiveState.FAILED]
            assert len(failed) == 30 - LEAST == d.dispatcher.counters["retries_refused"]
            for live in failed:
                assert isinstance(live.error, NoWorker)
                assert "too many placements fail" in live.error.message
                assert live.error.retry_after_s >= 1
            for k, live in enumerate(lives):
                assert live in failed or tokens_of(live) == expected(prompt_of(100, k), 4)
            d.network.thaw("p1")
            await d.ready()
            await d.quiet()

    run_virtual(main)


def test_a_workers_loss_fails_nobody_however_many_it_had_and_whether_they_had_a_token():
    async def main() -> None:
        async with deployment("d1", num_slots=2000) as d:
            streams = [d.submit(prompt_of(20, ("stream", k)), 200) for k in range(20)]
            await until(lambda: all(tokens_of(live) for live in streams))
            d.nodes["d1"].executor.hang.clear()
            fresh = [d.submit(prompt_of(100, k), 4) for k in range(30)]
            await asyncio.sleep(0.2)
            await d.kill("d1")
            await asyncio.sleep(0.5)
            start_life(d, "d1", 2, previous_end="signal 9")
            await wait_all([*fresh, *streams])
            assert [tokens_of(live) for live in streams] == [
                expected(prompt_of(20, ("stream", k)), 200) for k in range(20)
            ]
            assert [tokens_of(live) for live in fresh] == [expected(prompt_of(100, k), 4) for k in range(30)]
            assert d.dispatcher.counters["worker_losses"] == 50
            await d.quiet()

    run_virtual(main)


# ---------------------------------------------------------------------------------------------------- draining, slow workers


def test_a_worker_that_drains_ends_what_it_has_and_gets_nothing_new():
    async def main() -> None:
        async with deployment("p1", "d1", "d2", "d3") as d:
            lives = [d.submit(prompt_of(50, k), 500) for k in range(9)]
            await until(lambda: all(tokens_of(live) for live in lives))
            there = [live for live in lives if live.decode_id == "d2"]
            assert there
            d.nodes["d2"].worker.body.is_draining = True
            await until(lambda: state_of(d, "d2") == "draining", 1.5)
            later = [d.submit(prompt_of(50, ("later", k)), 20) for k in range(30)]
            await wait_all([*lives, *later])
            assert share(later).keys() == {"d1", "d3"}
            assert all((live.decode_id, live.journal.attempt) == ("d2", 1) for live in there)
            assert [tokens_of(live) for live in lives] == [expected(prompt_of(50, k), 500) for k in range(9)]
            await d.kill("d2")  # as its process ends: nothing is lost by it
            assert d.dispatcher.counters["worker_losses"] == 0
            await d.quiet()

    run_virtual(main)


def test_where_all_drain_what_comes_is_refused_at_once_and_what_is_there_ends():
    async def main() -> None:
        async with deployment("d1") as d:
            live = d.submit(prompt_of(50), 300)
            d.nodes["d1"].worker.body.is_draining = True
            await until(lambda: state_of(d, "d1") == "draining", 1.5)
            with pytest.raises(NoWorker, match="decode pool") as caught:
                d.submit(prompt_of(50), 4)
            assert caught.value.retry_after_s >= 1
            start_life(d, "d2", 1)
            await d.ready()
            later = await answered(d, prompt_of(50), 4)
            await wait_all([live])
            assert (live.decode_id, later.decode_id) == ("d1", "d2")
            assert tokens_of(live) == expected(prompt_of(50), 300)
            await d.quiet()

    run_virtual(main)


def test_a_worker_much_slower_than_its_pool_is_set_aside_keeps_its_streams_and_comes_back():
    async def main() -> None:
        async with cluster(1, limits_of(16, policy="round-robin")) as made:
            names = ("d1", "d2", "d3", "d4")
            for name in names:
                made.start(name)
            await made.ready()
            router = made.routers[0]

            def submit(seed: object, max_tokens: int) -> Live:
                return router.dispatcher.submit(
                    GenerationRequest(tuple(prompt_of(20, seed)), Sampling(0, max_tokens, 0.0))
                )

            executor = made.nodes["d2"].executor
            assert isinstance(executor, PacedExecutor)
            executor.slowness = 8.0
            lives = [submit(k, 300) for k in range(8)]
            there = [live for live in lives if live.decode_id == "d2"]
            slow = router.members.get("d2")
            assert slow is not None
            assert there
            await until(lambda: slow.is_aside, 10)
            others = [submit(("others", k), 8) for k in range(20)]
            await wait_all(others)
            assert share(others).keys() == {"d1", "d3", "d4"}
            executor.slowness = 1.0
            await wait_all(lives)
            assert all(live.journal.attempt == 1 for live in lives)
            assert [tokens_of(live) for live in lives] == [expected(prompt_of(20, k), 300) for k in range(8)]
            await until(lambda: not slow.is_aside, 30)
            back = [submit(("back", k), 8) for k in range(20)]
            await wait_all(back)
            assert share(back)["d2"] >= 5, "its turns, and those that it has missed"
            assert router.members.counters["set_aside"] == 1
            await made.quiet()

    run_virtual(main)


def test_a_slow_worker_that_is_the_last_one_is_used_at_once_and_readiness_and_placing_agree():
    async def main() -> None:
        async with cluster(1, limits_of(16, policy="round-robin")) as made:
            for name in ("d1", "d2"):
                made.start(name)
            await made.ready()
            router = made.routers[0]
            executor = made.nodes["d2"].executor
            assert isinstance(executor, PacedExecutor)
            executor.slowness = 8.0
            requests = [GenerationRequest(tuple(prompt_of(20, k)), Sampling(0, 100, 0.0)) for k in range(8)]
            lives = [router.dispatcher.submit(request) for request in requests]
            slow = router.members.get("d2")
            assert slow is not None
            await until(lambda: slow.is_aside, 10)
            await made.kill("d1")
            await until(lambda: router.members.get("d1") is None, 5)
            assert router.dispatcher.is_ready
            assert slow.state == "ready"
            one = router.dispatcher.submit(GenerationRequest(tuple(prompt_of(20, "new")), Sampling(0, 4, 0.0)))
            assert one.state is LiveState.PLACED
            await wait_all([*lives, one])
            await made.quiet()

    run_virtual(main)


# --------------------------------------------------------------------------------------------------------- what routers know


def foreign(router: Router) -> dict[str, int]:
    view = router.members.view
    return {member.worker_id: int(view.ints["foreign_active"][member.row]) for member in router.members}


def test_two_routers_agree_on_load_each_knows_the_others_sequences_and_places_beside_them():
    async def main() -> None:
        async with cluster(2, limits_of(16)) as made:
            for name in ("p1", "d1"):
                made.start(name)
            await made.ready()
            one, two = made.routers

            def submit(router: Router, seed: object, max_tokens: int = 400) -> Live:
                request = GenerationRequest(tuple(prompt_of(30, seed)), Sampling(0, max_tokens, 0.0))
                return router.dispatcher.submit(request)

            busy = [submit(one, k) for k in range(6)]
            await asyncio.sleep(1.2)
            assert (foreign(one), foreign(two)) == ({"p1": 0, "d1": 0}, {"p1": 0, "d1": 6})
            made.start("d2")
            await made.ready()
            quick = [submit(two, ("two", k), 300) for k in range(4)]
            assert share(quick) == {"d2": 4}, "beside what the other router has on d1"
            await asyncio.sleep(1.2)
            assert foreign(one) == {"p1": 0, "d1": 0, "d2": 4}
            await wait_all([*busy, *quick])
            await asyncio.sleep(1.2)
            assert set(foreign(one).values()) == set(foreign(two).values()) == {0}
            await made.quiet()

    run_virtual(main)


def test_lost_block_events_are_asked_for_again_and_the_index_is_right():
    """Events of the sealed and of the evicted alike."""

    async def main() -> None:
        async with cluster(1, limits_of(0)) as made:
            for name in ("p1", "d1"):
                made.start(name, num_slots=60)
            await made.ready()
            router = made.routers[0]
            for number in range(8):
                made.network.losses["events", ("p1", "d1")[number % 2]] = 1
                for k in range(3):
                    request = GenerationRequest(tuple(prompt_of(20 * BLOCK, (number, k))), Sampling(0, 2, 0.0))
                    await wait_all([router.dispatcher.submit(request)])
                await made.quiet()
                assert router.members.counters["snapshots_asked"] == number + 1
            assert all(
                counter > 0 for counter in (made.nodes[name].worker.body.pool.num_evictions for name in ("p1", "d1"))
            )

    run_virtual(main)


def test_a_hot_prefix_spreads_over_the_decode_workers_and_is_computed_once():
    """Its holder is loaded: others take it from there, rather than compute it or leave it waiting."""

    async def main() -> None:
        async with deployment("p1", "d1", "d2", "d3", limits=limits_of(16), num_slots=2000) as d:
            prefix = prompt_of(40 * BLOCK, "hot")
            await answered(d, [*prefix, 1], 4)
            await asyncio.sleep(1.5)
            lives = []
            for k in range(30):
                lives.append(d.submit([*prefix, *prompt_of(10, k)], 60))
                await asyncio.sleep(0.05)
            await wait_all(lives)
            assert [tokens_of(live) for live in lives] == [
                expected([*prefix, *prompt_of(10, k)], 60) for k in range(30)
            ]
            assert min(share(lives)[name] for name in ("d1", "d2", "d3")) >= 8, share(lives)
            computed = sum(counters(d, name)["computed_tokens"] for name in ("p1",))
            assert computed <= 41 * BLOCK, "no prefix twice"
            await d.quiet()

    run_virtual(main)


def test_next_sources_are_spread_so_that_who_loses_one_does_not_meet_all_others_at_the_same():
    async def main() -> None:
        async with deployment(
            "p1", "p2", "p3", "p4", "p5", "d1", limits=limits_of(0, policy="cost"), num_slots=2000
        ) as d:
            lives = [d.submit(prompt_of(100, k), 2) for k in range(40)]
            assert all(len(set(live.source_ids)) == len(live.source_ids) == 3 for live in lives)
            first, second = (Counter(live.source_ids[k] for live in lives) for k in (0, 1))
            assert first.keys() == second.keys() == {f"p{k}" for k in range(1, 6)}
            assert max(first.values()) <= 12, first
            assert max(second.values()) <= 16, second
            of_p1 = Counter(live.source_ids[1] for live in lives if live.source_ids[0] == "p1")
            assert len(of_p1) >= 2, "the same first one, and different next ones"
            await d.kill("p1")
            await wait_all(lives)
            assert [tokens_of(live) for live in lives] == [expected(prompt_of(100, k), 2) for k in range(40)]
            await d.quiet()

    run_virtual(main)


def test_a_loaded_decode_worker_is_no_cheaper_for_what_is_fetched():
    """Requests that come at once, before anything has been measured, spread: whether the source or the worker itself computes them."""

    async def main() -> None:
        for length in (20, 50, 200, 700):
            async with deployment("p1", "d1", "d2", "d3", limits=limits_of(16)) as d:
                lives = [d.submit(prompt_of(length, k), 100) for k in range(12)]
                assert sorted(share(lives).values()) == [4, 4, 4], (length, share(lives))
                await wait_all(lives)
                await d.quiet()

    run_virtual(main)


def test_a_worker_of_which_one_batch_size_is_measured_is_not_taken_for_one_that_never_slows_down():
    """Others have shown what another stream costs: what comes is shared, as if it were known of this one, too."""

    async def main() -> None:
        async with deployment("d1", limits=limits_of(16), num_slots=2000) as d:
            await answered(d, prompt_of(10, "alone"), 20)
            first = [d.submit(prompt_of(10, k), 300) for k in range(8)]
            await until(lambda: all(len(tokens_of(live)) > 20 for live in first))
            d.start("d2", num_slots=2000)
            await d.ready()
            one = d.submit(prompt_of(10, "one"), 300)
            assert one.decode_id == "d2"
            await until(lambda: len(tokens_of(one)) > 20)
            await asyncio.sleep(1.2)
            lives = [d.submit(prompt_of(10, ("many", k)), 40) for k in range(31)]
            assert min(share([*first, one, *lives]).values()) >= 16, share(lives)
            await wait_all([*first, one, *lives])
            await d.quiet()

    run_virtual(main)


def test_a_router_that_dies_costs_the_other_nothing_and_its_clients_a_retry_with_the_same_tokens():
    """Their key fixes the seed, whichever router they ask; the workers give up at once what the dead one had."""

    async def main() -> None:
        async with cluster(2, limits_of(16)) as made:
            for name in ("p1", "d1", "d2"):
                made.start(name)
            await made.ready()
            dead, alive = made.routers

            def request(key: str) -> GenerationRequest:
                return GenerationRequest(
                    tuple(prompt_of(40, key)), Sampling(seed_of(key, b"tenant"), 200, 1.0), salt=b"tenant"
                )

            of_dead = {key: dead.dispatcher.submit_all([request(key)], key)[0] for key in ("a", "b", "c")}
            of_alive = [alive.dispatcher.submit(request(f"other {k}")) for k in range(4)]
            await until(lambda: all(len(tokens_of(live)) > 50 for live in (*of_dead.values(), *of_alive)))
            await made.kill_router(dead)
            await asyncio.sleep(0.5)
            assert sum(node.worker.load().num_sequences for node in made.nodes.values()) == 4
            for key, cut in of_dead.items():
                again = alive.dispatcher.submit_all([request(key)], key)[0]
                await wait_all([again])
                assert tokens_of(again) == wanted(request(key), 0).tokens
                assert tokens_of(cut) == tokens_of(again)[: len(tokens_of(cut))]
            await wait_all(of_alive)
            assert all(live.journal.attempt == 1 for live in of_alive)
            await made.quiet()

    run_virtual(main)


def test_a_time_limit_that_is_over_at_once_is_the_requests_own_error():
    """On an idle router, where no other deadline is known."""

    async def main():
        async with deployment("d1") as d:
            live = d.submit(prompt_of(20), 4, timeout_s=1e-16)
            assert isinstance(live.error, DeadlineExceeded)
            await d.quiet()

    run_virtual(main)


def test_who_waits_for_its_first_step_has_no_part_in_the_one_that_its_worker_dies_in():
    """Also where it computes its prompt itself: its worker says when it begins, and says so before the step."""

    async def main():
        async with deployment(limits=limits_of(local_tokens=10_000)) as d:
            worker = d.start("d1")
            await d.ready()
            worker.executor.hang.clear()
            first = d.submit(prompt_of(40, "first"), 5)
            await until(lambda: first.has_begun)
            second = d.submit(prompt_of(40, "second"), 5)
            await until(lambda: second.decode_id == "d1")
            await asyncio.sleep(0.5)
            await d.kill("d1")
            await until(lambda: not d.dispatcher.is_ready)
            assert first.suspicion.is_open
            assert not second.suspicion.is_open
            d.start("d2")
            await wait_all([first, second])
            assert (tokens_of(first), tokens_of(second)) == tuple(
                expected(prompt_of(40, name), 5) for name in ("first", "second")
            )

    run_virtual(main)


def test_who_was_preempted_has_no_part_in_the_step_that_its_worker_dies_in():
    async def main():
        async with deployment(limits=limits_of(local_tokens=10_000)) as d:
            d.start("d1", num_slots=30)
            await d.ready()
            lives = [d.submit(prompt_of(40, k), 300) for k in range(2)]
            await until(lambda: counters(d, "d1")["preemptions"])
            await until(lambda: not all(live.has_begun for live in lives))
            await d.kill("d1")
            await until(lambda: not d.dispatcher.is_ready)
            assert [live.suspicion.is_open for live in lives] == [True, False]
            d.start("d2")
            await wait_all(lives)
            assert [tokens_of(live) for live in lives] == [expected(prompt_of(40, k), 300) for k in range(2)]

    run_virtual(main)


def test_workers_that_fall_silent_together_were_cut_off_and_accuse_nobody_twice():
    """No request hangs two at once: only the first silence counts, and the innocent do not run apart after it."""

    async def main():
        async with deployment(limits=limits_of(local_tokens=10_000)) as d:
            nodes = [d.start("d1"), d.start("d2")]
            await d.ready()
            lives = [d.submit(prompt_of(40, k), 200) for k in range(6)]
            await until(lambda: all(tokens_of(live) for live in lives))
            for node in nodes:
                node.executor.hang.clear()
            await until(lambda: d.dispatcher.counters["worker_losses"] == 6)
            first = {live.suspicion.last for live in lives} - {""}
            assert len(first) == 1, "of two workers"
            for node in nodes:
                node.executor.hang.set()
            await wait_all(lives)
            assert [tokens_of(live) for live in lives] == [expected(prompt_of(40, k), 200) for k in range(6)]

    run_virtual(main)


def test_a_worker_whose_engine_is_lost_ends_and_what_it_had_goes_on_elsewhere():
    """A device that computes no more would fail each step at once, and look idle: nothing may be placed there."""

    async def main():
        async with deployment(limits=limits_of(local_tokens=10_000)) as d:
            broken = start_life(d, "d1")
            await d.ready()
            live = d.submit(prompt_of(40), 50)
            await until(lambda: len(tokens_of(live)) > 5)
            broken.executor.fail = EngineLost("cuda:0 does not compute any more")
            await asyncio.wait((broken.task,))
            ended = broken.task.exception()
            assert isinstance(ended, ExceptionGroup)
            assert ended.subgroup(EngineLost)
            d.network.kill("d1")  # as the end of its process does
            start_life(d, "d2")
            await wait_all([live])
            assert tokens_of(live) == expected(prompt_of(40), 50)

    run_virtual(main)
