"""A simulated fleet answers exactly, gives the same figures twice, and pays for prompts and blocks in virtual time."""

import asyncio

import pytest

from deploy.fleet import FleetPlan, fleet
from deploy.pd_sim import SimPlan, simulate
from kvferry.engine.fake import fake_answer
from kvferry.errors import ConfigurationError
from kvferry.messages import Sampling
from loadtest.arrivals import Arrival, Fit, poisson_arrivals, prompt_of
from loadtest.goodput import GoodputReport, Slo
from loadtest.lengths import mix_lengths
from loadtest.trial import Trial
from loadtest.virtual_time import run_virtual
from router.live import wait_all

PROMPT = list(range(100, 400))


def plan(num_prefill, num_decode):
    return FleetPlan(num_prefill, num_decode, kv_tokens=20_000)


@pytest.mark.parametrize("pools", [(2, 2), (0, 3)])
def test_the_fleet_answers_exactly(pools):
    async def main():
        async with fleet(plan(*pools)) as made:
            prompts = [prompt_of(Arrival(k, 0.0, 20 + 61 * k, 1), "exact") for k in range(6)]
            lives = [made.submit(prompt, 12) for prompt in prompts]
            await wait_all(lives)
            for prompt, live in zip(prompts, lives, strict=True):
                expected = fake_answer(prompt, Sampling(0, 12, 0.0), made.vocabulary_size)
                assert live.journal.choices[0].tokens == expected

    run_virtual(main)


@pytest.mark.parametrize("pools", [(2, 2), (0, 4)])
def test_the_same_arrivals_give_the_same_figures_twice(pools):
    arrivals = poisson_arrivals(40, 1, mix_lengths, Fit(0.2), 5)
    figures = [GoodputReport(simulate(plan(*pools), arrivals, "run"), 1.0, Slo(0.5, 0.025)).figures() for _ in range(2)]
    assert figures[0] == figures[1]
    found = {figure["figure"]: figure["value"] for figure in figures[0]}
    assert (found["sent"], found["succeeded"], found["failed"]) == (40, 40, 0)


def test_every_token_has_its_instant_and_a_long_prompt_its_time():
    async def main():
        async with fleet(plan(1, 1)) as made:
            return await made.ask(PROMPT, 10), await made.ask(PROMPT[::-1] * 20, 10), made

    short, long, made = run_virtual(main)
    assert (short.failure, short.num_tokens, len(short.event_s)) == ("", 10, 10)
    assert short.numbers["source_worker"] == "prefill-1"
    assert all(0.003 < gap < 0.01 for gap in short.gaps_s)  # 14 GB of weights at 3.6 TB/s, and half a millisecond
    assert long.ttft_s > 0.1 > short.ttft_s  # 6,000 tokens of 13 GFLOP at 0.6 PFLOP/s
    assert made.step_ends_s["prefill-1"] == sorted(made.step_ends_s["prefill-1"])


def test_one_pool_fetches_nothing_and_knows_no_transfer():
    (sent,) = simulate(plan(0, 1), (Arrival(0, 0.0, 500, 3),), "run")
    assert sent.record.numbers["source_worker"] is None
    assert sent.transfer_s is None
    (sent,) = simulate(plan(1, 1), (Arrival(0, 0.0, 500, 3),), "run")
    assert 0 <= sent.transfer_s < sent.record.ttft_s


def test_what_the_fleet_cannot_take_is_a_failure_of_its_kind():
    async def main():
        async with fleet(plan(0, 1)) as made:
            return await made.ask([1] * 30_000, 4)

    assert run_virtual(main).failure == "http_400"


def test_a_fleet_that_is_left_with_an_error_ends_and_hides_nothing():
    async def main():
        with pytest.raises(ExceptionGroup, match="TaskGroup") as raised:
            async with fleet(plan(1, 1)) as made:
                made.submit(PROMPT, 500)
                await asyncio.sleep(0.1)
                raise KeyError("mine")
        assert raised.group_contains(KeyError, match="mine")

    run_virtual(main)


def test_a_simulation_that_cannot_be_is_refused_beforehand():
    trial = Trial((1.0,), 1, Slo(1, 1), Fit())
    for wrong in (SimPlan(trial, num_workers=3), SimPlan(trial, shape="no-such"), SimPlan(trial, accelerator="abacus")):
        with pytest.raises(ConfigurationError):
            wrong.check()
    SimPlan(trial).check()
