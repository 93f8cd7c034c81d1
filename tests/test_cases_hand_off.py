"""Failures that other services' hand-off has, tried here in virtual time (T004 to T010, T012, T013, T037); each test names its case.

Faults are what networks, processes and models do: streams that end, workers that die, steps that raise.
"""

import asyncio
import itertools
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from kvferry.engine.engine import Engine, fake_engine
from kvferry.errors import EngineFailure, JoinRefused, NoWorker
from kvferry.messages import (
    Beat,
    ChoiceEnd,
    ChoiceEndReason,
    ChoiceStart,
    FetchAck,
    FetchEnd,
    FetchEndReason,
    FetchOpen,
    Frame,
    RequestCancel,
    RequestOpen,
    Sampling,
    Source,
    StepOutput,
)
from kvferry.streams import StreamEnded
from kvferry.worker.source import READER_TIMEOUT_S
from loadtest.virtual_time import run_virtual
from router.live import wait_all
from tests.hand_off import (
    FETCH_ALL,
    POISON,
    ROADS,
    SlowReader,
    answered,
    blocks_of,
    counters,
    evict_all,
    expected,
    num_failed_fetches,
    num_held,
    poisoned,
    prompt_of,
    roads,
    small,
    start_life,
    tokens_of,
)
from tests.in_process import BLOCK, deployment

# ------------------------------------------------------------------------------------------------------ who is paired


def engine_of(block_size: int = BLOCK, **identity: Any) -> Engine:
    engine = fake_engine(400, block_size)
    return replace(engine, identity=replace(engine.identity, **identity))


def refusal_of(error: BaseException | None) -> JoinRefused:
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, JoinRefused)
    return error


@pytest.mark.parametrize("order", [("p1", "d1"), ("d1", "p1")])
@pytest.mark.parametrize(
    ("field", "one", "other"),
    [
        ("block_size", 16, 32),
        ("block_size", 32, 16),
        ("block_size", 16, 24),
        ("block_size", 24, 16),
        ("fidelity", "float32", "bfloat16"),
        ("fidelity", "bfloat16", "float32"),
        ("model_id", "weights of float32", "weights of int8"),
    ],
)
def test_pools_that_differ_are_refused_by_field_whichever_joins_first_and_like_ones_are_paired(
    order, field, one, other
):
    """T004, T005."""

    async def main():
        async with deployment(limits=FETCH_ALL) as d:
            first, second = order
            start_life(d, first, engine=engine_of(**{field: one}))
            await d.ready(first)
            late = start_life(d, second, engine=engine_of(**{field: other}))
            await asyncio.wait((late.task,), timeout=5)
            refusal = refusal_of(late.task.exception())
            assert refusal.field == field
            assert repr(one) in refusal.message
            assert repr(other) in refusal.message
            assert [member.worker_id for member in d.members] == [first]
            if first == "d1":
                await answered(d, prompt_of(100))
            else:
                assert not d.dispatcher.is_ready
                with pytest.raises(NoWorker):
                    d.submit(prompt_of(100))
            d.network.kill(second)
            start_life(d, second, engine=engine_of(**{field: one}))
            await d.ready()
            live = await answered(d, prompt_of(200, "paired"))
            assert live.summary().num_fetched_blocks == 199 // (one if field == "block_size" else BLOCK)
            assert num_failed_fetches(d) == 0
            await d.quiet()

    run_virtual(main)


# ------------------------------------------------------------------------------------------- readers that come too late


@roads
@pytest.mark.parametrize("hold_only", [False, True])
def test_what_is_in_flight_waits_for_its_reader_and_nothing_else_does(road, hold_only):
    """T006, T007: six seconds late, while the rest of the chain has to make room; the source goes on serving others."""

    async def main():
        async with deployment("p1", "d1", limits=FETCH_ALL, roads=(small(road),), num_slots=60) as d:
            prompt = prompt_of(40 * BLOCK)
            await answered(d, [*prompt, 1])
            reader = SlowReader(d, small(road), prompt, hold_only)
            await reader.open()
            frames = await reader.frames_within(6)
            pool = d.nodes["p1"].worker.body.pool
            assert len(frames) == 2
            in_flight = pool.counts.num_live
            assert 2 <= in_flight <= 2 * 3
            for k in range(4):
                await answered(d, prompt_of(30 * BLOCK, k))
            assert pool.counts.num_live == in_flight
            assert pool.num_sealed_prefix(reader.block_ids) < 40
            blocks: list[bytes] = []
            while frames and isinstance(frames[0], Frame):
                frame = frames.pop(0)
                good, num_bad = await reader.copy(frame)
                assert num_bad == 0
                blocks += good
                await reader.stream.send(FetchAck(frame.frame_number))
                frames += await reader.frames_within(1)
            end = frames[0]
            assert isinstance(end, FetchEnd)
            assert end.reason is (FetchEndReason.MISSING if hold_only else FetchEndReason.COMPLETE)
            assert end.first_missing_block == len(blocks)
            assert blocks == blocks_of(prompt)[: len(blocks)]
            assert (in_flight <= len(blocks) < 40) if hold_only else (len(blocks) == 40)
            reader.stream.close()
            await d.quiet()

    run_virtual(main)


@roads
@pytest.mark.parametrize("num_blocks", [4, 40])
def test_a_reader_that_never_comes_is_given_up_and_nothing_waits_for_it_any_more(road, num_blocks):
    """T007: in the middle of a chain, or with all of it."""

    async def main():
        async with deployment("p1", "d1", limits=FETCH_ALL, roads=(small(road),)) as d:
            prompt = prompt_of(num_blocks * BLOCK)
            await answered(d, [*prompt, 1])
            reader = SlowReader(d, small(road), prompt)
            await reader.open()
            await asyncio.sleep(READER_TIMEOUT_S - 1)
            assert 2 <= num_held(d, "p1") <= 2 * 3
            await asyncio.sleep(2 + 3)
            assert num_held(d, "p1") == 0
            await d.quiet()
            reader.stream.close()

    run_virtual(main)


@roads
def test_what_is_copied_after_its_stream_has_ended_is_never_believed(road):
    """T006: the source has given up what it held for the reader, and others have its slots by now."""

    async def main():
        async with deployment("p1", "d1", limits=FETCH_ALL, roads=(small(road),), num_slots=60) as d:
            prompt = prompt_of(40 * BLOCK)
            await answered(d, [*prompt, 1])
            reader = SlowReader(d, small(road), prompt)
            await reader.open()
            frames = await reader.frames_within(1)
            reader.stream.close()
            await asyncio.sleep(0.1)
            assert num_held(d, "p1") == 0
            for k in range(6):
                await answered(d, prompt_of(50 * BLOCK, k))
            assert len(frames) == 2
            for frame in frames:
                assert isinstance(frame, Frame)
                good, num_bad = await reader.copy(frame)
                assert num_bad > 0
                assert good == []
            await d.quiet()

    run_virtual(main)


@roads
def test_slots_of_a_transfer_that_was_aborted_are_never_written_by_it_any_more(road):
    """T008: a hundred times, with pools so small that the next requests must have the same slots."""

    async def main():
        rng = random.Random(8)
        async with deployment("d1", limits=FETCH_ALL, roads=(small(road),), num_slots=50) as d:
            d.start("p1", roads=(small(road),), num_slots=50, max_step_tokens=64)  # so that transfers take their time
            await d.ready()
            for number in range(34):
                left = d.submit(prompt_of(40 * BLOCK, ("left", number)), 4)
                while not d.nodes["d1"].worker.load().slots.num_live:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(rng.random() * 0.5)
                assert not left.has_ended
                d.dispatcher.cancel(left)
                await asyncio.gather(*(answered(d, prompt_of(11 * BLOCK, (number, k))) for k in range(4)))
            await d.quiet()

    run_virtual(main)


# ------------------------------------------------------------------------------- transfers and prefills that do not start


class EndingStream:
    """Ends after its opening, or after its first frame, as a source does that has no memory left to send from."""

    def __init__(self, stream: Any, kind: type):
        self._stream, self._kind, self._has_ended = stream, kind, False

    async def send(self, message: Any) -> None:
        self._has_ended = self._has_ended or isinstance(message, self._kind)
        await self._stream.send(message)

    async def receive(self) -> Any:
        if self._has_ended:
            self._stream.close()
            raise StreamEnded("no space left on device", "UNKNOWN")
        message = await self._stream.receive()
        self._has_ended = self._has_ended or isinstance(message, self._kind)
        return message

    def close(self) -> None:
        self._stream.close()


@pytest.mark.parametrize("num_sources", [1, 2])
@pytest.mark.parametrize("kind", [FetchOpen, Frame])
def test_of_transfers_that_cannot_start_the_reader_learns_at_once(kind, num_sources):
    """T009: one in five."""

    async def main():
        names = ["p1", "p2"][:num_sources]
        async with deployment(*names, "d1", limits=FETCH_ALL, roads=(small(ROADS[0]),)) as d:
            await answered(d, prompt_of(200, "met"))
            undisturbed = await answered(d, prompt_of(200, "undisturbed"))
            fetch, numbers = d.network.fetch, itertools.count(1)

            def one_in_five_ends(address: str) -> Any:
                stream = fetch(address)
                return stream if next(numbers) % 5 else EndingStream(stream, kind)

            d.network.fetch = one_in_five_ends  # type: ignore[method-assign]
            for number in range(25):
                live = await answered(d, prompt_of(200, number))
                assert live.instants_s["closed"] < undisturbed.instants_s["closed"] + 1
            assert num_failed_fetches(d) >= 5
            assert counters(d, "d1")["fetches_finished"] >= 22
            await d.quiet()

    run_virtual(main)


@pytest.mark.parametrize("fate", ["forgotten", "killed", "frozen"])
def test_a_preempted_request_needs_nothing_of_its_source_any_more(fate):
    """T010."""

    async def main():
        async with deployment("p1", limits=FETCH_ALL) as d:
            d.start("d1", num_slots=30)
            await d.ready()
            prompts = [prompt_of(40, k) for k in range(4)]
            lives = [d.submit(prompt, 300) for prompt in prompts]
            while not all(tokens_of(live) for live in lives):
                await asyncio.sleep(0.01)
            assert counters(d, "d1")["preemptions"] == 0
            if fate == "forgotten":
                evict_all(d, "p1")
            elif fate == "killed":
                await d.kill("p1")
            else:
                d.network.freeze("p1")
            await wait_all(lives)
            assert [tokens_of(live) for live in lives] == [expected(prompt, 300) for prompt in prompts]
            assert counters(d, "d1")["preemptions"] > 0
            assert counters(d, "d1")["recomputed_tokens"] > 0
            assert all(live.journal.attempt == 1 for live in lives)
            d.network.thaw("p1")
            await asyncio.sleep(5)
            await d.quiet()

    run_virtual(main)


def test_prompts_whose_chunks_interleave_move_their_whole_blocks_and_no_other():
    """T012."""

    async def main():
        async with deployment("p1", "d1", limits=FETCH_ALL, max_step_tokens=64) as d:
            lengths = (63, 64, 65, 127, 128, 129, 1000, 17)
            lives = await asyncio.gather(*(answered(d, prompt_of(length, length), 12) for length in lengths))
            for length, live in zip(lengths, lives, strict=True):
                assert live.summary().num_fetched_blocks == (length - 1) // BLOCK
            await d.quiet()

    run_virtual(main)


async def end_of(stream: Any, number: int) -> ChoiceEnd:
    while True:
        message = await stream.receive()
        if isinstance(message, StepOutput):
            for end in message.ends:
                if end.number == number:
                    return end


def test_what_a_decode_worker_refuses_is_told_at_once_and_its_source_never_hears_of_it():
    """T013."""

    async def main():
        async with deployment("p1", "d1", num_slots=40) as d:
            router = d.network.attach("d1")
            await router.send(Beat())
            choices, sources = (ChoiceStart(0),), (Source("p1", "p1"),)
            good = RequestOpen(0, 1, tuple(prompt_of(300)), choices, Sampling(1, 4, 0.0), sources=sources)
            bad = (
                (replace(good, prompt_tokens=tuple(prompt_of(700))), ChoiceEndReason.TOO_LARGE, "640"),
                (replace(good, sampling=Sampling(1, 400, 0.0)), ChoiceEndReason.TOO_LARGE, "640"),
                (replace(good, prompt_tokens=(1000, *good.prompt_tokens)), ChoiceEndReason.INVALID, "vocabulary"),
                (replace(good, prompt_tokens=(1,) * 9000), ChoiceEndReason.INVALID, "8192"),
                (replace(good, prompt_tokens=()), ChoiceEndReason.INVALID, "empty"),
                (replace(good, sampling=Sampling(1, 4, -1.0)), ChoiceEndReason.INVALID, "temperature"),
            )
            for number, (opening, reason, named) in enumerate(bad):
                began = asyncio.get_running_loop().time()
                await router.send(replace(opening, number=number))
                end = await end_of(router, number)
                assert end.reason is reason
                assert named in end.detail
                assert asyncio.get_running_loop().time() - began < 0.1
            assert counters(d, "p1")["served_fetches"] == counters(d, "p1")["warmed_chains"] == 0
            await router.send(replace(good, number=99))
            assert (await end_of(router, 99)).reason is ChoiceEndReason.LENGTH
            assert counters(d, "p1")["served_fetches"] == 1
            router.close()
            await d.quiet()

    run_virtual(main)


@pytest.mark.parametrize("way_out", ["cancelled", "late", "left"])
def test_a_request_that_ends_before_it_is_admitted_stops_its_source_within_a_second(way_out):
    """T013: its prompt is being computed meanwhile."""

    async def main():
        async with deployment(limits=FETCH_ALL) as d:
            d.start("p1", max_step_tokens=32, step=dict(base_s=0.1))
            d.start("d1", num_slots=70)
            await d.ready()
            running = d.submit(prompt_of(400), 700)
            while len(tokens_of(running)) < 200:
                await asyncio.sleep(0.05)
            router = d.network.attach("d1")
            await router.send(Beat())
            choices, sources = (ChoiceStart(0),), (Source("p1", "p1"),)
            opening = RequestOpen(
                5, 1, tuple(prompt_of(900, "waits")), choices, Sampling(1, 4, 0.0), sources=sources
            )  # fmt: skip
            await router.send(replace(opening, time_left_s=0.5 if way_out == "late" else None))
            await asyncio.sleep(0.4)
            assert counters(d, "p1")["warmed_chains"] == 1
            assert num_held(d, "p1") > 0
            if way_out == "cancelled":
                await router.send(RequestCancel(5, 1))
            if way_out != "left":
                wanted = ChoiceEndReason.DEADLINE if way_out == "late" else ChoiceEndReason.CANCELLED
                assert (await end_of(router, 5)).reason is wanted
            router.close()
            await asyncio.sleep(1)
            computed = counters(d, "p1")["computed_tokens"]
            assert num_held(d, "p1") == 0
            await asyncio.sleep(1)
            assert counters(d, "p1")["computed_tokens"] == computed < 384 + 896
            await wait_all([running])
            assert tokens_of(running) == expected(prompt_of(400), 700)
            await d.quiet()

    run_virtual(main)


def test_a_placement_that_comes_to_nothing_names_what_its_last_source_said():
    """T037: where decode may not compute so much without being told to, the router hears why; so would a client, in the end."""

    async def main():
        async with deployment(limits=FETCH_ALL) as d:
            start_life(d, "p1", engine=poisoned())
            start_life(d, "d1", max_local_tokens=BLOCK)
            await d.ready()
            prompt = [*prompt_of(6 * BLOCK, 1), *POISON, *prompt_of(900, 2)]
            live = d.submit(prompt, 4)
            whys: list[str] = []
            placed_again = d.dispatcher._queue_again
            d.dispatcher._queue_again = lambda live, why, **more: (whys.append(why), placed_again(live, why, **more))
            await wait_all([live])
            assert tokens_of(live) == expected(prompt, 4)
            assert re.fullmatch(
                r"no source delivered the 63 missing blocks; the last one, p1: .*thirteen is too much.*", whys[0]
            )

    run_virtual(main)


@pytest.mark.parametrize("is_decode_poisoned", [False, True])
def test_a_prefill_that_fails_is_known_to_decode_and_client_within_a_second(is_decode_poisoned, caplog):
    """T037: for chosen prompts; where decode cannot run them either, the client hears the real cause."""

    async def main():
        async with deployment(limits=FETCH_ALL) as d:
            d.start("p1", engine=poisoned())
            d.start("d1", **(dict(engine=poisoned()) if is_decode_poisoned else {}))
            await d.ready()
            undisturbed = await answered(d, prompt_of(300, "undisturbed"))
            others = [d.submit(prompt_of(200, k), 300) for k in range(6)]
            while not all(tokens_of(live) for live in others):
                await asyncio.sleep(0.1)
            for number in range(5):
                prompt = [*prompt_of(6 * BLOCK, ("bad", number)), *POISON, *prompt_of(200, number)]
                live = d.submit(prompt, 4)
                began = asyncio.get_running_loop().time()
                while counters(d, "d1")["fetch_failed_source_error"] == number:
                    await asyncio.sleep(0.01)
                assert asyncio.get_running_loop().time() - began < undisturbed.instants_s["closed"] + 0.5
                if is_decode_poisoned:
                    with pytest.raises(EngineFailure, match="thirteen is too much"):
                        await wait_all([live])
                    assert live.instants_s["closed"] < undisturbed.instants_s["closed"] + 1
                else:
                    await wait_all([live])
                    assert tokens_of(live) == expected(prompt, 4)
                assert re.search(r"fetch from p1, \d+ of \d+ blocks here: .*thirteen is too much", caplog.text)
                caplog.clear()
            await wait_all(others)
            assert [tokens_of(live) for live in others] == [expected(prompt_of(200, k), 300) for k in range(6)]
            await d.quiet()

    run_virtual(main)
