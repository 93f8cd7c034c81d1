"""kill -9, SIGSTOP and a slow line at either end of a fetch, over each road, beside streams that must not notice (T006, T008, T036, T044, T084)."""

import os
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.processes.proxy import Proxy
from tests.processes.service import completion_body, serving, wait_until

pytestmark = [pytest.mark.model, pytest.mark.processes]

NUM_BYSTANDERS, BYSTANDER_TOKENS = 8, 16


def ids(length, seed):
    return [random.Random(f"{seed} {k}").randrange(100, 40_000) for k in range(length)]


def held_by(service, name):
    """What a process holds of the system: open descriptors, and sockets among them."""
    process = psutil.Process(service.pid(name))
    return process.num_fds(), len(process.net_connections("all"))


PROMPT = ids(500, "long")
"""Asked for again and again under another salt: nobody has its blocks, and the reference is computed once."""

SLACK = 6
"""Pairs of workers that had not met when the baseline was taken."""


@pytest.fixture(scope="module", params=["grpc", pytest.param("shm", marks=pytest.mark.soak)])
def pair(request, model_directory):
    with serving(model_directory, num_prefill=2, num_decode=2, kv_tokens=4000, transport=request.param) as running:
        for k in range(4):
            running.complete(ids(60, ("warm", k)), 2)
        running.baseline = {name: held_by(running, name) for name in running.deployment.children}
        running.shared_memory = sorted(os.listdir("/dev/shm"))
        yield running


def active(service, name):
    return service.total("kvferry_worker_active", worker=name)


@pytest.mark.parametrize(
    ("role", "number"),
    [
        ("prefill", signal.SIGKILL),
        ("decode", signal.SIGSTOP),
        pytest.param("prefill", signal.SIGSTOP, marks=pytest.mark.soak),
        pytest.param("decode", signal.SIGKILL, marks=pytest.mark.soak),
    ],
)
def test_either_end_of_a_fetch_is_lost_and_nobody_notices(pair, reference, role, number):
    pair.wait_ready()
    pair.wait_idle()
    salt = f"{role} {number} {pair.deployment.plan.transport}"
    bystanders = [ids(25, ("by", k)) for k in range(NUM_BYSTANDERS)]
    names = [f"{role}-1", f"{role}-2"]
    with ThreadPoolExecutor(1 + NUM_BYSTANDERS) as pool:
        long = pool.submit(pair.complete, PROMPT, 6, cache_salt=salt)
        wait_until(lambda: pair.total("kvferry_worker_sequences", state="fetching") > 0, 10, "the fetch")
        victim = max(names, key=lambda name: active(pair, name))
        streams = [pool.submit(pair.stream_tokens, one, BYSTANDER_TOKENS) for one in bystanders]
        pair.signal(victim, number)
        try:
            reference.check(PROMPT, long.result()["choices"][0]["token_ids"], 6)
            for one, stream in zip(bystanders, streams, strict=True):
                reference.check(one, stream.result(), BYSTANDER_TOKENS)
        finally:
            if number is signal.SIGSTOP:
                pair.signal(victim, signal.SIGCONT)
    pair.wait_ready()
    pair.wait_idle(3)
    for name, before in pair.baseline.items():
        assert all(now <= then + SLACK for now, then in zip(held_by(pair, name), before, strict=True)), name
    assert sorted(os.listdir("/dev/shm")) == pair.shared_memory


def test_nothing_of_a_deployment_is_ever_in_dev_shm(service, pair):
    """So it may be full, or tiny (T084). The blocks of `service` take the road `shm`, as in any deployment on one host."""
    assert service.complete(PROMPT, 1, cache_salt="shm")["kvferry"][0]["road"] == "shm"
    assert not [name for name in os.listdir("/dev/shm") if "kvferry" in name]
    for deployment in (service.deployment, pair.deployment):
        for child in deployment.children.values():
            opened = [os.path.realpath(entry) for entry in Path(f"/proc/{child.pid}/fd").iterdir()]
            assert not [path for path in opened if path.startswith("/dev/shm/")], child.name


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def slow(model_directory):
    """One prefill worker behind a proxy, small pools, blocks through the fetch stream."""
    with Proxy().running() as proxy:
        proxy.target = free_port()
        extra = {"prefill-1": [f"--port={proxy.target}", f"--advertise=127.0.0.1:{proxy.port}"]}
        with serving(model_directory, kv_tokens=1500, transport="grpc", extra=extra) as running:
            running.complete(ids(60, "warm"), 2)
            yield running, proxy


@pytest.fixture(autouse=True)
def _line_is_fast_again(request):
    yield
    if "slow" in request.fixturenames:
        running, proxy = request.getfixturevalue("slow")
        proxy.bytes_per_s = None
        running.wait_ready()
        running.complete(
            ids(60, "meet"), 2, cache_salt=request.node.name
        )  # a new life has been met, over the fast line
        running.wait_idle()


def wait_for_transfer(proxy, num_bytes):
    before = proxy.num_bytes
    wait_until(lambda: proxy.num_bytes - before >= num_bytes, 20, f"{num_bytes} bytes of a transfer")


@pytest.mark.parametrize(
    "fault", ["cut", *(pytest.param(one, marks=pytest.mark.soak) for one in ("kill", "stop", "stall"))]
)
def test_a_transfer_that_breaks_half_way_keeps_what_arrived_and_costs_no_token(slow, reference, fault):
    service, proxy = slow
    fetched = service.total("kvferry_worker_events_total", name="fetched_blocks")
    proxy.bytes_per_s = 8e6
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(service.complete, PROMPT, 6, cache_salt=fault)
        wait_for_transfer(proxy, 8_000_000)
        began = time.monotonic()
        if fault == "kill":
            service.kill("prefill-1")
        elif fault == "stop":
            service.signal("prefill-1", signal.SIGSTOP)
        elif fault == "cut":
            proxy.cut()
        else:
            proxy.bytes_per_s = 0
        try:
            tokens = answer.result()["choices"][0]["token_ids"]
            assert time.monotonic() - began < 5 + 8  # to notice, and to compute the rest
        finally:
            if fault == "stop":
                service.signal("prefill-1", signal.SIGCONT)
    reference.check(PROMPT, tokens, 6)
    if fault != "cut":  # cut is dialled again, and everything arrives
        assert 0 < service.total("kvferry_worker_events_total", name="fetched_blocks") - fetched < 31


@pytest.mark.parametrize("num_rounds", [3, pytest.param(6, marks=pytest.mark.soak)])
def test_clients_that_leave_in_mid_transfer_leave_no_block_to_be_written_over(slow, reference, num_rounds):
    """T008: the next requests use the same slots, and are right."""
    service, proxy = slow
    others = [ids(100 + 17 * j, ("next", j)) for j in range(3)]
    for k in range(num_rounds):
        proxy.bytes_per_s = 20e6
        left = ids(500, ("left", k))
        with httpx.Client(base_url=service.url, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=completion_body(left, 4), timeout=0.9 + 0.6 * k / num_rounds)
        proxy.bytes_per_s = None
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(lambda one, k=k: service.tokens(one, 4, cache_salt=f"{k}"), others))
        for one, answer in zip(others, answers, strict=True):
            reference.check(one, answer, 4)
