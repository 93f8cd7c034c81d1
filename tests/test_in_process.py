"""Router, prefill and decode in one virtual-time loop, with a model whose next token derives from the KV bytes it holds."""

import random

from kvferry.engine.fake import fake_answer
from kvferry.messages import Sampling
from tests.in_process import BLOCK, deployment
from tests.virtual_time import run_virtual


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return [random.Random(f"{seed} {k}").randrange(1000) for k in range(length)]


def expected(prompt: list[int], max_tokens: int, seed: int = 0) -> list[int]:
    return fake_answer(prompt, Sampling(seed, max_tokens, 1.0 if seed else 0.0))


LENGTHS = sorted(
    {1, BLOCK - 1, BLOCK, BLOCK + 1, *(k * BLOCK for k in range(2, 21)), 2 * BLOCK - 1, 2 * BLOCK + 1, 1000}
)


def test_every_length_around_a_blocks_edge_is_answered_exactly():
    async def main():
        async with deployment("p1", "d1") as d:
            for length in LENGTHS:
                for max_tokens in (1, 2, BLOCK + 1):
                    prompt = prompt_of(length, seed=length * 100 + max_tokens)
                    live = d.submit(prompt, max_tokens)
                    await live.wait()
                    assert live.journal.choices[0].tokens == expected(prompt, max_tokens), length
                    blocks = (length - 1) // BLOCK
                    wanted = blocks if blocks * BLOCK > d.dispatcher.limits.local_tokens else 0
                    assert live.summary().num_fetched_blocks == wanted
            await d.quiet()

    run_virtual(main)


if __name__ == "__main__":
    test_every_length_around_a_blocks_edge_is_answered_exactly()
