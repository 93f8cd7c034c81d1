"""What is cached, for whom, and under which name, in virtual time (T018, T020, T023, T024)."""

import asyncio
import itertools
import random

from kvferry.kv.block_id import chain, chain_root
from loadtest.virtual_time import run_virtual
from router.index import keys_of
from tests.hand_off import FETCH_ALL, answered, counters, evict_all, prompt_of
from tests.in_process import BLOCK, deployment


def test_cached_tokens_are_those_that_no_prefill_had_to_compute_wherever_they_were():
    """T018, T020: fresh, repeated, with either cache lost or both, and half shared; the answer is the same each time."""

    async def main():
        async with deployment("p1", "d1", limits=FETCH_ALL) as d:
            prompt = prompt_of(700)
            for lost, cached, computed in (
                ((), 0, 688),
                ((), 688, 0),
                (("d1",), 688, 0),
                (("p1",), 688, 0),
                (("p1", "d1"), 0, 688),
                ((), 688, 0),
            ):
                evict_all(d, *lost)
                before = counters(d, "p1")["computed_tokens"]
                await asyncio.sleep(0.5)  # the router hears of it
                live = await answered(d, prompt, 16)
                assert live.summary().num_cached_tokens == cached
                assert counters(d, "p1")["computed_tokens"] - before == computed
            for other, shared in (([*prompt[:350], *prompt_of(350, "q")], 336), ([*prompt, *prompt_of(40, "r")], 688)):
                live = await answered(d, other, 16)
                assert live.summary().num_cached_tokens == shared
            await d.quiet()

    run_virtual(main)


def alike(num: int) -> list[list[int]]:
    """Prompts that differ in one token, in the order of the same tokens, or in where they are cut."""
    rng, base = random.Random(23), [k % 5 for k in range(3 * BLOCK + 1)]
    found = {tuple(base)}
    for place in range(3 * BLOCK):
        found |= {(*base[:place], token, *base[place + 1 :]) for token in (0, 1, 2, 255, 256, 257, 999)}
    for _ in range(num):
        shuffled = base[: 2 * BLOCK]
        rng.shuffle(shuffled)
        found.add((*shuffled, *base[2 * BLOCK :]))
    blocks = [base[k * BLOCK : (k + 1) * BLOCK] for k in range(3)]
    found |= {(*a, *b, *c, 7) for a, b, c in itertools.permutations(blocks)}
    for count in range(2 * BLOCK, 3 * BLOCK + 2):
        found |= {(token,) * count for token in (0, 1, 2)} | {(0,) * k + (1,) * (count - k) for k in (1, 15, 16, 17)}
    return [list(prompt) for prompt in sorted(found)]


def test_prompts_that_differ_in_one_token_or_in_order_share_the_blocks_before_and_no_other():
    """T023: every block id that any of them has stands for one prefix alone, and each has its own answer."""

    async def main():
        prompts = alike(600)
        assert len(prompts) > 900
        prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(BLOCK, len(prompt) + 1, BLOCK)}
        root = chain_root("fake-1000", "uint8")
        assert len({chain(root, prefix, BLOCK)[-1] for prefix in prefixes}) == len(prefixes)
        async with deployment("p1", "d1", limits=FETCH_ALL, num_slots=4000, max_sequences=256) as d:
            random.Random(5).shuffle(prompts)
            seen: set[tuple[int, ...]] = set()
            for prompt in prompts:
                live = await answered(d, prompt, 1)
                ends = range(BLOCK, len(prompt), BLOCK)  # those of whole blocks before the tail
                shared = next((k for k, end in enumerate(ends) if tuple(prompt[:end]) not in seen), len(ends))
                assert live.summary().num_cached_tokens == shared * BLOCK
                seen |= {tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)}
            assert counters(d, "p1")["evicted_blocks"] == counters(d, "d1")["evicted_blocks"] == 0
            await d.quiet()

    run_virtual(main)


def test_a_tenant_cannot_tell_what_another_asked_by_time_nor_by_usage_and_has_its_own_again():
    """T024: with holders to read from, in virtual time, where equal means equal."""

    async def main():
        async with deployment("p1", "d1", "d2", limits=FETCH_ALL) as d:

            async def ask(prompt: list[int], salt: bytes) -> tuple[int, float, int]:
                before = counters(d, "p1")["computed_tokens"]
                live = await answered(d, prompt, 4, salt=salt)
                await asyncio.sleep(1.5)
                computed = counters(d, "p1")["computed_tokens"] - before
                return live.summary().num_cached_tokens, round(live.instants_s["first_token"], 9), computed

            await ask(prompt_of(600, "met"), b"c")
            await ask(prompt_of(600, "met too"), b"c")
            for number in range(5):
                secret = prompt_of(600, ("secret", number))
                await ask(secret, b"a")
                for salt in (b"b", b"", b"a\0", b"A"):
                    ids = chain(d.members.root(salt), secret, BLOCK)
                    assert d.members.held(keys_of(ids), asyncio.get_running_loop().time()) == []
                    assert not any(one in d.nodes[name].worker.body.pool for name in d.nodes for one in ids)
                    of_the_secret = await ask(secret, salt)
                    of_another = await ask(prompt_of(600, ("another", number, salt)), salt)
                    assert of_the_secret == of_another
                    assert of_the_secret[::2] == (0, 592)
                assert (await ask(secret, b"a"))[::2] == (592, 0)
                evict_all(d, "p1", "d1", "d2")
                await asyncio.sleep(1.5)
            await d.quiet()

    run_virtual(main)


def test_what_a_worker_remembers_of_blocks_that_it_has_evicted_has_a_bound():
    """T025, T088: a decode worker that nobody fetches from, through whose pool far more blocks go than it holds."""

    async def main():
        async with deployment("d1", num_slots=40) as d:
            for k in range(40):
                await answered(d, prompt_of(400, k), 2)
            pool = d.nodes["d1"].worker.body.pool
            assert pool.num_evictions > 20 * pool.num_slots
            await asyncio.sleep(1.5)
            assert sum(len(watch.sealed) + len(watch.evicted) for watch in pool._watches) <= 2 * pool.num_slots
            await d.quiet()

    run_virtual(main)
