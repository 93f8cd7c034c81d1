"""kill -9, SIGSTOP and a slow line at either end of fetches that wait, are computed and are sent, over each road (T006, T036, T044, T084).

Eight streams and one with eight choices run beside them: they lose no token, and afterwards nothing is held anywhere.
"""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from deploy.local import FIRST_PAUSE_S
from kvferry.messages import FetchEnd, FetchEndReason, FetchOpen, Source
from kvferry.streams import StreamEnded
from tests.processes.crowd import body_of, crowd
from tests.processes.phases import (
    BLOCK,
    BYSTANDER_TOKENS,
    NUM_BYSTANDERS,
    QUEUED_BLOCKS,
    SENT_BLOCKS,
    SOURCE,
    Rig,
    Rigs,
    made_shape,
    number,
)
from tests.processes.proxy import Proxy
from tests.processes.service import wait_until
from tests.processes.simulated import expected_of, ids, stopped
from tests.processes.stranger import Peer, receive_a

pytestmark = [pytest.mark.model, pytest.mark.processes]

NOTICED_S = 12.0
"""Until everything is answered whose source or reader is lost: some five seconds on a quiet machine."""

ROADS = ("shm", "grpc", "ray")
IN_MAKE_TEST = {
    ("shm", "source", "kill"),
    ("shm", "reader", "stop"),
    ("grpc", "source", "stop"),
    ("grpc", "reader", "kill"),
    ("ray", "source", "kill"),
    ("ray", "reader", "kill"),
}
"""Each end, each fault and each road; all twelve combinations are in the soak."""


@pytest.fixture(scope="module")
def rigs(model_directory, tmp_path_factory) -> Iterator[Rigs]:
    with Rigs(model_directory, tmp_path_factory.mktemp("shape")).one_at_a_time() as made:
        yield made


CASES = [
    pytest.param(road, end, fault, marks=[] if (road, end, fault) in IN_MAKE_TEST else [pytest.mark.soak])
    for road in ROADS
    for end in ("source", "reader")
    for fault in ("kill", "stop")
]


@contextlib.contextmanager
def struck(here: Rig, name: str, fault: str) -> Iterator[None]:
    if fault == "stop":
        with stopped(here.service, name):
            yield
    else:
        here.service.signal(name, signal.SIGKILL)
        yield


@pytest.mark.parametrize(("road", "end", "fault"), CASES)
def test_either_end_of_fetches_in_every_phase_is_lost_and_nobody_notices(rigs, road, end, fault):
    here = rigs.on(road)
    staged = here.staged()
    began = time.monotonic()
    with struck(here, SOURCE if end == "source" else staged.reader, fault):
        staged.check()
    assert time.monotonic() - began < NOTICED_S, "what a lost reader had in flight kept others waiting"
    here.check_baseline()


SLOW_BYTES_PER_S = {"shm": 4_000, "ray": 4_000, "grpc": 200_000}
"""Down: frames' headers, and blocks where they take the stream."""
SLOW_UP_BYTES_PER_S = 4_000
"""Acknowledgements; what is asked for again after it was evicted takes a second."""


@pytest.mark.parametrize("road", ["grpc", *(pytest.param(road, marks=pytest.mark.soak) for road in ("shm", "ray"))])
def test_a_slow_line_at_either_end_in_every_phase_is_no_failure(rigs, road):
    here = rigs.on(road)
    for end in ("source", "reader"):
        lost, staged = here.num_lost_sources, here.staged()
        if end == "source":
            here.proxy.bytes_per_s = SLOW_BYTES_PER_S[road]
        else:
            here.proxy.up_bytes_per_s = SLOW_UP_BYTES_PER_S
        for answer in staged.check():
            assert (answer.numbers["road"], answer.numbers["source_worker"]) == (road, SOURCE)
        assert here.num_lost_sources == lost, f"a slow {end} was taken for dead"
        here.check_baseline()


@pytest.mark.soak
@pytest.mark.parametrize("direction", ["down", "up", "both"])
@pytest.mark.parametrize("road", ROADS)
def test_a_line_that_stalls_in_every_phase_costs_no_token(rigs, road, direction):
    here = rigs.on(road)
    staged = here.staged()
    if direction in ("down", "both"):
        here.proxy.bytes_per_s = 0
    if direction in ("up", "both"):
        here.proxy.up_bytes_per_s = 0
    staged.check()
    here.check_baseline()


@pytest.mark.soak
def test_an_owner_of_objects_is_killed_fifty_times_while_they_are_read(rigs, monkeypatch):
    """T044: right after it has published blocks, at whatever instant that is of reading them."""
    monkeypatch.setattr("deploy.local.MAX_PAUSE_S", FIRST_PAUSE_S)
    here = rigs.on("ray")
    for k in range(50):
        published = here.num_served_blocks
        fetches = [here.ask_blocks(40) for _ in range(3)]
        wait_until(lambda before=published: here.num_served_blocks != before, 20, "blocks to be published")
        time.sleep(random.Random(k).uniform(0, 0.2))
        here.service.kill(SOURCE)
        began = time.monotonic()
        for one in fetches:
            one.checked()
        assert time.monotonic() - began < NOTICED_S
        here.check_baseline()


IN_TINY_SHARED_MEMORY = """
mount -t tmpfs -o size=64m tmpfs /dev/shm && head -c 61M /dev/zero > /dev/shm/full && exec "$@"
"""
RESTARTING_AT_ONCE = (
    f"import deploy.local; deploy.local.MAX_PAUSE_S = {FIRST_PAUSE_S}; from deploy.cli import main; main()"
)


@pytest.fixture
def tiny(model_directory, tmp_path) -> Iterator[str]:
    """The URL of a deployment that sees 64 MB of /dev/shm, 95 % full."""
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("a mount of its own for /dev/shm needs user namespaces")
    flags = ["--prefill=2", "--decode=2", "--port=0", "--transport=shm", "--kv-tokens=16000"]
    flags += ["--engine=sim", f"--sim-shape={made_shape(tmp_path)}", "--sim-accelerator=a100"]
    command = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        IN_TINY_SHARED_MEMORY,
        "sh",
        sys.executable,
        "-c",
        RESTARTING_AT_ONCE,
        "up",
    ]
    with (
        (tmp_path / "up.log").open("w") as log,
        subprocess.Popen(
            [*command, f"--model={model_directory}", *flags], stdout=subprocess.PIPE, stderr=log, text=True
        ) as up,
    ):
        try:
            assert up.stdout is not None
            line = next((line for line in up.stdout if "http://" in line), "")
            yield line[line.index("http://") :].split("/v1")[0].split()[0].rstrip("/")
        finally:
            up.terminate()


def pids_of(url: str) -> dict[str, int]:
    answer = httpx.get(f"{url}/health/ready", trust_env=False).json()
    return {one["name"]: one["pid"] for one in answer["workers"] if one["state"] == "ready"}


@pytest.mark.soak
def test_workers_killed_fifty_times_leave_nothing_in_a_shared_memory_that_is_almost_full(tiny):
    """T084: it is not used, so that there is room in it or not, and nothing of a dead one is left there."""
    random_ = random.Random(84)
    with crowd(tiny) as clients:
        for k in range(50):
            wait_until(lambda: len(pids_of(tiny)) == 4, 20, "all workers to be ready")
            bodies = [body_of(ids(800, ("tiny", k, j)), 3) for j in range(4)]
            answers = clients.ask_all(bodies)
            time.sleep(random_.uniform(0.05, 0.6))
            pids = pids_of(tiny)
            victim = random_.choice(sorted(pids))
            os.kill(pids[victim], signal.SIGKILL)
            for body, one in zip(bodies, answers, strict=True):
                answer = one.result(30)
                assert answer.tokens == {0: expected_of(body)}, (k, victim, answer)
            gone = pids[victim]
            wait_until(lambda gone=gone: gone not in pids_of(tiny).values(), 10, "its end to be seen")
        wait_until(lambda: len(pids_of(tiny)) == 4, 20, "all workers to be ready")
        assert answer.numbers["road"] == "shm"
        for pid in pids_of(tiny).values():
            assert os.listdir(f"/proc/{pid}/root/dev/shm") == ["full"]


# --------------------------------------------------------------------------------- a source that is a reader in its turn


async def warmed(here: Rig, tokens: list[int], holder: Source) -> FetchEndReason | None:
    """How the source ends with a chain for whose beginning it is sent to the holder; None if its stream is lost."""
    workers = (await asyncio.to_thread(here.service.http.get, "/health/ready")).json()["workers"]
    with contextlib.suppress(StreamEnded, TimeoutError):
        async with Peer(here.service) as peer, peer.stream("fetch", SOURCE) as stream:
            await stream.send(FetchOpen(workers[0]["model_id"], "uint8", tuple(tokens), warm=True, holders=(holder,)))
            end: FetchEnd = await receive_a(stream, FetchEnd)
            return end.reason
    return None


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["kill", "stop", "slow"])
@pytest.mark.parametrize("end", ["source", "reader"])
@pytest.mark.parametrize("phase", ["meeting", "reading"])
@pytest.mark.parametrize("road", ROADS)
def test_either_end_of_a_second_hop_is_lost_when_they_meet_or_read_and_nobody_notices(rigs, road, phase, end, fault):
    here = rigs.on(road)
    prompt = ids(SENT_BLOCKS * BLOCK + 5, ("hop", next(number)))
    holder = here.ask(prompt, 3).checked().numbers["decode_worker"]
    for _ in range(2):
        here.ask_blocks(QUEUED_BLOCKS).checked()  # the source keeps nothing of it
    with Proxy().running() as line, ThreadPoolExecutor(1) as pool:
        line.target = int(here.service.deployment.children[holder].details["address"].rpartition(":")[2])
        address = Source("holder", f"127.0.0.1:{line.port}")
        if phase == "meeting":
            line.bytes_per_s = 0
        else:
            assert asyncio.run(warmed(here, prompt[-BLOCK:], address)) is FetchEndReason.COMPLETE
        chain = pool.submit(asyncio.run, warmed(here, prompt[: SENT_BLOCKS * BLOCK], address))
        wait_until(lambda: here.num_fetching(SOURCE) == 1, 5, "the second hop")
        bystanders = [here.ask(ids(12, ("hop", next(number))), BYSTANDER_TOKENS) for _ in range(NUM_BYSTANDERS)]
        time.sleep(0.1)
        assert here.num_fetching(SOURCE) == 1
        if fault == "slow":
            line.bytes_per_s = SLOW_BYTES_PER_S[road] if end == "source" else None
            line.up_bytes_per_s = SLOW_UP_BYTES_PER_S if end == "reader" else None
            assert chain.result(30) is FetchEndReason.COMPLETE
        else:
            with struck(here, holder if end == "source" else SOURCE, fault):
                for one in bystanders:
                    one.checked()
                if end == "source":
                    assert chain.result(NOTICED_S) is FetchEndReason.COMPLETE, (
                        "what a holder does not deliver is computed"
                    )
            line.bytes_per_s = None
            chain.result(30)
        for one in bystanders:
            one.checked()
    here.check_baseline()
