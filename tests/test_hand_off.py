"""What is particular to the hand-off, in virtual time: who can be a source, roads, computing ahead."""

import asyncio
import random

import pytest

from kvferry.kv.road import known_roads, roads_called
from kvferry.messages import Beat, ChoiceStart, FetchOpen, RequestOpen, Sampling, Source, StepOutput
from loadtest.virtual_time import run_virtual
from router.live import wait_all
from tests.hand_off import evict_all
from tests.in_process import BLOCK, deployment, limits_of
from tests.test_in_process import expected

LOCAL = ("inproc", "shm", "grpc")
"""Roads within one process; the object store needs actors."""


def prompt_of(length, seed=1):
    return [random.Random(f"{seed} {k}").randrange(1000) for k in range(length)]


def counter(d, worker, name):
    return d.nodes[worker].worker.body.counters.values[name]


@pytest.mark.parametrize("road", LOCAL)
def test_every_road_brings_the_same_blocks(road):
    async def main():
        limits = limits_of(local_tokens=0)
        async with deployment("p1", "d1", limits=limits, roads=roads_called(road), max_step_tokens=64) as d:
            for length in (1, BLOCK, BLOCK + 1, 5 * BLOCK, 777):
                prompt = prompt_of(length, (road, length))
                live = d.submit(prompt, 20)
                await wait_all([live])
                assert live.journal.choices[0].tokens == expected(prompt, 20)
                assert live.summary().num_fetched_blocks == (length - 1) // BLOCK
                assert live.summary().road == (road if length > BLOCK else "")
            moved = counter(d, "d1", f"fetched_bytes_over_{road}")
            assert moved == counter(d, "p1", "served_bytes") == counter(d, "d1", "fetched_bytes")
            await d.quiet()

    run_virtual(main)


def test_the_best_road_that_both_ends_have_is_taken():
    async def main():
        for theirs, mine, taken in (
            ("grpc", None, "grpc"),
            (None, "shm", "shm"),
            (None, None, next(iter(known_roads()))),
        ):
            async with deployment(limits=limits_of(local_tokens=0)) as d:
                d.start("p1", **({"roads": roads_called(theirs)} if theirs else {}))
                d.start("d1", **({"roads": roads_called(mine)} if mine else {}))
                await d.ready("p1", "d1")
                prompt = prompt_of(200)
                live = d.submit(prompt, 4)
                await wait_all([live])
                assert live.journal.choices[0].tokens == expected(prompt, 4)
                assert live.summary().road == taken

    run_virtual(main)


def test_workers_without_a_road_in_common_say_so_and_compute_locally():
    async def main():
        async with deployment(limits=limits_of(local_tokens=0)) as d:
            d.start("p1", roads=roads_called("grpc"))
            d.start("d1", roads=roads_called("shm"))
            await d.ready("p1", "d1")
            assert await d.answer(prompt_of(200), 4) == expected(prompt_of(200), 4)
            assert counter(d, "d1", "fetch_failed_road") == 1
            await d.quiet()

    run_virtual(main)


def test_a_hot_prefix_goes_from_decode_worker_to_decode_worker_and_is_computed_once():
    async def main():
        async with deployment("p1", "d1", limits=limits_of(local_tokens=0)) as d:
            prompt = prompt_of(20 * BLOCK + 3)
            assert await d.answer(prompt, 4) == expected(prompt, 4)
            busy = d.submit(prompt_of(BLOCK, "busy"), 400)
            d.start("d2")
            await d.ready("d2")
            computed = counter(d, "p1", "computed_tokens")
            live = d.submit(prompt, 4)
            await wait_all([live])
            assert live.journal.choices[0].tokens == expected(prompt, 4)
            assert (live.decode_id, live.summary().source_worker_id) == ("d2", "d1")
            assert live.summary().num_fetched_blocks == 20
            assert counter(d, "p1", "computed_tokens") == computed
            await wait_all([busy])
            await d.quiet()

    run_virtual(main)


def test_what_decode_generated_is_not_computed_again_in_the_next_turn():
    async def main():
        limits = limits_of(local_tokens=0)
        async with deployment("p1", "p2", "d1", limits=limits) as d:
            first = prompt_of(10 * BLOCK)
            answer = await d.answer(first, 6 * BLOCK)
            await asyncio.sleep(1)
            before = {name: counter(d, name, "computed_tokens") for name in ("p1", "p2", "d1")}
            second = [*first, *answer, *prompt_of(5 * BLOCK + 1, "new")]
            assert await d.answer(second, 4) == expected(second, 4)
            after = {name: counter(d, name, "computed_tokens") - before[name] for name in before}
            whole_blocks = 15 * BLOCK  # the last generated token never had KV: its block is not whole
            assert after["p1"] + after["p2"] == len(second) - 1 - whole_blocks
            assert after["d1"] == 1 + 3
            for name in d.nodes:
                failed = {k: v for k, v in d.nodes[name].worker.body.counters.values.items() if "failed" in k and v}
                assert not failed, "a holder that has given what it holds has not failed"
            await d.quiet()

    run_virtual(main)


@pytest.mark.parametrize("max_warm", [4, 0])
def test_a_request_without_room_has_its_prompt_computed_meanwhile(max_warm):
    async def main():
        async with deployment(limits=limits_of(local_tokens=0)) as d:
            d.start("p1", num_slots=200)
            d.start("d1", num_slots=40, max_warm=max_warm)
            await d.ready("p1", "d1")
            long = d.submit(prompt_of(5 * BLOCK), 34 * BLOCK)
            while long.journal.num_tokens < 25 * BLOCK:
                await asyncio.sleep(0.05)
            waiting = prompt_of(20 * BLOCK + 1, "waiting")
            later = d.submit(waiting, 4)
            await asyncio.sleep(1)
            assert d.nodes["d1"].worker.load().num_waiting == 1
            assert counter(d, "p1", "warmed_chains") == (1 if max_warm else 0)
            assert counter(d, "p1", "computed_tokens") == 4 * BLOCK + (20 * BLOCK if max_warm else 0)
            await wait_all([long, later])
            assert later.journal.choices[0].tokens == expected(waiting, 4)
            assert counter(d, "p1", "computed_tokens") == 24 * BLOCK
            await d.quiet()

    run_virtual(main)


def test_what_is_left_of_a_requests_time_goes_with_it_to_whoever_is_asked():
    """From the router to decode, from there to prefill, and on to the holder that prefill reads from: as a duration."""
    opened: list[FetchOpen] = []

    class Line:
        """A fetch stream that notes its opening."""

        def __init__(self, stream):
            self._stream, self.receive, self.close = stream, stream.receive, stream.close

        async def send(self, message):
            if isinstance(message, FetchOpen):
                opened.append(message)
            await self._stream.send(message)

    async def main():
        async with deployment("p1", "p2", "d1", limits=limits_of(local_tokens=0)) as d:
            dial = d.network.fetch
            d.network.fetch = lambda address: Line(dial(address))
            stream = d.network.attach("d1")
            await stream.send(Beat())
            places = {"sources": (Source("p1", "p1"),), "holders": (Source("p2", "p2"),)}
            prompt = tuple(prompt_of(20 * BLOCK + 3))
            await stream.send(
                RequestOpen(1, 1, prompt, (ChoiceStart(0),), Sampling(0, 2, 0.0), time_left_s=9.0, **places)
            )
            while not (isinstance(message := await stream.receive(), StepOutput) and message.ends):
                await stream.send(Beat())
            stream.close()
        by_decode, by_prefill = opened
        assert by_prefill.hold_only
        assert 9.0 >= by_decode.time_left_s >= by_prefill.time_left_s > 8.0

    run_virtual(main)


@pytest.mark.parametrize("policy", ["round-robin", "least-loaded"])
def test_what_a_source_read_from_a_holder_counts_as_cached(policy):
    """T020: nobody computed it for this request. What comes behind it is computed, and is not."""

    async def main():
        async with deployment("p1", "p2", "d1", limits=limits_of(0, policy=policy)) as d:
            prompt = prompt_of(12 * BLOCK + 3)
            first = d.submit(prompt, 2)
            await wait_all([first])
            assert first.summary().num_cached_tokens == 0
            for more, num_tail in ((12, 3), (20, 5)):
                evict_all(d, "d1")
                longer = [*prompt, *prompt_of(20 * BLOCK, "more")][: more * BLOCK + num_tail]
                before = counter(d, "p1", "computed_tokens") + counter(d, "p2", "computed_tokens")
                live = d.submit(longer, 2)
                await wait_all([live])
                assert live.journal.choices[0].tokens == expected(longer, 2)
                computed = counter(d, "p1", "computed_tokens") + counter(d, "p2", "computed_tokens") - before
                assert live.summary().num_fetched_blocks == more
                assert live.summary().num_cached_tokens == more * BLOCK - computed
                assert computed == (more - 12) * BLOCK

    run_virtual(main)
