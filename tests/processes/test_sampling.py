"""Sampling and log-probabilities of the real model through both front doors (T051, T059, T061 to T066, T068)."""

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import openai
import pytest
import torch

from kvferry.rpc.v1 import generation_pb2, generation_pb2_grpc
from tests.processes.service import serving

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]
COPY = "Repeat exactly.\nText: 안녕하세요 漢字 é\nText: 안녕하세요 漢字 é\nText:"
PLAIN = "The four seasons of the year are"


def reference_logprobs(reference, tokens):
    """[tokens, vocabulary]: of what follows each."""
    return torch.log_softmax(reference._reference.logits(tokens).double(), -1).numpy()


def strict_json(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def numbers_in(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for one in value for number in numbers_in(one)]
    return [value] if isinstance(value, float) else []


# --------------------------------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("max_tokens", [1, 2, 20])
def test_chat_log_probabilities_are_of_the_emitted_tokens_and_the_references(service, text, reference, max_tokens):
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "What is the capital of South Korea?"}]
    asked = dict(
        model="SmolLM2-135M-Instruct", messages=messages, max_tokens=max_tokens, temperature=0, logprobs=True,
        top_logprobs=5, extra_body=dict(return_token_ids=True),
    )  # fmt: skip
    whole = client.chat.completions.create(**asked)
    (choice,) = whole.choices
    entries = choice.logprobs.content
    prompt = text.encode_chat(messages)
    answer = whole.model_extra["choices"][0]["token_ids"] if "choices" in whole.model_extra else choice.token_ids
    assert len(entries) == whole.usage.completion_tokens == len(answer)
    expected = reference_logprobs(reference, [*prompt, *answer])[len(prompt) - 1 :]
    for entry, token, row in zip(entries, answer, expected, strict=False):
        assert entry.logprob == pytest.approx(row[token], abs=1e-3)
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(np.sort(row)[::-1][:5].tolist(), abs=1e-3)
        assert entry.top_logprobs[0].token == entry.token, "greedy"
    joined = bytes(byte for entry in entries for byte in entry.bytes or [])
    assert joined.decode(errors="replace") == choice.message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    streamed = [entry for chunk in chunks for one in chunk.choices if one.logprobs for entry in one.logprobs.content]
    assert streamed == entries


def test_completion_log_probabilities_join_up_with_the_text(service, reference, text):
    for prompt in (PLAIN, COPY):
        for max_tokens in (1, 7, 20):
            answer = service.complete(prompt, max_tokens, logprobs=5)
            (choice,) = answer["choices"]
            found, ids = choice["logprobs"], choice["token_ids"]
            assert {len(part) for part in found.values()} == {max_tokens}
            encoded = text.encode(prompt)
            expected = reference_logprobs(reference, [*encoded, *ids])[len(encoded) - 1 : -1]
            for k, token in enumerate(ids):
                assert found["token_logprobs"][k] == pytest.approx(expected[k][token], abs=1e-3)
                assert 5 <= len(found["top_logprobs"][k]) <= 6
                assert max(found["top_logprobs"][k].values()) == found["token_logprobs"][k]
                assert found["text_offset"][k] == len(text.decode(ids[:k]).rstrip("\ufffd"))
            with service.streaming(prompt, max_tokens, logprobs=5) as events:
                parts = [one["logprobs"] for chunk in events for one in chunk["choices"]]
            assert {name: [value for part in parts for value in part[name]] for name in found} == found


def test_the_raw_bytes_of_split_characters_are_told(service, text):
    """T068: at whatever token the limit falls."""
    for limit in range(1, 26, 4):
        body = {
            "messages": [{"role": "user", "content": COPY}], "max_tokens": limit, "temperature": 0, "logprobs": True,
            "return_token_ids": True, "ignore_eos": True,
        }  # fmt: skip
        (choice,) = service.http.post("/v1/chat/completions", json=body).json()["choices"]
        entries = choice["logprobs"]["content"]
        assert len(entries) == len(choice["token_ids"]) == limit
        raw = bytes(byte for entry in entries for byte in entry["bytes"] or [])
        assert raw.decode(errors="replace") == choice["message"]["content"]


def test_an_echo_has_the_prompts_log_probabilities(service, reference, text):
    """T064, also with its blocks in every cache."""
    ids = text.encode(PLAIN * 12)
    expected = reference_logprobs(reference, ids)
    service.tokens(ids, 1)
    for max_tokens in (0, 5):
        answer = service.complete(ids, max_tokens, echo=True, logprobs=1)
        (choice,) = answer["choices"]
        found = choice["logprobs"]
        assert choice["text"].startswith(PLAIN * 12)
        assert answer["usage"]["completion_tokens"] == max_tokens == len(choice["token_ids"])
        assert len(found["tokens"]) == len(ids) + max_tokens
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        for k in range(1, len(ids)):
            assert found["token_logprobs"][k] == pytest.approx(expected[k - 1][ids[k]], abs=1e-3)
        assert "".join(found["tokens"][: len(ids)]) == PLAIN * 12
        for offset, token in zip(found["text_offset"], found["tokens"], strict=True):
            assert choice["text"][offset:].startswith(token)
        with service.streaming(ids, max_tokens, echo=True, logprobs=1) as events:
            pieces = [one for chunk in events for one in chunk["choices"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [value for piece in pieces for value in piece["logprobs"]["token_logprobs"]] == found["token_logprobs"]


def test_prompt_log_probabilities_of_a_chat(service, text):
    body = {"messages": [{"role": "user", "content": "안녕"}], "max_tokens": 2, "prompt_logprobs": 2}
    answer = strict_json(service.http.post("/v1/chat/completions", json=body).text)
    ids = text.encode_chat([{"role": "user", "content": "안녕"}])
    places = answer["prompt_logprobs"]
    assert len(places) == len(ids)
    assert places[0] is None
    for token, place in zip(ids[1:], places[1:], strict=True):
        assert 2 <= len(place) <= 3
        assert place[str(token)]["rank"] >= 1
    refused = service.http.post("/v1/chat/completions", json={**body, "stream": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize(
    "fields",
    [dict(top_k=1), dict(top_p=0.01), dict(logit_bias={str(token): -100 for token in range(1000)}), dict(temperature=1e-4),
     dict(min_p=1.0), dict(repetition_penalty=10.0)],
)  # fmt: skip
def test_every_number_of_an_answer_is_finite_json(service, fields):
    """T065."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "logprobs": True, "top_logprobs": 20}
    body = {"temperature": 1.0, "ignore_eos": True, **body, **fields}
    response = service.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    answer = strict_json(response.text)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == 6
    numbers = numbers_in(entries)
    assert len(numbers) == 6 * 21
    assert np.isfinite(numbers).all()


# -------------------------------------------------------------------------------------------------------------- choosing


def kept(probabilities, limits):
    """What a full sort keeps of them: min_p, then top_k, then top_p."""
    order = np.argsort(-probabilities)
    order = order[probabilities[order] >= limits.get("min_p", 0) * probabilities.max()]
    order = order[: limits.get("top_k", len(order))]
    before = np.cumsum(probabilities[order]) - probabilities[order]
    order = order[before < limits.get("top_p", 1) * probabilities[order].sum()]
    found = np.zeros_like(probabilities)
    found[order] = probabilities[order] / probabilities[order].sum()
    return found


@pytest.mark.parametrize(
    ("temperature", "limits"),
    [(1.0, {}), (0.6, dict(top_p=0.6)), (2.0, dict(top_k=12)), (1.5, dict(min_p=0.05))],
    ids=str,
)
def test_first_tokens_follow_the_references_probabilities(service, reference, text, temperature, limits):
    """T063: 240 draws, of the likeliest tokens and all others together."""
    prompt = text.encode("My favourite colour is")
    logprobs = reference_logprobs(reference, prompt)[-1] / temperature
    probabilities = kept(np.exp(logprobs - np.logaddexp.reduce(logprobs)), limits)
    likeliest = np.argsort(-probabilities)[:6]
    drawn = []
    for first in range(0, 240, 16):
        answer = service.complete(prompt, 1, n=16, temperature=temperature, seed=first, **limits)
        drawn += [choice["token_ids"][0] for choice in answer["choices"]]
    assert all(probabilities[drawn] > 0)
    expected = np.array([*probabilities[likeliest], 1 - probabilities[likeliest].sum()]) * len(drawn)
    counts = [sum(token == one for token in drawn) for one in likeliest]
    counts.append(len(drawn) - sum(counts))
    is_likely = expected > 1e-6
    found = (np.array(counts)[is_likely] - expected[is_likely]) ** 2 / expected[is_likely]
    assert float(found.sum()) < 22.5  # 99.9 % of 6 degrees of freedom


def test_low_temperatures_are_greedy(service):
    greedy = service.tokens(PLAIN, 12)
    assert service.tokens(PLAIN, 12, temperature=1e-6, seed=3) == greedy
    assert service.tokens(PLAIN, 12, temperature=2, top_k=1, seed=3) == greedy
    assert service.tokens(PLAIN, 12, temperature=1, min_p=1.0, seed=3) == greedy


def test_the_minimum_of_tokens_holds_for_stop_tokens_and_stop_texts(service, text):
    """T061."""
    first = service.tokens(PLAIN, 1)[0]
    stopped = service.complete(PLAIN, 20, stop_token_ids=[first])["choices"][0]
    assert (stopped["token_ids"], stopped["finish_reason"]) == ([first], "stop")
    forced = service.complete(PLAIN, 20, stop_token_ids=[first], min_tokens=10)["choices"][0]
    assert first not in forced["token_ids"][:10]
    assert len(forced["token_ids"]) >= 10
    whole = service.complete(PLAIN, 20)["choices"][0]
    word = whole["text"].split()[0]
    assert len(service.tokens(PLAIN, 20, stop=[word])) < 10
    assert len(service.tokens(PLAIN, 20, stop=[word], min_tokens=10)) >= 10
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 5, "n": 2, "min_tokens": 5}
    answer = service.http.post("/v1/chat/completions", json={**body, "max_tokens": 5}).json()
    assert answer["usage"]["completion_tokens"] == 10


def test_bias_and_penalties_change_what_is_chosen_as_they_do_alone(service, text, reference):
    prompt = text.encode("one two one two one two one two one")
    plain = service.tokens(prompt, 8)
    best = plain[0]
    assert service.tokens(prompt, 8, logit_bias={str(best): -100})[0] != best
    forced = text.encode(" banana")[0]
    assert service.tokens(prompt, 3, logit_bias={str(forced): 100}) == [forced] * 3
    logits = reference._reference.logits(prompt)[-1].double().numpy()
    seen = np.array(sorted(set(prompt)))
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.8, logits[seen] * 1.8)
    assert service.tokens(prompt, 1, repetition_penalty=1.8) == [int(logits.argmax())]
    repeating = service.tokens(prompt, 30)
    assert len(set(service.tokens(prompt, 30, presence_penalty=2.0, frequency_penalty=2.0))) > len(set(repeating))


@pytest.mark.parametrize(
    ("fields", "param"),
    [(dict(logit_bias={"49152": 5}), "logit_bias"), (dict(logit_bias={"abc": 1}), "logit_bias"),
     (dict(stop_token_ids=[49152]), "stop_token_ids"), (dict(min_tokens=17), "min_tokens"),
     (dict(top_logprobs=2), "top_logprobs")],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(service, fields, param):
    path, body = "/v1/completions", {"prompt": "x", "max_tokens": 16, **fields}
    if param == "top_logprobs":
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **fields}
    response = service.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_grpc_has_the_same_sampling_and_log_probabilities(service, text):
    ids = text.encode(PLAIN)
    whole = service.complete(ids, 6, logprobs=3, repetition_penalty=1.2, min_p=0.01, prompt_logprobs=0)
    (choice,) = whole["choices"]
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=ids), max_tokens=6, temperature=0, ignore_eos=True, repetition_penalty=1.2,
        min_p=0.01, num_logprobs=3, num_prompt_logprobs=0,
    )  # fmt: skip
    with grpc.insecure_channel(service.grpc) as channel:
        pieces = list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request))
        bad = generation_pb2.GenerateRequest(text="x", num_logprobs=21)
        with pytest.raises(grpc.RpcError) as refused:
            list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(bad))
    assert "num_logprobs" in refused.value.details()
    assert [token for piece in pieces for token in piece.token_ids] == choice["token_ids"]
    logprobs = [one for piece in pieces for one in piece.logprobs]
    assert [one.logprob for one in logprobs] == choice["logprobs"]["token_logprobs"]
    assert all(len(one.top) == 3 for one in logprobs)
    prompt = [one.logprob for piece in pieces for one in piece.prompt_logprobs]
    assert prompt == [
        place[str(token)]["logprob"] for token, place in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
    ]


# ------------------------------------------------------------------------------------------------------------ preemption

CASES = [
    dict(),
    dict(temperature=1.0, seed=11),
    dict(temperature=0.9, seed=12, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
    dict(temperature=1.0, seed=13, logprobs=2),
    dict(temperature=0.7, seed=14, top_p=0.9, min_p=0.02, stop=["ing"]),
    dict(temperature=1.0, seed=15, n=2, echo=True, logprobs=0),
]


def answers_of(service):
    def ask(case):
        number, fields = case
        body = {"prompt": f"{number}. {PLAIN * 3}", "max_tokens": 120, "ignore_eos": True, "return_token_ids": True}
        answer = service.http.post("/v1/completions", json={"temperature": 0, **body, **fields}).json()
        return [{**choice, "usage": answer["usage"]["completion_tokens"]} for choice in answer["choices"]]

    with ThreadPoolExecutor(len(CASES)) as pool:
        return list(pool.map(ask, enumerate(CASES)))


def test_preemption_changes_nothing(service, model_directory):
    """T051: a pool that cannot hold them all gives the same ids, log-probabilities, texts and usage."""
    expected = answers_of(service)
    with serving(model_directory, kv_tokens=400, extra={"decode": ["--max-sequences=8"]}) as small:
        assert answers_of(small) == expected
        assert small.total("kvferry_worker_events_total", name="preemptions") > 0
        small.wait_idle()
