"""Workers of either kind are stopped and go on: streams are exact, what a stopped one says late changes nothing, it heals (T041)."""

import itertools
import time

import pytest

from tests.processes.crowd import Crowd, body_of, crowd
from tests.processes.service import Service, wait_until
from tests.processes.simulated import (
    counted,
    event,
    expected_of,
    ids,
    sequences,
    simulated,
    states,
    stopped,
    wait_streaming,
)

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]
SILENCE_S = 2.0
NOTICED_S = SILENCE_S + 3.0
FLAGS = [f"--silence-s={SILENCE_S:g}"]
EXTRA = {"router": FLAGS, "prefill": FLAGS, "decode": FLAGS}
number = itertools.count()


def asked(clients: Crowd, count: int, length: int, num_tokens: int):
    bodies = [body_of(ids(length + k, ("stop", next(number))), num_tokens) for k in range(count)]
    return bodies, clients.ask_all(bodies)


def check(bodies, answers):
    for body, answer in zip(bodies, [one.result(60) for one in answers], strict=True):
        assert (answer.status, answer.error, answer.is_whole) == (200, None, True), answer
        assert answer.tokens == {0: expected_of(body)}, answer.numbers


def ready_ones(service: Service) -> set[str]:
    return {name for name, state in states(service).items() if state == "ready"}


def stop_one_of_each(service: Service, clients: Crowd) -> float:
    """Under streams that decode and prompts that are handed over. Returns how long a stream stood still at most."""
    streams = asked(clients, 12, 40, 220)
    wait_streaming(service, 12)
    hand_offs = asked(clients, 8, 3000, 20)
    time.sleep(0.3)
    decode = max(("decode-1", "decode-2"), key=lambda name: sequences(service, name))
    prefill = max(("prefill-1", "prefill-2"), key=lambda name: service.total("kvferry_worker_active", worker=name))
    losses = event(service, "worker_losses")
    with stopped(service, decode), stopped(service, prefill):
        wait_until(lambda: {decode, prefill}.isdisjoint(ready_ones(service)), NOTICED_S, "readiness to show it")
        assert service.http.get("/health/ready").status_code == 200
        check(*asked(clients, 4, 200, 20))  # new ones go elsewhere
        check(*streams)
        check(*hand_offs)
    assert event(service, "worker_losses") > losses, "the streams were over before their worker was stopped"
    wait_until(lambda: {decode, prefill} <= ready_ones(service), 10, "them to heal")
    wait_until(lambda: not sequences(service, decode), 5, "it to drop what went on elsewhere")
    return max(one.result().longest_gap_s for one in streams[1])


def is_used_again(service: Service, clients: Crowd) -> None:
    """Every worker gets work, and does it right."""
    names = ("prefill-1", "prefill-2")
    before = {name: counted(service, "computed_tokens", worker=name) for name in names}
    for _ in range(3):
        check(*asked(clients, 8, 800, 10))
    service.wait_idle()
    wait_until(
        lambda: all(counted(service, "computed_tokens", worker=name) > before[name] for name in names),
        3,
        "both to work",
    )


@pytest.mark.parametrize("num_rigs", [1, pytest.param(5, marks=pytest.mark.soak)])
def test_stopped_workers_cost_no_token_and_heal(model_directory, num_rigs):
    """Four stops in each, with more prompts on the stopped workers than may be tried again for other reasons."""
    for _ in range(num_rigs):
        with (
            simulated(model_directory, num_prefill=2, num_decode=2, extra=EXTRA) as service,
            crowd(service.url) as clients,
        ):
            check(*asked(clients, 8, 100, 10))
            gaps: list[float] = []
            for _ in range(2):
                gaps.append(stop_one_of_each(service, clients))
                service.wait_idle()
            is_used_again(service, clients)
            late = counted(service, "late_tokens")
            assert late, "what a stopped decode worker had still to say was not told from what it said in time"
            print(f"4 stops: longest gap {max(gaps):.3f} s; {late:g} late tokens")


def test_a_stop_shorter_than_silence_moves_nothing(model_directory):
    with simulated(model_directory, num_prefill=1, num_decode=2) as service, crowd(service.url) as clients:
        bodies, answers = asked(clients, 8, 40, 100)
        wait_streaming(service, 8)
        for name in ("decode-1", "decode-2", "prefill-1"):
            with stopped(service, name):
                time.sleep(0.4)
        check(bodies, answers)
        assert event(service, "worker_losses") == 0
        assert all(one.result().numbers["attempts"] == 1 for one in answers)
        service.wait_idle()
