"""Workers as Ray actors, blocks through the object store: exact, gone when read, and an owner that dies is a miss (T001, T044)."""

import os
import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgpack
import pytest

from kvferry.errors import RoadFailed
from kvferry.kv.roads import object_store
from tests.processes.service import serving, wait_until

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]


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
    import ray
    from ray._private.internal_api import memory_summary

    said = memory_summary(
        ray.get_runtime_context().gcs_address, stats_only=True
    )  # else of the Ray that was begun last on this machine
    found = re.search(r"Plasma memory usage \d+ MiB, (\d+) objects", said)
    return int(found[1]) if found else 0


def test_blocks_come_through_the_store_and_none_stays_there(actors, reference):
    before = num_objects()
    for length in (16, 17, 33, 300):
        prompt = ids(length, length)
        answer = actors.complete(prompt, 6)
        reference.check(prompt, answer["choices"][0]["token_ids"], 6)
        numbers = answer["kvferry"][0]
        wanted = ("ray", (length - 1) // 16) if length > 32 else (None, 0)
        assert (numbers["road"], numbers["fetched_blocks"]) == wanted, failures(actors)
    actors.wait_idle()
    wait_until(lambda: num_objects() <= before, 3, "the store to be as it was")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)])
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
            reference.check(prompt, long.result()["choices"][0]["token_ids"], 6)
            for one, stream in zip(bystanders, streams, strict=True):
                reference.check(one, stream.result(), 16)
        finally:
            if number is signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
    actors.wait_ready()
    actors.wait_idle()
    wait_until(lambda: num_objects() <= before, 3, "the store to be as it was")
    again = ids(60, ("again", number))
    answer = actors.complete(again, 4)
    reference.check(again, answer["choices"][0]["token_ids"], 4)
    assert answer["kvferry"][0]["road"] == "ray", failures(actors)


# ------------------------------------------------------------------------------------- how a source's actor is found: no Ray


class FakeCluster:
    """What the road asks of Ray: named actors, by namespace and name."""

    exceptions = SimpleNamespace(RayError=ConnectionError)

    def __init__(self, actors):
        self.actors, self.num_asked = actors, 0
        self.util = SimpleNamespace(
            list_named_actors=lambda all_namespaces: [{"namespace": space, "name": name} for space, name in actors]
        )

    def get_actor(self, name, namespace):
        self.num_asked += 1
        if (namespace, name) not in self.actors:
            raise ValueError(f"Failed to look up actor with name {name!r}")
        return self.actors[namespace, name]


class FakeActor:
    def __init__(self, actor_id):
        self._actor_id = bytes.fromhex(actor_id)
        self.ship_blocks = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self.ship))

    async def ship(self, ticket):
        if ticket == b"lost":
            raise ConnectionError("the actor died")
        yield ticket


def offer_of(namespace, name, actor_id):
    return msgpack.packb([namespace, name, actor_id])


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(object_store, "_actors", {})
    actors = {("job", "prefill-1"): FakeActor("01"), ("other", "prefill-1"): FakeActor("02")}
    found = FakeCluster(actors)
    monkeypatch.setattr(object_store, "_ray", lambda: found)
    return found


async def test_an_actor_in_another_namespace_than_its_job_is_found_by_its_id(cluster):
    inlet = await object_store.enter(offer_of("job", "prefill-1", "02"), b"ticket")
    assert await anext(inlet._generator) == b"ticket"
    assert list(object_store._actors.values()) == [cluster.actors["other", "prefill-1"]]


async def test_the_control_store_is_asked_once_in_an_actors_life_and_again_when_it_broke(cluster):
    offer = offer_of("job", "prefill-1", "01")
    for _ in range(3):
        await object_store.enter(offer, b"ticket")
    assert cluster.num_asked == 1
    with pytest.raises(RoadFailed, match="the object is lost"):
        await (await object_store.enter(offer, b"lost")).arrive(None, 1, 16)
    await object_store.enter(offer, b"ticket")
    assert cluster.num_asked == 2


async def test_why_there_is_no_road_to_an_actor_is_said_in_the_log(cluster, caplog):
    with pytest.raises(RoadFailed, match="no actor prefill-1 with id 03"):
        await object_store.enter(offer_of("job", "prefill-1", "03"), b"ticket")
    assert "no road through Ray's object store: no actor prefill-1 with id 03" in caplog.text
