"""A worker that dies and comes back at the same address, over each road, in virtual time (T038)."""

import asyncio
import gc
from dataclasses import replace

from kvferry.messages import FetchEnd, FetchEndReason, FetchOpen
from loadtest.virtual_time import run_virtual
from router.live import wait_all
from tests.hand_off import (
    FETCH_ALL,
    SlowReader,
    answered,
    counters,
    evict_all,
    expected,
    num_failed_fetches,
    prompt_of,
    roads,
    start_life,
    tokens_of,
)
from tests.in_process import BLOCK, Deployment, deployment


async def die(d: Deployment, *names: str) -> None:
    """And their memory with them, as a process's has."""
    for name in names:
        await d.kill(name)
    gc.collect()


@roads
def test_a_source_that_restarts_at_its_address_serves_the_first_request_over_its_road(road):
    """Ten lives, idle and under load; nobody else is touched."""

    async def main():
        async with deployment("d1", limits=FETCH_ALL, roads=(road,)) as d:
            for number in range(1, 11):
                start_life(d, "p1", number, roads=(road,))
                await d.ready("p1")
                prompt = prompt_of(200, number)
                failed = num_failed_fetches(d)
                live = await answered(d, prompt)
                assert (live.summary().source_worker_id, live.summary().road) == ("p1", road.name)
                assert live.summary().num_fetched_blocks == 12
                assert live.journal.attempt == 1
                assert num_failed_fetches(d) == failed
                under_way = d.submit(prompt_of(900, ("load", number)), 4) if number % 2 else None
                await asyncio.sleep(0.2)
                await die(d, "p1")
                if under_way is not None:
                    await wait_all([under_way])
                    assert tokens_of(under_way) == expected(prompt_of(900, ("load", number)), 4)
                    assert num_failed_fetches(d) == failed + 1
                evict_all(d, "d1")
            await d.quiet()

    run_virtual(main)


@roads
def test_a_holder_that_restarts_at_its_address_is_read_from_again(road):
    """On the other side: what prefill knew of a decode worker's memory is not used for the next life's."""

    async def main():
        async with deployment("p1", limits=FETCH_ALL, roads=(road,)) as d:
            for number in range(1, 6):
                start_life(d, "d1", number, roads=(road,), max_sequences=1)
                await d.ready("d1")
                prompt = prompt_of(200, number)
                await answered(d, prompt)
                evict_all(d, "p1")
                busy = d.submit(prompt_of(20, ("busy", number)), 2000)
                start_life(d, "d2", number, roads=(road,))
                await d.ready("d2")
                await asyncio.sleep(0.3)
                computed = counters(d, "p1")["computed_tokens"]
                live = await answered(d, [*prompt[:160], *prompt_of(100, ("turn", number))])
                assert live.decode_id == "d2"
                assert counters(d, "p1")["fetched_blocks"] == 10 * number
                assert counters(d, "p1")["computed_tokens"] == computed + 256 - 160
                d.dispatcher.cancel(busy)
                await die(d, "d1", "d2")
                evict_all(d, "p1")
            assert num_failed_fetches(d) == 0
            await d.quiet()

    run_virtual(main)


@roads
def test_what_one_life_of_a_worker_said_is_not_accepted_by_the_next(road):
    """Neither its name nor what it offered."""

    async def main():
        async with deployment("d1", limits=FETCH_ALL, roads=(road,)) as d:
            start_life(d, "p1", 1, roads=(road,))
            await d.ready()
            prompt = prompt_of(10 * BLOCK)
            await answered(d, [*prompt, 1])
            reader = SlowReader(d, road, prompt)
            await reader.open()
            assert len(await reader.frames_within(1)) >= 1, "the life that it has met does serve it"
            reader.stream.close()
            await die(d, "p1")
            start_life(d, "p1", 2, roads=(road,))
            await d.ready()
            await answered(d, [*prompt, 2], salt=b"another")
            for incarnation, name in (("p1-1", road.name), ("", road.name), ("p1-2", "bridge"), ("p1-2", "")):
                stream = d.network.fetch("p1")
                opening = FetchOpen("fake-1000", "uint8", tuple(prompt), road=name, ticket=b"t" * 16)
                await stream.send(replace(opening, incarnation=incarnation))
                end = await stream.receive()
                assert isinstance(end, FetchEnd)
                assert end.reason is FetchEndReason.STRANGER
                stream.close()
            assert counters(d, "p1")["served_fetches"] == 1
            await d.quiet()

    run_virtual(main)
