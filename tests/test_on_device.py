"""A real (tiny) model in a whole deployment whose workers both have their blocks on a device: the CPU's torch device, with mirrors."""

import asyncio
import random

import pytest
import torch

from kvferry.engine.device_memory import DeviceMemory
from kvferry.engine.load import EngineSettings
from kvferry.engine.load_device import load_on_device
from kvferry.engine.reference import Reference
from kvferry.kv.road import known_roads
from kvferry.text.model_text import TextSizes
from loadtest.virtual_time import run_virtual
from router.live import wait_all
from tests.engine.test_modules import ARCHITECTURES, VOCABULARY, make_checkpoint
from tests.in_process import NumberText, deployment, limits_of

CONTEXT = 256


class TinyText(NumberText):
    sizes = TextSizes(VOCABULARY, CONTEXT)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), **ARCHITECTURES["qwen2"])


def engine_on_device(checkpoint, kv_tokens):
    return load_on_device(checkpoint, EngineSettings(kv_tokens), torch.device("cpu"))


def prompt_of(length, seed):
    return [random.Random(f"{seed} {k}").randrange(3, VOCABULARY) for k in range(length)]


@pytest.mark.parametrize("road", ["inproc", "shm", "grpc"])
def test_blocks_travel_both_ways_between_devices_and_the_tokens_are_transformers_own(checkpoint, road):
    expected = Reference(checkpoint)

    async def main():
        async with deployment(limits=limits_of(local_tokens=0), text=TinyText()) as d:
            for name in ("p1", "d1"):
                engine = engine_on_device(checkpoint, 1024)
                assert isinstance(engine.memory, DeviceMemory)
                d.start(name, engine=engine, roads=(known_roads()[road],))
            await d.ready()
            prompt = prompt_of(70, "first")
            live = d.submit(prompt, 40)
            await wait_all([live])
            answer = live.journal.choices[0].tokens
            assert answer == expected.greedy(prompt, 40)[0]
            assert live.summary().num_fetched_blocks == 4
            await asyncio.sleep(0.5)
            d.nodes["p1"].worker.body.pool.evict_all()
            second = [*prompt, *answer, *prompt_of(40, "turn")]
            live = d.submit(second, 12)
            await wait_all([live])
            assert live.journal.choices[0].tokens == expected.greedy(second, 12)[0]
            counters = {name: node.worker.load().counters for name, node in d.nodes.items()}
            assert counters["d1"]["served_blocks"] == counters["p1"]["fetched_blocks"] == 6
            assert counters["d1"]["fetched_blocks"] == 4 + live.summary().num_fetched_blocks > 4
            await d.quiet()

    run_virtual(main)


def test_slots_that_are_used_again_and_again_keep_every_token_right(checkpoint):
    """Small pools: slots are computed into, filled by fetches, evicted and preempted, in turn."""
    expected = Reference(checkpoint)

    async def main():
        async with deployment(limits=limits_of(local_tokens=0), text=TinyText()) as d:
            d.start("p1", engine=engine_on_device(checkpoint, 12 * 16), max_step_tokens=32)
            d.start("d1", engine=engine_on_device(checkpoint, 14 * 16))
            await d.ready()
            shared = prompt_of(48, "shared")
            prompts = [[*shared[: 16 * (k % 4)], *prompt_of(20 + 13 * k, k)] for k in range(7)]
            for _ in range(2):
                lives = [d.submit(prompt, 24, n=1 + k % 2) for k, prompt in enumerate(prompts)]
                await wait_all(lives)
                for prompt, live in zip(prompts, lives, strict=True):
                    tokens = expected.greedy(prompt, 24)[0]
                    assert [choice.tokens for choice in live.journal.choices] == [tokens] * len(live.journal.choices)
            assert d.nodes["d1"].worker.body.pool.num_evictions > 0
            assert d.nodes["p1"].worker.body.pool.num_evictions > 0
            await d.quiet()

    run_virtual(main)
