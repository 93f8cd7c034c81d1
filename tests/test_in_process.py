"""Router, prefill and decode in one virtual-time loop, with a model whose next token derives from the KV it holds.

Faults are what a network and processes do (a killed or frozen worker), never a patch of the product.
"""

import asyncio
import random
from dataclasses import replace

import pytest

from kvferry.engine.engine import fake_engine
from kvferry.engine.fake import fake_answer
from kvferry.engine.plan import NON_FINITE, StepResult
from kvferry.errors import DeadlineExceeded, EngineFailure, InvalidRequest, NoWorker, Overloaded
from kvferry.messages import Sampling
from loadtest.virtual_time import run_virtual
from router.live import LiveState, deltas_of, wait_all
from tests.in_process import BLOCK, Deployment, deployment, limits_of

LENGTHS = sorted({1, BLOCK - 1, BLOCK + 1, *(k * BLOCK for k in range(1, 21)), 2 * BLOCK - 1, 2 * BLOCK + 1, 1000})


def prompt_of(length: int, seed: object = 1) -> list[int]:
    return [random.Random(f"{seed} {k}").randrange(1000) for k in range(length)]


def expected(prompt: list[int], max_tokens: int, seed: int = 0, choice: int = 0) -> list[int]:
    return fake_answer(prompt, Sampling(seed, max_tokens, 1.0 if seed else 0.0), choice=choice)


# ------------------------------------------------------------------------------------------------------------- exactness


def test_every_length_around_a_blocks_edge_is_exact_and_moves_the_whole_blocks_before_the_tail():
    async def main():
        async with deployment("p1", "d1", limits=limits_of(local_tokens=0)) as d:
            for length in LENGTHS:
                for max_tokens in (1, 2, BLOCK + 1):
                    prompt = prompt_of(length, (length, max_tokens))
                    live = d.submit(prompt, max_tokens)
                    await wait_all([live])
                    assert live.journal.choices[0].tokens == expected(prompt, max_tokens), length
                    assert live.summary().num_fetched_blocks == (length - 1) // BLOCK
            await d.quiet()

    run_virtual(main)


def test_chunks_of_many_prompts_interleave_exactly():
    async def main():
        async with deployment("p1", "d1", max_step_tokens=64) as d:
            prompts = [prompt_of(n, n) for n in (63, 64, 65, 127, 128, 129, 700, 900)]
            answers = await asyncio.gather(*(d.answer(prompt, 12) for prompt in prompts))
            assert answers == [expected(prompt, 12) for prompt in prompts]
            assert len({len(plan.chunks) for plan in d.nodes["p1"].executor.plans}) > 1
            await d.quiet()

    run_virtual(main)


def test_hits_are_exact_and_counted_and_only_the_missing_blocks_move():
    async def main():
        async with deployment("p1", "d1") as d:
            prompt = prompt_of(200)
            for attempt, cached in enumerate((0, 192, 192)):
                live = d.submit(prompt, 8)
                await wait_all([live])
                assert live.journal.choices[0].tokens == expected(prompt, 8)
                assert live.summary().num_cached_tokens == cached, attempt
            shared = [*prompt[:100], *prompt_of(100, 2)]
            live = d.submit(shared, 8)
            await wait_all([live])
            assert live.journal.choices[0].tokens == expected(shared, 8)
            assert live.summary().num_cached_tokens == 96
            assert live.summary().num_fetched_blocks == 12 - 6
            await d.quiet()

    run_virtual(main)


def test_a_prompt_of_whole_blocks_that_is_cached_keeps_its_last_block_as_the_tail():
    async def main():
        async with deployment("p1", "d1") as d:
            for length in (64, 65, 63, 64):
                prompt = prompt_of(length)
                assert await d.answer(prompt, 3) == expected(prompt, 3)
            live = d.submit(prompt_of(64), 1)
            await wait_all([live])
            assert live.summary().num_cached_tokens == 48
            await d.quiet()

    run_virtual(main)


def test_a_second_turn_reuses_what_decode_generated_even_on_another_worker():
    """The decode worker that generated is busy: the prefill worker reads from it and computes only what is new."""

    async def main():
        async with deployment("p1", "d1") as d:
            first = prompt_of(100)
            answer = await d.answer(first, 60)
            await asyncio.sleep(0.5)
            d.start("d2")
            await d.ready("d2")
            blocker = d.submit(prompt_of(30, "x"), 400)
            await asyncio.sleep(1)
            assert blocker.decode_id == "d2" or blocker.decode_id == "d1"
            busy = blocker.decode_id
            second = [*first, *answer, *prompt_of(20, "turn")]
            live = d.submit(second, 8)
            await wait_all([live])
            assert live.journal.choices[0].tokens == expected(second, 8)
            if busy == "d1":
                computed = d.nodes["p1"].worker.load().counters["computed_tokens"]
                assert computed < 96 + 16 + 48, computed
            assert live.summary().num_cached_tokens >= 144
            d.dispatcher.cancel(blocker)
            await d.quiet()

    run_virtual(main)


def test_a_seed_gives_the_same_tokens_on_each_pair_of_workers_beside_others_with_a_seed_or_none():
    """T062."""

    async def main():
        async with deployment("p1", "p2", "d1", "d2") as d:
            prompt, rng, pairs = prompt_of(100), random.Random(62), set()
            for turn in range(10):
                strangers = [d.submit(prompt_of(rng.randrange(1, 400), (turn, k)), 8) for k in range(rng.randrange(4))]
                equals = [d.submit(prompt, 12, temperature=0.8, seed=42, salt=b"%d" % turn) for _ in range(2)]
                await wait_all([*strangers, *equals])
                for live in equals:
                    assert live.journal.choices[0].tokens == expected(prompt, 12, seed=42)
                    pairs.add((live.summary().source_worker_id, live.decode_id))
            assert pairs >= {(source, decode) for source in ("p1", "p2") for decode in ("d1", "d2")}
            await d.quiet()

    run_virtual(main)


def test_salts_share_no_block():
    async def main():
        async with deployment("p1", "d1") as d:
            prompt = prompt_of(100)
            for salt, cached in ((b"a", 0), (b"b", 0), (b"a", 96)):
                live = d.submit(prompt, 4, salt=salt)
                await wait_all([live])
                assert live.summary().num_cached_tokens == cached
            await d.quiet()

    run_virtual(main)


def test_n_choices_share_one_fetch_and_each_equals_its_own_request():
    async def main():
        async with deployment("p1", "d1") as d:
            prompt = prompt_of(100)
            live = d.submit(prompt, 8, n=4)
            await wait_all([live])
            for choice in live.journal.choices:
                assert choice.tokens == expected(prompt, 8)
            counters = d.nodes["d1"].worker.load().counters
            assert counters["fetches_started"] == 1
            assert counters["fetched_blocks"] == 6
            await d.quiet()

    run_virtual(main)


def test_equal_prompts_at_once_are_computed_and_fetched_once():
    async def main():
        async with deployment("p1", "d1") as d:
            prompt = prompt_of(300)
            answers = await asyncio.gather(*(d.answer(prompt, 8) for _ in range(6)))
            assert answers == [expected(prompt, 8)] * 6
            assert d.nodes["p1"].worker.load().counters["computed_tokens"] == 288
            assert d.nodes["d1"].worker.load().counters["fetched_blocks"] == 18
            await d.quiet()

    run_virtual(main)


def test_when_the_first_of_two_waiters_leaves_the_other_gets_its_blocks():
    async def main():
        async with deployment("p1", "d1", max_step_tokens=32) as d:
            prompt = prompt_of(600)
            first, second = d.submit(prompt, 4), d.submit(prompt, 4)
            await asyncio.sleep(0.3)
            d.dispatcher.cancel(first)
            await wait_all([second])
            assert second.journal.choices[0].tokens == expected(prompt, 4)
            await d.quiet()

    run_virtual(main)


def test_stop_tokens_and_limits_end_exactly():
    async def main():
        async with deployment("p1", "d1") as d:
            prompt = prompt_of(50)
            whole = expected(prompt, 20)
            live = d.submit(prompt, 20, stop_token_ids=(whole[6],))
            await wait_all([live])
            assert live.journal.choices[0].tokens == whole[: whole.index(whole[6]) + 1]
            for limit in (1, 2, 3, 17):
                assert await d.answer(prompt, limit) == whole[:limit]
            await d.quiet()

    run_virtual(main)


# ---------------------------------------------------------------------------------------------------------- small pools


def test_preemption_changes_no_token_and_nothing_hangs():
    async def main():
        async with deployment("p1", "d1", num_slots=30) as d:
            prompts = [prompt_of(40, k) for k in range(4)]
            answers = await asyncio.gather(
                *(d.answer(prompt, 200, temperature=1, seed=k + 1) for k, prompt in enumerate(prompts))
            )
            assert answers == [expected(prompt, 200, k + 1) for k, prompt in enumerate(prompts)]
            assert d.nodes["d1"].worker.load().counters["preemptions"] > 0
            await d.quiet()

    run_virtual(main)


def test_a_source_too_small_for_the_chain_is_not_asked():
    async def main():
        async with deployment("d1") as d:
            d.start("p1", num_slots=4)
            await d.ready("p1")
            prompt = prompt_of(200)
            assert await d.answer(prompt, 4) == expected(prompt, 4)
            assert d.nodes["p1"].worker.load().counters["served_fetches"] == 0
            await d.quiet()

    run_virtual(main)


def test_many_prompts_through_tiny_pools_all_end_exactly():
    async def main():
        async with deployment("p1", "p2", "d1", "d2", num_slots=24) as d:
            prompts = [prompt_of(random.Random(k).randrange(1, 200), k) for k in range(60)]
            answers = await asyncio.gather(*(d.answer(prompt, 40) for prompt in prompts))
            assert answers == [expected(prompt, 40) for prompt in prompts]
            await d.quiet()

    run_virtual(main)


def test_a_request_larger_than_every_pool_is_refused_at_once_and_blocks_nobody():
    async def main():
        async with deployment("p1", "d1", num_slots=20) as d:
            with pytest.raises(InvalidRequest, match="320 tokens"):
                d.submit(prompt_of(400), 4)
            with pytest.raises(InvalidRequest, match="320 tokens"):
                d.submit(prompt_of(300), 40)
            assert await d.answer(prompt_of(30), 4) == expected(prompt_of(30), 4)
            await d.quiet()

    run_virtual(main)


def test_an_abort_under_pressure_leaves_the_pool_usable_at_once():
    async def main():
        async with deployment("p1", "d1", num_slots=60) as d:
            for _ in range(20):
                lives = [d.submit(prompt_of(300, k), 200) for k in range(6)]
                await asyncio.sleep(random.Random(1).random())
                for live in lives:
                    d.dispatcher.cancel(live)
                await d.quiet()
                prompt = prompt_of(550, "big")
                assert await d.answer(prompt, 4) == expected(prompt, 4)

    run_virtual(main, 10_000)


# --------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("fault", ["kill", "freeze"])
@pytest.mark.parametrize("after_s", [0.001, 0.05, 0.2, 0.5, 0.9])
def test_a_prefill_worker_lost_at_any_moment_costs_no_token(fault, after_s):
    async def main():
        async with deployment("p1", "p2", "d1", max_step_tokens=64) as d:
            prompts = [prompt_of(500, k) for k in range(3)]
            lives = [d.submit(prompt, 20) for prompt in prompts]
            await asyncio.sleep(after_s)
            began = asyncio.get_running_loop().time()
            if fault == "kill":
                await d.kill("p1")
            else:
                d.network.freeze("p1")
                d.nodes["p1"].executor.hang.clear()
            for live, prompt in zip(lives, prompts, strict=True):
                await wait_all([live])
                assert live.journal.choices[0].tokens == expected(prompt, 20)
            assert asyncio.get_running_loop().time() - began < 8
            if fault == "freeze":
                d.network.thaw("p1")
                d.nodes["p1"].executor.hang.set()
            await d.quiet()

    run_virtual(main)


def test_without_any_prefill_worker_decode_computes_everything_and_says_so():
    async def main():
        async with deployment("p1", "d1") as d:
            assert not d.dispatcher.is_degraded
            await d.kill("p1")
            await asyncio.sleep(0.5)
            assert d.dispatcher.is_degraded
            prompt = prompt_of(900)
            assert await d.answer(prompt, 8) == expected(prompt, 8)
            await d.quiet()

    run_virtual(main)


def test_a_request_too_long_to_compute_locally_is_handed_back_and_placed_again():
    async def main():
        async with deployment("p1", "p2", "d1", max_step_tokens=64, max_local_tokens=32) as d:
            prompt = prompt_of(800)
            live = d.submit(prompt, 8)
            await asyncio.sleep(0.2)
            for name in ("p1", "p2"):
                d.network.freeze(name)
            await wait_all([live])
            assert live.journal.choices[0].tokens == expected(prompt, 8)
            assert live.journal.attempt > 1
            for name in ("p1", "p2"):
                d.network.thaw(name)
            await d.quiet()

    run_virtual(main)


@pytest.mark.parametrize("fault", ["kill", "freeze", "hang"])
@pytest.mark.parametrize("seed", [0, 11])
def test_a_decode_worker_lost_in_mid_stream_costs_no_token_and_repeats_none(fault, seed):
    async def main():
        async with deployment("p1", "d1", "d2") as d:
            prompts = [prompt_of(100 + k, k) for k in range(6)]
            lives = [
                d.submit(prompt, 150, temperature=min(seed, 1), seed=seed, n=1 + k % 2)
                for k, prompt in enumerate(prompts)
            ]
            while min(len(live.journal.choices[0].tokens) for live in lives) < 30:
                await asyncio.sleep(0.01)
            victim = lives[0].decode_id
            if fault == "kill":
                await d.kill(victim)
            else:
                d.nodes[victim].executor.hang.clear()
                if fault == "freeze":
                    d.network.freeze(victim)
            for live, prompt in zip(lives, prompts, strict=True):
                await wait_all([live])
                for choice in live.journal.choices:
                    assert choice.tokens == expected(prompt, 150, seed, choice.choice)
            assert any(live.journal.attempt == 2 for live in lives)
            if fault != "kill":
                d.network.thaw(victim)
                d.nodes[victim].executor.hang.set()
                await asyncio.sleep(5)
            await d.quiet()

    run_virtual(main)


def test_the_only_decode_worker_dies_and_its_successor_finishes_the_stream():
    async def main():
        async with deployment("p1", "d1") as d:
            prompt = prompt_of(100)
            live = d.submit(prompt, 100)
            while len(live.journal.choices[0].tokens) < 30:
                await asyncio.sleep(0.01)
            await d.kill("d1")
            await asyncio.sleep(3)
            with pytest.raises(NoWorker):
                d.submit(prompt, 4)
            d.start("d1")
            await wait_all([live])
            assert live.journal.choices[0].tokens == expected(prompt, 100)
            await d.quiet()

    run_virtual(main)


def test_a_stream_without_a_spare_worker_waits_as_long_as_its_time_limit_and_no_longer():
    """Not only as long as who has not begun may wait in the queue."""

    async def main():
        limits = limits_of(request_timeout_s=50.0, queue_timeout_s=2.0)
        async with deployment("p1", "d1", limits=limits) as d:
            loop = asyncio.get_running_loop()
            prompt, began = prompt_of(100), loop.time()
            lives = [d.submit(prompt, 400, timeout_s=20.0), d.submit(prompt, 400)]
            while min(len(live.journal.choices[0].tokens) for live in lives) < 30:
                await asyncio.sleep(0.01)
            await d.kill("d1")
            for live, limit_s in zip(lives, (20, 50), strict=True):
                with pytest.raises(DeadlineExceeded, match=f"time limit of {limit_s} s"):
                    await wait_all([live])
                assert loop.time() - began == pytest.approx(limit_s, abs=0.1)
                tokens = live.journal.choices[0].tokens
                assert tokens == expected(prompt, 400)[: len(tokens)]
                assert live.journal.choices[0].finish is None
            await d.quiet()

    run_virtual(main)


def test_a_step_that_fails_ends_its_requests_with_a_typed_error_and_no_others():
    async def main():
        async with deployment("p1", "d1") as d:
            live = d.submit(prompt_of(50), 50)
            await asyncio.sleep(0.3)
            d.nodes["d1"].executor.fail = RuntimeError("out of luck")
            with pytest.raises(EngineFailure, match="out of luck"):
                await wait_all([live])
            assert await d.answer(prompt_of(50), 8) == expected(prompt_of(50), 8)
            await d.quiet()

    run_virtual(main)


def test_a_failed_prefill_step_is_a_miss_and_the_answer_still_comes():
    async def main():
        async with deployment("p1", "d1") as d:
            d.nodes["p1"].executor.fail = RuntimeError("out of luck")
            assert await d.answer(prompt_of(100), 8) == expected(prompt_of(100), 8)
            assert d.nodes["d1"].worker.load().counters["fetch_failed_source_error"] == 1
            await d.quiet()

    run_virtual(main)


def test_a_long_step_is_not_taken_for_death():
    async def main():
        async with deployment(
            "p1", "d1", step=dict(base_s=0.5, s_per_token=0.01), max_step_tokens=1024, step_target_s=20.0
        ) as d:
            prompt = prompt_of(900)
            assert await d.answer(prompt, 8) == expected(prompt, 8)
            assert d.dispatcher.counters["continuations"] == 0
            await d.quiet()

    run_virtual(main)


def test_a_router_that_dies_leaves_nothing_on_its_workers():
    async def main():
        async with deployment("p1", "d1") as d:
            for k in range(4):
                d.submit(prompt_of(300, k), 300)
            await asyncio.sleep(1)
            d.network.freeze("d1")  # its stream to the decode worker falls silent
            await asyncio.sleep(8)
            load = d.nodes["d1"].worker.load()
            assert load.num_running == load.num_waiting == load.num_fetching == 0
            assert d.nodes["d1"].worker.body.pool.audit().is_clean
            for live in d.dispatcher.lives:
                d.dispatcher.cancel(live)
            d.network.thaw("d1")
            await asyncio.sleep(5)
            await d.quiet()

    run_virtual(main)


# --------------------------------------------------------------------------------------------- cancelling and deadlines


@pytest.mark.parametrize("after_s", [0, 0.001, 0.02, 0.2, 0.5, 1.0, 2.0])
def test_a_client_that_leaves_at_any_phase_leaves_nothing_behind(after_s):
    async def main():
        async with deployment("p1", "d1", max_step_tokens=64) as d:
            live = d.submit(prompt_of(700), 1000)
            await asyncio.sleep(after_s)
            d.dispatcher.cancel(live)
            assert live.state is LiveState.CANCELLED
            await asyncio.sleep(0.6)  # the running step and half a second
            for node in d.nodes.values():
                assert node.worker.body.pool.counts.num_live == node.worker.body.pool.counts.num_filling == 0
            await d.quiet()

    run_virtual(main)


def test_queued_requests_whose_clients_leave_are_never_computed():
    async def main():
        async with deployment("p1", "d1", num_slots=60, max_step_tokens=64) as d:
            running = d.submit(prompt_of(600, "first"), 100)
            queued = [d.submit(prompt_of(600, k), 100) for k in range(50)]
            await asyncio.sleep(0.1)
            for live in queued:
                d.dispatcher.cancel(live)
            assert d.dispatcher.lives == [running]
            await wait_all([running])
            computed = d.nodes["p1"].worker.load().counters["computed_tokens"]
            assert computed <= 600
            await d.quiet()

    run_virtual(main)


@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_writer_that_keeps_up_has_an_event_for_each_token_and_one_that_lags_several_tokens_in_one(num_choices):
    async def events_of(d: Deployment, prompt: list[int], pause_s: float) -> list[list[int]]:
        """The tokens of each, of all choices one after the other."""
        events: list[list[list[int]]] = [[] for _ in range(num_choices)]
        async for numbered in deltas_of([d.submit(prompt, 60, n=num_choices, temperature=1)]):
            for one in numbered:
                events[one.index].append(list(one.delta.token_ids))
            await asyncio.sleep(pause_s)
        for choice, found in enumerate(events):
            assert [token for tokens in found for token in tokens] == expected(prompt, 60, 7, choice)
        return [tokens for found in events for tokens in found]

    async def main():
        async with deployment("p1", "d1") as d:
            step_s = d.nodes["d1"].executor._base_s
            for pause_s in (0.0, 0.9 * step_s):
                assert [len(tokens) for tokens in await events_of(d, prompt_of(40), pause_s)] == [1] * 60 * num_choices
            sizes = [len(tokens) for tokens in await events_of(d, prompt_of(40), 5 * step_s)]
            assert max(sizes) >= 3
            assert len(sizes) < 30 * num_choices
            await d.quiet()

    run_virtual(main)


def test_hundreds_cancelled_at_random_leave_no_survivor():
    async def main():
        async with deployment("p1", "p2", "d1", "d2", num_slots=200) as d:
            rng = random.Random(5)
            for _ in range(5):
                lives = [d.submit(prompt_of(rng.randrange(1, 400), rng.random()), 50) for _ in range(100)]
                for live in sorted(lives, key=lambda _: rng.random()):
                    await asyncio.sleep(rng.random() * 0.005)
                    d.dispatcher.cancel(live)
                await d.quiet()
            assert await d.answer(prompt_of(300), 8) == expected(prompt_of(300), 8)

    run_virtual(main)


def test_deadlines_end_requests_wherever_they_are():
    async def main():
        async with deployment("p1", "d1", max_step_tokens=64) as d:
            for prompt, limit in ((prompt_of(900), 0.05), (prompt_of(900), 0.4), (prompt_of(20), 0.5)):
                live = d.submit(prompt, 1000, timeout_s=limit)
                with pytest.raises(DeadlineExceeded):
                    await wait_all([live])
                assert live.instants_s["closed"] < limit + 0.2
                await d.quiet()

    run_virtual(main)


def test_the_queue_is_bounded_and_its_wait_too():
    async def main():
        limits = limits_of(16, max_queued=3, queue_timeout_s=2)
        async with deployment("p1", "d1", num_slots=60, limits=limits, step=dict(base_s=0.2)) as d:
            d.submit(prompt_of(600, "a"), 300)
            waiting = [d.submit(prompt_of(600, k), 300) for k in range(3)]
            with pytest.raises(Overloaded, match="3 requests are waiting"):
                d.submit(prompt_of(600), 300)
            for live in waiting:
                with pytest.raises(Overloaded, match="decode pool"):
                    await wait_all([live])
            for live in d.dispatcher.lives:
                d.dispatcher.cancel(live)
            await d.quiet()

    run_virtual(main)


def test_without_a_decode_worker_a_request_is_refused_at_once():
    async def main():
        async with deployment("p1") as d:
            with pytest.raises(NoWorker, match="decode pool"):
                d.submit(prompt_of(20), 4)

    run_virtual(main)


# ------------------------------------------------------------------------------------------------------------- joining


def test_a_worker_of_another_block_size_is_refused_by_field():
    async def main():
        async with deployment("p1", "d1") as d:
            node = d.start("d2", engine=fake_engine(100, 32))
            await asyncio.wait((node.task,))
            (error,) = node.task.exception().exceptions
            assert error.field == "block_size"
            del d.nodes["d2"]
            assert await d.answer(prompt_of(50), 4) == expected(prompt_of(50), 4)
            assert d.members.num_refused == 1

    async def outer():
        with pytest.raises(BaseExceptionGroup):
            await main()

    run_virtual(outer)


def test_every_accepted_request_ends_once_and_the_counts_add_up():
    async def main():
        async with deployment("p1", "d1", "d2") as d:
            rng = random.Random(3)
            lives = [
                d.submit(prompt_of(rng.randrange(1, 300), k), 60, timeout_s=rng.choice([None, 1.0])) for k in range(60)
            ]
            await asyncio.sleep(0.5)
            for live in lives[::7]:
                d.dispatcher.cancel(live)
            await d.kill("d1")
            for live in lives:
                while not live.has_ended:
                    await asyncio.sleep(0.1)
            counters = d.dispatcher.counters
            assert counters["accepted"] == 60 == counters["finished"] + counters["failed"] + counters["cancelled"]
            await d.quiet()

    run_virtual(main)


def test_a_step_that_fails_for_one_sequence_is_mended_for_the_others():
    async def main():
        async with deployment("p1", "d1") as d:
            lives = [d.submit(prompt_of(30, k), 40) for k in range(3)]
            await asyncio.sleep(0.3)
            d.nodes["d1"].executor.fail = RuntimeError("out of luck")
            for k, live in enumerate(lives):
                await wait_all([live])
                assert live.journal.choices[0].tokens == expected(prompt_of(30, k), 40)
            await d.quiet()

    run_virtual(main)


def test_a_request_that_only_a_lost_worker_could_hold_does_not_hold_up_the_others():
    async def main():
        async with deployment("p1", "d1", num_slots=30) as d:
            d.start("d2", num_slots=400)
            await d.ready("d2")
            big = d.submit(prompt_of(900), 100)
            await asyncio.sleep(0.3)
            assert big.decode_id == "d2"
            await d.kill("d2")
            await asyncio.sleep(1)
            assert await d.answer(prompt_of(40), 4) == expected(prompt_of(40), 4)
            d.start("d2", num_slots=400)
            await wait_all([big])
            assert big.journal.choices[0].tokens == expected(prompt_of(900), 100)
            await d.quiet()

    run_virtual(main)


def test_a_reader_that_leaves_while_its_chain_reads_from_a_holder_harms_nobody():
    async def main():
        async with deployment("p1", "d1", "d2", limits=limits_of(local_tokens=0)) as d:
            first = prompt_of(300)
            for _ in range(8):
                live = d.submit([*first, *prompt_of(40, random.random())], 30)
                await asyncio.sleep(random.Random(1).random() * 0.2)
                d.dispatcher.cancel(live)
            assert await d.answer(first, 4) == expected(first, 4)
            await d.quiet()

    run_virtual(main)


# ----------------------------------------------------------------------------------------------------- log-probabilities


def scored(tokens):
    return [-one.logprob for one in tokens]


def test_log_probabilities_are_those_of_the_tokens_they_come_with():
    """T059, T064: of every token that is yielded, and of the prompt's, which are fetched from nobody."""

    async def main():
        async with deployment("p1", "d1") as d:
            prompt = prompt_of(150)
            await d.answer(prompt, 3)  # its blocks are sealed everywhere: nothing of it may be skipped
            for max_tokens in (0, 1, 9):
                live = d.submit(prompt, max_tokens, num_logprobs=1, num_prompt_logprobs=2)
                await wait_all([live])
                (choice,) = live.journal.choices
                assert choice.tokens == expected(prompt, 9)[:max_tokens]
                assert scored(choice.logprobs) == choice.tokens
                assert scored(live.journal.prompt_logprobs) == prompt[1:]
                assert len(live.journal.prompt_logprobs[0].top) == 2
                assert live.summary().num_fetched_blocks == 0
                assert choice.finish is not None
            await d.quiet()

    run_virtual(main)


def test_n_choices_have_the_prompts_log_probabilities_once():
    async def main():
        async with deployment("p1", "d1") as d:
            prompt = prompt_of(90)
            live = d.submit(prompt, 4, n=3, num_prompt_logprobs=0)
            await wait_all([live])
            assert scored(live.journal.prompt_logprobs) == prompt[1:]
            assert [choice.tokens for choice in live.journal.choices] == [expected(prompt, 4)] * 3
            await d.quiet()

    run_virtual(main)


@pytest.mark.parametrize("at_s", [0.05, 0.2, 0.4, 0.8, 1.2])
def test_a_lost_decode_worker_leaves_no_gap_in_the_log_probabilities(at_s):
    async def main():
        async with deployment("p1", "d1", "d2") as d:
            prompt = prompt_of(600)
            live = d.submit(prompt, 40, num_logprobs=0, num_prompt_logprobs=0)
            await asyncio.sleep(at_s)
            if live.decode_id in d.nodes:
                await d.kill(live.decode_id)
            await wait_all([live])
            (choice,) = live.journal.choices
            assert choice.tokens == expected(prompt, 40)
            assert scored(choice.logprobs) == choice.tokens
            assert scored(live.journal.prompt_logprobs) == prompt[1:]
            await d.quiet()

    run_virtual(main)


def test_preemption_changes_neither_tokens_nor_log_probabilities():
    """T051, with the pool so small that it must happen."""

    async def main():
        async with deployment("d1", num_slots=24) as d:
            prompts = [prompt_of(40, k) for k in range(8)]
            lives = [d.submit(prompt, 90, num_logprobs=1, num_prompt_logprobs=1) for prompt in prompts]
            await wait_all(lives)
            for prompt, live in zip(prompts, lives, strict=True):
                (choice,) = live.journal.choices
                assert choice.tokens == expected(prompt, 90)
                assert scored(choice.logprobs) == choice.tokens
                assert scored(live.journal.prompt_logprobs) == prompt[1:]
            assert d.nodes["d1"].worker.load().counters["preemptions"] > 0
            await d.quiet()

    run_virtual(main)


# ------------------------------------------------------------------------------------------------------------- fairness


def test_short_prompts_do_not_wait_for_a_long_one():
    """T049: beside a prompt of 7,500 tokens a short one's first token comes within 4 times its time alone."""

    async def main():
        async with deployment("p1", "d1", num_slots=1200) as d:
            prompt = prompt_of(150, "alone")
            live = d.submit(prompt, 1)
            await wait_all([live])
            alone_s = live.instants_s["first_token"]
            long = d.submit(prompt_of(7500, "long"), 4)
            for number in range(10):
                await asyncio.sleep(0.3)
                live = d.submit(prompt_of(150, number), 1)
                await wait_all([live])
                assert live.instants_s["first_token"] < 4 * alone_s, number
            assert not long.has_ended
            await wait_all([long])
            assert long.journal.choices[0].tokens == expected(prompt_of(7500, "long"), 4)
            await d.quiet()

    run_virtual(main)


def test_short_requests_pass_one_that_finds_no_room_and_it_is_served_in_time():
    async def main():
        async with deployment("p1", "d1", num_slots=100) as d:
            running = d.submit(prompt_of(1000, "running"), 300)
            await asyncio.sleep(1)
            large = d.submit(prompt_of(1200, "large"), 4)
            shorts = [d.submit(prompt_of(50, k), 4) for k in range(30)]
            await asyncio.sleep(3)
            assert not large.has_ended
            assert 3 <= sum(short.has_ended for short in shorts) <= 1200 // 50
            await wait_all([running, large, *shorts])
            await d.quiet()

    run_virtual(main)


def test_after_everything_is_aborted_a_large_request_starts_at_once():
    """T052."""

    async def main():
        async with deployment("p1", "d1", num_slots=60) as d:
            for round_number in range(10):
                lives = [d.submit(prompt_of(200, (round_number, k)), 60) for k in range(12)]
                await asyncio.sleep(0.7)
                for live in lives:
                    d.dispatcher.cancel(live)
                await asyncio.sleep(1)
                live = d.submit(prompt_of(560, round_number), 1)
                await wait_all([live])
                assert live.instants_s["placed"] < 0.01
            await d.quiet()

    run_virtual(main)


def test_every_way_to_need_a_slot_can_evict():
    """T025: the pool is full of cached blocks, and admission, growth, receiving and preempted work go on."""

    async def main():
        async with deployment("p1", "d1", num_slots=40) as d:
            for k in range(8):
                await d.answer(prompt_of(200, ("fill", k)), 2)
            assert d.nodes["d1"].worker.body.pool.counts.num_free < 5
            assert d.nodes["p1"].worker.body.pool.counts.num_free < 15
            prompts = [prompt_of(120, ("new", k)) for k in range(6)]
            answers = await asyncio.gather(*(d.answer(prompt, 150) for prompt in prompts))
            assert answers == [expected(prompt, 150) for prompt in prompts]
            counters = d.nodes["d1"].worker.load().counters
            assert counters["evicted_blocks"] > 0
            assert counters["preemptions"] > 0
            await d.quiet()

    run_virtual(main)


# -------------------------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("window", [2, 15, 16, 17, 40, 100])
def test_with_a_window_only_the_blocks_that_are_still_seen_travel(window):
    async def main():
        def engine():
            return fake_engine(200, BLOCK, window=window)

        async with deployment(limits=limits_of(local_tokens=0)) as d:
            for name in ("p1", "d1"):
                d.start(name, engine=engine())
            await d.ready("p1", "d1")
            for length in (1, 16, 17, 48, 49, 100, 160, 161, 500):
                prompt = prompt_of(length, (length, window))
                for _ in range(2):  # computed and fetched, then found
                    live = d.submit(prompt, 20)
                    await wait_all([live])
                    wanted = fake_answer(prompt, Sampling(0, 20, 0.0), window=window)
                    assert live.journal.choices[0].tokens == wanted, length
                assert live.summary().num_fetched_blocks == 0
            await d.quiet()

    run_virtual(main)


def test_with_a_window_a_fetch_starts_at_the_first_block_that_is_seen():
    async def main():
        async with deployment(limits=limits_of(local_tokens=0)) as d:
            for name in ("p1", "d1"):
                d.start(name, engine=fake_engine(200, BLOCK, window=40))
            await d.ready("p1", "d1")
            prompt = prompt_of(500)
            live = d.submit(prompt, 4)
            await wait_all([live])
            assert live.summary().num_fetched_blocks == 3  # 31 whole blocks; the tail at 496 sees from 457 on: block 28
            assert d.nodes["p1"].worker.load().counters["computed_tokens"] == 496
            await d.quiet()

    run_virtual(main)


def test_with_a_window_what_no_source_brings_is_computed_from_the_beginning():
    async def main():
        async with deployment(limits=limits_of(local_tokens=0)) as d:
            for name in ("p1", "d1"):
                d.start(name, engine=fake_engine(200, BLOCK, window=40), max_local_tokens=4000)
            await d.ready("p1", "d1")
            prompt = prompt_of(500)
            live = d.submit(prompt, 30)
            await asyncio.sleep(0.2)
            await d.kill("p1")
            await wait_all([live])
            assert live.journal.choices[0].tokens == fake_answer(prompt, Sampling(0, 30, 0.0), window=40)
            alone = prompt_of(300, "alone")
            assert await d.answer(alone, 5) == fake_answer(alone, Sampling(0, 5, 0.0), window=40)
            await d.quiet()

    run_virtual(main)


# ------------------------------------------------------------------------------------------------- faults of the model


class FaultyRunner:
    """Its logits are not finite whenever a sequence ends in token 7."""

    def __init__(self, runner):
        self._runner = runner

    def run(self, plan):
        result = self._runner.run(plan)
        bad = {chunk.sequence_id: NON_FINITE for chunk in plan.chunks if chunk.draw and chunk.tokens[-1] == 7}
        tokens = {key: token for key, token in result.tokens.items() if key not in bad}
        return StepResult(tokens, bad)


def test_logits_that_are_not_finite_end_their_request_alone_with_an_error_and_a_metric():
    """T016."""

    async def main():
        engine = fake_engine(400, BLOCK)
        async with deployment(limits=limits_of(local_tokens=0)) as d:
            d.start("d1", engine=replace(engine, runner=FaultyRunner(engine.runner)))
            await d.ready("d1")
            good = [d.submit(prompt_of(40 + k, ("calm", k)), 30) for k in range(8)]
            with pytest.raises(EngineFailure, match="not finite"):
                await d.answer([*prompt_of(50), 7], 5)
            await wait_all(good)
            for k, live in enumerate(good):
                wanted = expected(prompt_of(40 + k, ("calm", k)), 30)
                assert 7 not in wanted
                assert live.journal.choices[0].tokens == wanted
            counters = d.nodes["d1"].worker.load().counters
            assert counters["non_finite_logits"] == counters["engine_failures"] == 1
            await d.quiet()

    run_virtual(main)


def test_preemption_does_not_count_as_a_hit():
    """T021."""

    async def main():
        async with deployment("d1", num_slots=24) as d:
            await asyncio.gather(*(d.answer(prompt_of(40, ("unique", k)), 90) for k in range(8)))
            counters = d.nodes["d1"].worker.load().counters
            assert counters["preemptions"] > 0
            assert counters["recomputed_tokens"] > 0
            assert counters["cache_hit_tokens"] == 0
            await d.quiet()

    run_virtual(main)
