"""Two routers over the same workers: either serves anything exactly, each sees the other's load, neither needs the other."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from router.idempotency import seed_of
from tests.processes.crowd import body_of, crowd
from tests.processes.service import Service, wait_until
from tests.processes.simulated import choices_of, expected_of, ids, sequences, simulated, states

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]
MAX_SEQUENCES = 16
NUM_KEYED = 120


class SecondRouter(Service):
    """A router of its own beside a deployment; asked like one."""

    def __init__(self, process: subprocess.Popen[str], url: str):
        self.process, self.url = process, url
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    @property
    def workers(self) -> set[str]:
        return {one["name"] for one in self.http.get("/health/ready").json()["workers"] if one["state"] == "ready"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def second_router(first: Service, model: Path, registry_port: int) -> Iterator[SecondRouter]:
    flags = [
        f"--model={model}",
        f"--secret-file={first.deployment.folder / 'secret'}",
        "--name=second",
        "--with-parent",
    ]
    ports = ["--port=0", "--grpc-port=0", f"--registry-port={registry_port}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "router", *flags, *ports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        router = SecondRouter(process, f"http://{json.loads(process.stdout.readline())['http']}")
        names = {name for name in first.deployment.children if name != "router"}
        wait_until(lambda: router.workers == names, 20, "all workers to join the second router, too")
        yield router
    finally:
        process.stdin.close()
        assert process.wait(10) == 0


@pytest.fixture(scope="module")
def both(model_directory) -> Iterator[tuple[Service, SecondRouter]]:
    port = free_port()
    joins = f"--router=127.0.0.1:{port}"
    extra = {"prefill": [joins], "decode": [joins, f"--max-sequences={MAX_SEQUENCES}"]}
    with (
        simulated(model_directory, num_prefill=1, num_decode=2, extra=extra) as first,
        second_router(first, model_directory, port) as second,
    ):
        yield first, second


@pytest.fixture
def pair(both) -> Iterator[tuple[Service, SecondRouter]]:
    """What a test kills is back before the next one."""
    first, second = both
    yield first, second
    names = {name for name in first.deployment.children if name != "router"}
    wait_until(lambda: is_there(first) and set(states(first)) == names, 20, "the first router to be back")
    first.wait_idle()
    second.wait_idle()


def is_there(router: Service) -> bool:
    try:
        return router.http.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_either_router_serves_anything_and_each_avoids_what_the_other_has_filled(pair):
    first, second = pair
    with crowd(first.url) as clients:
        mixed = [
            body_of(ids(30 + 50 * k, ("either", k)), 40, n=1 + k % 2, temperature=k % 3 / 2, seed=k) for k in range(12)
        ]
        answers = [(body, clients.ask(body, url)) for body in mixed for url in (first.url, second.url)]
        for body, one in answers:
            assert one.result(30).tokens == choices_of(body)
        for filler, other in ((first, second), (second, first)):
            other.wait_idle()
            long = body_of(ids(100, ("filler", filler.url)), 150, n=MAX_SEQUENCES)
            filling = clients.ask(long, filler.url)
            full = wait_full(other, 1)
            bodies = [body_of(ids(64, ("beside", filler.url, k)), 10) for k in range(10)]
            for body, one in zip(bodies, clients.ask_all(bodies, url=other.url), strict=True):
                answer = one.result(20)
                assert answer.tokens == {0: expected_of(body)}
                assert {answer.numbers["decode_worker"]} == {"decode-1", "decode-2"} - full
            assert not filling.done(), "what filled the worker was over too soon"
            assert filling.result(30).tokens == choices_of(long)


def wait_full(router: Service, count: int) -> set[str]:
    """The decode workers that are full, as this router sees them."""
    names = ("decode-1", "decode-2")

    def full() -> set[str]:
        found = {name for name in names if sequences(router, name) >= MAX_SEQUENCES}
        return found if len(found) == count else set()

    return wait_until(full, 10, f"{count} workers to be full")


def test_a_request_waits_at_one_router_while_the_other_has_filled_every_worker(pair):
    first, second = pair
    with crowd(first.url) as clients:
        fillers = [body_of(ids(50, ("all", k)), 120, n=MAX_SEQUENCES) for k in range(2)]
        filling = clients.ask_all(fillers)
        wait_full(second, 2)
        body = body_of(ids(40, "patient"), 10)
        waiting = clients.ask(body, second.url)
        wait_until(lambda: second.total("kvferry_requests", phase="queued") == 1, 2, "it to wait")
        assert not any(one.done() for one in filling)
        assert waiting.result(30).tokens == {0: expected_of(body)}
        assert waiting.result().ended_s > min(one.result(30).ended_s for one in filling) - 0.5


def test_a_router_that_is_killed_frees_what_it_had_and_leaves_the_others_streams_exact(pair):
    first, second = pair
    with crowd(first.url) as clients:
        theirs = clients.ask_all([body_of(ids(60, ("dying", k)), 2000) for k in range(8)])
        bodies = [body_of(ids(60, ("staying", k)), 150) for k in range(6)]
        ours = clients.ask_all(bodies, url=second.url)
        wait_until(lambda: all_sequences(second) == 14, 10, "all to run")
        first.kill("router")
        wait_until(lambda: all_sequences(second) == 6, 4, "the dead router's to be freed")
        for body, one in zip(bodies, ours, strict=True):
            answer = one.result(30)
            assert answer.tokens == {0: expected_of(body)}
            assert answer.longest_gap_s < 1.5
            assert answer.numbers["attempts"] == 1
        assert not any(one.result(5).is_whole for one in theirs)
        second.wait_idle()


def all_sequences(router: Service) -> float:
    return sum(sequences(router, name) for name in ("decode-1", "decode-2"))


def test_a_client_that_comes_again_to_the_other_router_with_its_key_gets_the_same_tokens(pair):
    first, second = pair
    body = body_of(ids(80, "key"), NUM_KEYED, temperature=1, n=2)
    with crowd(first.url) as clients:
        began = clients.ask(body, idempotency_key="order 66")
        wait_until(lambda: first.total("kvferry_requests", phase="decoding") == 1, 10, "it to decode")
        time.sleep(0.3)
        first.kill("router")
        cut = began.result(10)
        assert not cut.is_whole
        assert 5 < len(cut.tokens[0]) < NUM_KEYED
        whole = clients.ask(body, second.url, idempotency_key="order 66").result(30)
        other = clients.ask(body, second.url, idempotency_key="order 67").result(30)
    truth = choices_of({**body, "seed": seed_of("order 66", b"")})
    assert whole.tokens == truth
    assert cut.tokens == {k: truth[k][: len(tokens)] for k, tokens in cut.tokens.items()}
    assert other.tokens[0] != truth[0]
