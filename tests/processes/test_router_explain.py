"""Why a request was placed where it was, for whoever asks: over HTTP, whole and streamed, and over gRPC."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvferry.rpc.v1 import generation_pb2, generation_pb2_grpc
from tests.processes.crowd import Crowd, body_of, crowd
from tests.processes.service import Service
from tests.processes.simulated import expected_of, ids, simulated

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]
PREDICTED = {"waiting", "computing", "moving", "tail", "ttft", "tpot"}


@pytest.fixture(scope="module")
def service(model_directory) -> Iterator[Service]:
    with simulated(model_directory, num_prefill=2, num_decode=2) as running:
        yield running


@pytest.fixture
def clients(service) -> Iterator[Crowd]:
    with crowd(service.url) as running:
        yield running


def ask_grpc(service: Service, body: dict[str, Any], explain: bool) -> generation_pb2.Summary:
    with grpc.insecure_channel(service.grpc) as channel:
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=body["prompt"]),
            max_tokens=body["max_tokens"],
            temperature=0,
            ignore_eos=True,
            explain=explain,
        )
        pieces = list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request))
    assert [token for piece in pieces for token in piece.token_ids] == expected_of(body)
    return pieces[-1].summary


def explained(service: Service, clients: Crowd, door: str, body: dict[str, Any]) -> dict[str, Any]:
    if door == "grpc":
        return json.loads(ask_grpc(service, body, explain=True).explanation)
    answer = clients.ask({**body, "stream": door == "stream"}, x_kvferry_explain="1").result(20)
    assert answer.tokens == {0: expected_of(body)}
    assert answer.numbers["explain"]["decode"] == answer.numbers["decode_worker"]
    return answer.numbers["explain"]


DOORS = ("whole", "stream", "grpc")


def without_options(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "stream_options"}


def body_for(door: str, seed: object, length: int = 640) -> dict[str, Any]:
    body = body_of(ids(length, (door, seed)), 12)
    return without_options(body) if door == "whole" else body


@pytest.mark.parametrize("door", DOORS)
def test_the_explanation_has_candidates_predictions_the_reason_and_what_came_of_it(service, clients, door):
    for turn in range(3):  # until the workers have been measured
        explained(service, clients, door, body_for(door, turn))
    found = explained(service, clients, door, body_for(door, "measured"))
    assert found["policy"] == "cost"
    assert found["sources"][0] in ("prefill-1", "prefill-2")
    assert (found["missing_tokens"], found["computes_here"]) == (624, False)
    assert found["decided_by"] == "fetching costs less"
    assert found["keeps_slos"] is True
    predicted = found["predicted_ms"]
    assert set(predicted) == PREDICTED
    assert all(value >= 0 for value in predicted.values())
    parts = predicted["waiting"] + max(predicted["computing"], predicted["moving"]) + predicted["tail"]
    assert predicted["ttft"] == pytest.approx(parts, abs=0.01)
    assert found["prediction_error_ms"] == pytest.approx(found["actual_ttft_ms"] - predicted["ttft"], abs=0.01)
    print(f"{door}: predicted {predicted['ttft']:.1f} ms, actual {found['actual_ttft_ms']:.1f} ms")
    assert 10 < found["actual_ttft_ms"] < 2000
    assert 10 < predicted["ttft"] < 2000
    by_role = {role: [one for one in found["candidates"] if one["role"] == role] for role in ("decode", "prefill")}
    assert {one["worker"] for one in by_role["decode"]} == {"decode-1", "decode-2"}
    assert {one["worker"] for one in by_role["prefill"]} == {"prefill-1", "prefill-2"}
    for one in found["candidates"]:
        assert one["ttft_ms"] > 0
        assert one["cost_ms"] > 0
        assert 0 < one["score"] <= 1
    assert found["decode"] in {one["worker"] for one in by_role["decode"] if one["score"] * 1.02 >= 1}


@pytest.mark.parametrize("door", DOORS)
def test_what_is_held_already_is_seen_and_decides(service, clients, door):
    body = body_for(door, "twice")
    first = explained(service, clients, door, body)
    second = explained(service, clients, door, body)
    assert second["decode"] == first["decode"]
    assert second["missing_tokens"] == 0
    assert (second["computes_here"], second["decided_by"]) == (True, "nothing is missing")
    (holder,) = [one for one in second["candidates"] if one["worker"] == first["decode"]]
    assert holder["cached_tokens"] >= 624
    assert second["actual_ttft_ms"] < first["actual_ttft_ms"]


@pytest.mark.parametrize("door", DOORS)
def test_who_does_not_ask_is_told_nothing(service, clients, door):
    body = body_for(door, "silent", 100)
    if door == "grpc":
        assert ask_grpc(service, body, explain=False).explanation == ""
    else:
        answer = clients.ask({**body, "stream": door == "stream"}).result(20)
        assert answer.numbers["attempts"] == 1
        assert "explain" not in answer.numbers


def test_a_time_that_cannot_be_kept_is_said_and_a_wrong_one_refused(service, clients):
    body = body_of(ids(4000, "impossible"), 4)
    answer = clients.ask(body, x_kvferry_explain="true", x_slo_ttft_ms="1", x_slo_tpot_ms="1").result(20)
    assert answer.tokens == {0: expected_of(body)}
    assert answer.numbers["explain"]["keeps_slos"] is False
    for bad in ("0", "-3", "soon", "nan"):
        refused = clients.ask(body, x_slo_ttft_ms=bad).result(5)
        assert refused.status == 400
        assert refused.error is not None
        assert refused.error["param"] == "x-slo-ttft-ms"
