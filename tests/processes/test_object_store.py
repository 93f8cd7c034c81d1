"""Workers as Ray actors, blocks through the object store: exact, gone when read, and an owner that dies is a miss (T001, T044)."""

import os
import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes.service import serving, wait_until

pytestmark = [pytest.mark.model, pytest.mark.processes]


def ids(length, seed):
    return [random.Random(f"{seed} {k}").randrange(100, 40_000) for k in range(length)]


@pytest.fixture(scope="module")
def actors(model_directory):
    with serving(model_directory, kv_tokens=3000, transport="ray") as running:
        yield running


def failures(service):
    return {key: value for key, value in service.metrics().items() if "failed" in key and value}


def num_objects():
    """In the object store, by what it says of itself."""
    from ray._private.internal_api import memory_summary

    found = re.search(r"Plasma memory usage \d+ MiB, (\d+) objects", memory_summary(stats_only=True))
    return int(found[1]) if found else 0


def test_blocks_come_through_the_store_and_none_stays_there(actors, reference):
    before = num_objects()
    for length in (16, 17, 33, 300):
        prompt = ids(length, length)
        answer = actors.complete(prompt, 6)
        reference.check(prompt, answer["choices"][0]["token_ids"])
        numbers = answer["kvferry"][0]
        wanted = ("ray", (length - 1) // 16) if length > 32 else (None, 0)
        assert (numbers["road"], numbers["fetched_blocks"]) == wanted, failures(actors)
    actors.wait_idle()
    wait_until(lambda: num_objects() <= before, 3, "the store to be as it was")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_owner_that_dies_is_a_miss_and_comes_back(actors, reference, number):
    prompt, bystanders = ids(300, "owner"), [ids(25, ("by", k)) for k in range(2)]
    before = num_objects()
    with ThreadPoolExecutor(3) as pool:
        long = pool.submit(actors.complete, prompt, 6, cache_salt=str(number))
        streams = [pool.submit(actors.stream_tokens, one, 16) for one in bystanders]
        wait_until(lambda: actors.total("kvferry_worker_sequences", state="fetching") > 0, 10, "the fetch")
        pid = actors.pid("prefill-1")
        os.kill(pid, number)
        try:
            reference.check(prompt, long.result()["choices"][0]["token_ids"])
            for one, stream in zip(bystanders, streams, strict=True):
                reference.check(one, stream.result())
        finally:
            if number is signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
    actors.wait_ready()
    actors.wait_idle()
    wait_until(lambda: num_objects() <= before, 3, "the store to be as it was")
    again = ids(60, ("again", number))
    answer = actors.complete(again, 4)
    reference.check(again, answer["choices"][0]["token_ids"])
    assert answer["kvferry"][0]["road"] == "ray", failures(actors)
