"""Bad input at the front doors (T011, T043, T050, T076 to T079), and what is asked of a service that cannot answer (T046)."""

import http.client
import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvferry.rpc.v1 import generation_pb2, generation_pb2_grpc
from tests.processes.service import completion_body

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]
CONTEXT = 2048
USER = [{"role": "user", "content": "hi"}]


def ids(length: int) -> list[int]:
    return [random.Random(k).randrange(100, 40_000) for k in range(length)]


def refused(service, path, body, status=400, param=...):
    began = time.monotonic()
    sent = {"content": body} if isinstance(body, (bytes, str)) else {"json": body}
    response = service.http.post(path, headers={"content-type": "application/json"}, **sent)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not ...:
        assert error["param"] == param
    assert time.monotonic() - began < 2
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("over", [1, 9, 5000])
def test_an_over_long_prompt_is_refused_naming_limit_and_count_before_any_worker_hears_of_it(service, stream, over):
    opened = service.total("kvferry_worker_events_total", name="requests_opened")
    error = refused(service, "/v1/completions", {"prompt": ids(CONTEXT + over), "stream": stream}, param="prompt")
    assert str(CONTEXT) in error["message"]
    assert str(CONTEXT + over) in error["message"]
    assert error["code"] == "context_length_exceeded"
    text = {"messages": [{"role": "user", "content": "word " * (CONTEXT + over)}], "stream": stream}
    assert str(CONTEXT) in refused(service, "/v1/chat/completions", text, param="messages")["message"]
    time.sleep(1.2)
    assert service.total("kvferry_worker_events_total", name="requests_opened") == opened


def test_a_prompt_that_fills_the_context_ends_at_the_wall(service, reference):
    for length in (CONTEXT - 1, CONTEXT):
        answer = service.complete(ids(length), 50)
        choice = answer["choices"][0]
        assert len(choice["token_ids"]) == CONTEXT + 1 - length
        assert choice["finish_reason"] == "length"
    reference.check(ids(CONTEXT), choice["token_ids"], 1)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [[]]}, "prompt"),
        ("completions", {"prompt": [49152]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"prompt": "x", "max_tokens": 2**31}, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": CONTEXT + 1}, "max_tokens"),
        ("completions", {"prompt": "x", "n": 100_000}, "n"),
        ("completions", {"prompt": "x", "logit_bias": {"999999": 5}}, "logit_bias"),
        ("completions", {"prompt": "x", "stop_token_ids": [10**10]}, "stop_token_ids"),
        ("completions", {"prompt": "a\ud800"}, "prompt"),
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{}]}, "messages[0].role"),
        ("chat/completions", {"messages": USER, "temperature": "hot"}, "temperature"),
        ("chat/completions", {"messages": USER, "tools": [{"type": "function"}]}, "tools"),
        ("chat/completions", {"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", {"messages": USER, "stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_bad_requests_are_refused_naming_the_field(service, path, body, param):
    refused(service, f"/v1/{path}", json.dumps(body), param=param)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xff", b"[" * 100_000, b'{"prompt": NaN}'])
def test_bad_json_is_refused(service, raw):
    refused(service, "/v1/completions", raw)


def test_unknown_models_paths_methods_and_types_have_openais_error_body(service):
    refused(service, "/v1/completions", {"model": "gpt-9", "prompt": "x"}, 404, "model")
    refused(service, "/v1/nothing", {}, 404)
    assert service.http.get("/v1/models/gpt-9").json()["error"]["code"] == "model_not_found"
    response = service.http.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["message"]
    response = service.http.post("/v1/completions", content="x", headers={"content-type": "text/plain"})
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]
    big = b'{"prompt": "' + b"x" * (9 * 1024 * 1024) + b'"}'
    assert (
        service.http.post("/v1/completions", content=big, headers={"content-type": "application/json"}).status_code
        == 413
    )


def test_harmless_fields_are_accepted_and_limits_have_their_defaults(service):
    answer = service.complete(
        "hi", 3, user="u", metadata={"a": "b"}, store=False, parallel_tool_calls=True, logit_bias={}, unknown_field=1,
        kv_transfer_params={"remote_host": "127.0.0.1", "remote_port": 1, "remote_block_ids": [1]},
    )  # fmt: skip
    assert answer["usage"]["completion_tokens"] == 3
    for fields in ({}, {"max_tokens": None}):
        body = {**completion_body("hi", 1), **fields}
        if not fields:
            del body["max_tokens"]
        assert service.http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 16
    chat = {"messages": USER, "max_completion_tokens": 4, "ignore_eos": True}
    assert service.http.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] == 4
    chat = {"messages": USER, "max_tokens": 4, "max_completion_tokens": 5}
    refused(service, "/v1/chat/completions", chat, param="max_tokens")


def test_good_streams_go_on_exactly_beside_bad_requests(service, reference):
    prompt = ids(30)
    with service.streaming(prompt, 24) as events:
        tokens = []
        for number, chunk in enumerate(events):
            tokens += chunk["choices"][0]["token_ids"]
            if number < 5:
                refused(service, "/v1/completions", {"prompt": [49152 + number]})
    reference.check(prompt, tokens, 24)


def test_the_models_and_health_routes(service):
    (model,) = service.http.get("/v1/models").json()["data"]
    assert model["id"] == "SmolLM2-135M-Instruct"
    assert service.http.get(f"/v1/models/{model['id']}").json() == model
    assert service.http.get("/health").json() == {"status": "alive"}
    assert service.http.get("/health/ready").json()["status"] == "ready"


@pytest.mark.parametrize(
    ("fields", "code", "named"),
    [
        (dict(), "INVALID_ARGUMENT", "text, chat and token_ids"),
        (dict(text=""), "INVALID_ARGUMENT", "text"),
        (dict(token_ids=generation_pb2.TokenIds(ids=[49152])), "INVALID_ARGUMENT", "token_ids"),
        (dict(token_ids=generation_pb2.TokenIds(ids=ids(CONTEXT + 1))), "INVALID_ARGUMENT", "2049"),
        (dict(text="x", temperature=float("nan")), "INVALID_ARGUMENT", "temperature"),
        (dict(text="x", top_p=0.0), "INVALID_ARGUMENT", "top_p"),
        (dict(text="x", n=0), "INVALID_ARGUMENT", "n"),
        (dict(text="x", model="other"), "NOT_FOUND", "other"),
        (dict(chat=generation_pb2.Chat()), "INVALID_ARGUMENT", "messages"),
        (
            dict(chat=generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="tool")])),
            "INVALID_ARGUMENT",
            "role",
        ),
    ],
)
def test_the_grpc_door_names_what_is_wrong(service, fields, code, named):
    with grpc.insecure_channel(service.grpc) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as error:
            list(stub.Generate(generation_pb2.GenerateRequest(**fields)))
    assert error.value.code().name == code
    assert named in error.value.details()


def test_the_grpc_door_tokenises_tells_its_model_and_is_described(service, text):
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with grpc.insecure_channel(service.grpc) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        assert list(stub.Tokenize(generation_pb2.TokenizeRequest(text="안녕")).token_ids) == text.encode("안녕")
        model = stub.GetModel(generation_pb2.GetModelRequest())
        assert (model.model, model.context_tokens, len(model.members)) == ("SmolLM2-135M-Instruct", CONTEXT, 2)
        chat = generation_pb2.Chat(
            messages=[generation_pb2.ChatMessage(role="user", content="capital of South Korea?")]
        )
        answer = list(stub.Generate(generation_pb2.GenerateRequest(chat=chat, temperature=0, max_tokens=40)))
        assert "Seoul" in "".join(one.text for one in answer)
        assert answer[-1].summary.instants_us["first_token"] > 0
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        (response,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([listing]))
        names = {one.name for one in response.list_services_response.service}
        assert "kvferry.v1.GenerationService" in names
        assert not any("Fetch" in name or "Decode" in name or "Registry" in name for name in names)


def test_a_pool_that_cannot_hold_a_request_refuses_it_at_once_and_serves_small_ones(model_directory, either):
    start, truth = either
    with start(model_directory, kv_tokens=320, extra={"router": ["--max-queued=2"]}) as small:
        began = time.monotonic()
        for body in ({"prompt": ids(400)}, {"prompt": ids(321), "stream": True}, {"prompt": [1], "max_tokens": 321}):
            assert "320" in refused(small, "/v1/completions", body)["message"]
        assert time.monotonic() - began < 2
        for length in (5, 50, 200):
            truth.check(ids(length), small.tokens(ids(length), 4), 4)
        body = completion_body(ids(200), 60)
        with ThreadPoolExecutor(8) as pool:  # one runs, two wait, the others are told to come back
            responses = list(pool.map(lambda _: small.http.post("/v1/completions", json=body), range(8)))
        assert {response.status_code for response in responses} == {200, 429}
        for response in responses:
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
                assert "decode pool" in response.json()["error"]["message"]
        small.wait_idle()


def test_during_start_up_and_without_workers_the_answer_is_503_and_says_which_pool(model_directory):
    router = subprocess.Popen(
        [sys.executable, "-m", "router", f"--model={model_directory}", "--port=0", "--grpc-port=0", "--registry-port=0", "--with-parent"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        address = json.loads(router.stdout.readline())["http"]
        connection = http.client.HTTPConnection(address, timeout=10)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "x"}), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 503
        assert response.headers["retry-after"]
        assert "decode pool" in json.loads(response.read())["error"]["message"]
        for path, status in (("/health", 200), ("/health/ready", 503), ("/v1/models", 200), ("/metrics", 200)):
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
            assert response.status == status, path
    finally:
        router.stdin.close()
        assert router.wait(10) == 0
