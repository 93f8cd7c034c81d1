"""The hand-off under load, in virtual time: waiting, bursts, more than it can do, and many who want the same (T007, T014, T015)."""

import asyncio

import pytest

from kvferry.errors import Overloaded
from loadtest.virtual_time import run_virtual
from router.live import Live, wait_all
from tests.hand_off import FETCH_ALL, answered, counters, expected, num_failed_fetches, num_held, prompt_of, tokens_of
from tests.in_process import BLOCK, deployment, limits_of


@pytest.mark.parametrize("settings", [dict(max_sequences=2), dict(num_slots=60)])
def test_however_long_requests_wait_for_decode_they_lose_nothing_and_a_decode_worker_that_dies_frees_its_source(
    settings,
):
    """T007: thirty at once where two can run, for far longer than any lease."""

    async def main():
        limits = limits_of(local_tokens=0, queue_timeout_s=600)
        async with deployment("p1", limits=limits) as d:
            d.start("d1", **settings)
            await d.ready()
            began = asyncio.get_running_loop().time()
            await asyncio.gather(*(answered(d, prompt_of(200, k), 200) for k in range(30)))
            assert asyncio.get_running_loop().time() - began > 30
            assert num_failed_fetches(d) == 0
            num_again = counters(d, "d1")["recomputed_tokens"]  # of those that were preempted
            assert counters(d, "p1")["computed_tokens"] <= 30 * 192 + num_again
            lives = [d.submit(prompt_of(900, ("lost", k)), 20) for k in range(4)]
            await asyncio.sleep(0.3)
            assert num_held(d, "p1") > 0
            await d.kill("d1")
            await asyncio.sleep(1.0)
            assert num_held(d, "p1") == 0
            for live in lives:
                d.dispatcher.cancel(live)
            await d.quiet()

    run_virtual(main)


@pytest.mark.parametrize(("num_requests", "source_slots"), [(200, 1000), (60, 100)])
def test_in_a_burst_no_transfer_fails_and_no_block_is_computed_twice_whether_sources_have_room_for_all_or_not(
    num_requests, source_slots
):
    """T014, the burst, within the limits that a deployment has by default."""

    async def main():
        step = dict(base_s=0.01, s_per_token=0.0001)
        async with deployment("d1", "d2", limits=FETCH_ALL, num_slots=1000, step=step) as d:
            for name in ("p1", "p2"):
                d.start(name, num_slots=source_slots, step=step)
            await d.ready()
            lives = [d.submit(prompt_of(512, k), 64) for k in range(num_requests)]
            await wait_all(lives)
            assert [tokens_of(live) for live in lives] == [expected(prompt_of(512, k), 64) for k in range(num_requests)]
            assert num_failed_fetches(d) == 0
            assert sum(live.summary().num_fetched_blocks for live in lives) == num_requests * (511 // BLOCK)
            computed = sum(counters(d, name)["computed_tokens"] for name in ("p1", "p2"))
            assert computed <= num_requests * 496 * 1.1  # a warmed one may have been evicted since
            await d.quiet()

    run_virtual(main)


def test_at_half_as_much_again_as_it_can_do_nothing_fails_and_throughput_stays():
    """T014, the steady rate: what is too much is told to come back, and the service is as new a minute later."""

    async def main():
        step = dict(base_s=0.2, s_per_token=0.001)
        limits = limits_of(local_tokens=0, max_queued=20)
        async with deployment("p1", "d1", limits=limits, step=step, max_sequences=8, step_target_s=2.0) as d:
            now = asyncio.get_running_loop().time
            began = now()
            await asyncio.gather(*(answered(d, prompt_of(256, ("plateau", k)), 16) for k in range(28)))
            plateau = 28 / (now() - began)
            lives: list[Live] = []
            num_refused, began = 0, now()
            while now() - began < 120:
                try:
                    lives.append(d.submit(prompt_of(256, len(lives)), 16))
                except Overloaded:
                    num_refused += 1
                await asyncio.sleep(1 / (1.5 * plateau))
            num_done = sum(live.has_ended for live in lives)
            assert num_refused > 0
            assert num_done / 120 > 0.9 * plateau
            await wait_all(lives)
            assert now() - began < 120 + 30
            assert [tokens_of(live) for live in lives] == [expected(prompt_of(256, k), 16) for k in range(len(lives))]
            assert num_failed_fetches(d) == 0
            await d.quiet()
            alone = await answered(d, prompt_of(256, "alone"), 16)
            assert alone.instants_s["placed"] < 0.01

    run_virtual(main)


@pytest.mark.parametrize("salt", [b"", b"tenant"])
def test_equal_prompts_and_choices_share_one_transfer_and_each_is_answered_for_itself(salt):
    """T015."""

    async def main():
        async with deployment("p1", "d1", limits=FETCH_ALL) as d:
            prompt = prompt_of(150)
            lives = await asyncio.gather(*(answered(d, prompt, 8, n=1 + k % 4, salt=salt) for k in range(8)))
            assert [len(live.journal.choices) for live in lives] == [1, 2, 3, 4, 1, 2, 3, 4]
            assert counters(d, "d1")["fetched_blocks"] == 9
            assert counters(d, "d1")["fetches_started"] == 1
            assert counters(d, "p1")["computed_tokens"] == 144
            await d.quiet()

    run_virtual(main)
