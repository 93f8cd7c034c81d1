"""Where processes are the point: one place tokenises (T003), lists (T015), cached tokens and tenants at the doors (T020, T024), a restart
at one address (T038), and a source that sends pickles (T080).

One deployment: two prefill workers at fixed ports, one of which shares memory with the decode worker and one of which does not.
"""

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvferry.messages import (
    Beat,
    ChoiceStart,
    FetchEnd,
    FetchEndReason,
    FetchMeet,
    FetchOffers,
    FetchOpen,
    Frame,
    RequestOpen,
    Role,
    Sampling,
    Source,
    StepOutput,
    Welcome,
    WorkerDescription,
    WorkerProgress,
)
from kvferry.rpc.v1 import generation_pb2, generation_pb2_grpc
from router.request_maker import salt_of
from tests.processes.service import completion_body, serving, wait_until
from tests.processes.stranger import FORM, Mallory, Peer, armed, receive_a, secret_of

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]
BLOCK = 16
USER = [{"role": "user", "content": "Name three rivers of Korea, and say in a few words where each of them ends."}]


def ids(length: int, seed: object) -> list[int]:
    return [random.Random(f"{seed} {k}").randrange(100, 40_000) for k in range(length)]


PROMPT = ids(100, "cases")
"""Asked for again and again under another salt: nobody has its blocks, and the reference is computed once."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def other_text(model: Path, folder: Path, template: str, tokenizer: str | None = None) -> Path:
    """The same weights beside another chat template, other ends of sequence and perhaps no tokenizer."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (folder / name).symlink_to(model / name)
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(3000))}))
    if tokenizer is None:
        (folder / "tokenizer.json").symlink_to(model / "tokenizer.json")
    else:
        (folder / "tokenizer.json").write_text(tokenizer)
    return folder


@pytest.fixture(scope="module")
def odd(model_directory, tmp_path_factory):
    folder, template = tmp_path_factory.mktemp("models"), (model_directory / "chat_template.jinja").read_text()
    with_a_space = template.replace("message['content']", "' ' + message['content']")
    assert with_a_space != template
    spaced = other_text(model_directory, folder / "spaced", with_a_space)
    timed = other_text(model_directory, folder / "timed", "{{ strftime_now('%s') }}", tokenizer="{}")
    extra = {
        "router": ["--policy=round-robin"],  # what a prompt would cost where is not this module's matter
        "decode-1": [f"--model={spaced}"],
        "prefill-1": [f"--model={timed}", f"--port={free_port()}"],
        "prefill-2": [f"--port={free_port()}", "--transport=grpc"],
        "decode": ["--context-tokens=2048"],
        "prefill": ["--context-tokens=2048"],
    }
    with serving(model_directory, num_prefill=2, num_decode=1, kv_tokens=3000, extra=extra) as running:
        running.complete(ids(60, "warm"), 2)
        running.complete(ids(60, "warm too"), 2)
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_held_nor_lost(odd):
    lost = odd.total("kvferry_request_events_total", event="worker_losses")
    yield
    odd.wait_ready()
    odd.wait_idle()
    assert odd.total("kvferry_request_events_total", event="worker_losses") == lost


@pytest.fixture
def bombs(tmp_path: Path) -> Iterator[list[bytes]]:
    with armed(tmp_path) as made:
        yield made


# ------------------------------------------------------------------------------------------------------ the same tokens


def test_only_the_router_makes_tokens_of_a_text_whatever_lies_beside_the_workers_weights(odd, reference, text):
    """T003: a space more in decode's template, the time in prefill's, whose tokenizer is none; both end sequences elsewhere."""
    wanted = text.encode_chat(USER)
    body = {"messages": USER, "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    answers = []
    for salt in ("1", "2"):  # the two prefill workers take turns
        response = odd.http.post("/v1/chat/completions", json={**body, "cache_salt": salt})
        assert response.status_code == 200, response.text
        answers.append(response.json())
    assert {answer["kvferry"][0]["source_worker"] for answer in answers} == {"prefill-1", "prefill-2"}
    for answer in answers:
        (choice,) = answer["choices"]
        assert choice["prompt_token_ids"] == wanted
        assert choice["finish_reason"] == "length", "no end of sequence but the router's is one"
        reference.check(wanted, choice["token_ids"], 3)
        assert answer["kvferry"][0]["fetched_blocks"] == (len(wanted) - 1) // BLOCK
        assert choice["message"]["content"] == text.decode(choice["token_ids"])


def test_equal_and_different_prompts_with_several_choices_are_numbered_through_and_each_is_its_own(odd, reference):
    """T015: lists with n, streamed and not; what is equal is fetched once."""
    different = [ids(length, ("list", length)) for length in (3, 20, 37, 40)]
    for prompts, num_blocks in (([PROMPT] * 4, 6), (different, 2 + 2)):
        salt = str(num_blocks)
        alone = [odd.tokens(prompt, 3, cache_salt="alone") for prompt in prompts]
        answer = odd.complete(prompts, 3, n=2, cache_salt=salt)
        assert [choice["index"] for choice in answer["choices"]] == list(range(8))
        assert [choice["token_ids"] for choice in answer["choices"]] == [one for one in alone for _ in range(2)]
        assert sum(one["fetched_blocks"] for one in answer["kvferry"]) == num_blocks
        with odd.streaming(prompts, 3, n=2, cache_salt=salt) as events:
            streamed: dict[int, list[int]] = {}
            for chunk in events:
                for choice in chunk["choices"]:
                    streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
        assert streamed == {choice["index"]: choice["token_ids"] for choice in answer["choices"]}
    reference.check(PROMPT, odd.tokens(PROMPT, 3, cache_salt="6"), 3)


# --------------------------------------------------------------------------------------------------------------- caches


def ask_grpc(service, prompt, max_tokens, metadata=(), **fields):
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=prompt), max_tokens=max_tokens, temperature=0, ignore_eos=True, **fields
    )
    with grpc.insecure_channel(service.grpc) as channel:
        responses = list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, metadata=metadata))
    return responses[-1].summary


def cached_in(usage: dict[str, Any]) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]


def ask_whole(service, prompt, salt):
    return cached_in(service.complete(prompt, 3, cache_salt=salt)["usage"])


def ask_stream(service, prompt, salt):
    with service.streaming(prompt, 3, cache_salt=salt, stream_options={"include_usage": True}) as events:
        (usage,) = [chunk["usage"] for chunk in events if not chunk["choices"]]
    return cached_in(usage)


def ask_call(service, prompt, salt):
    return ask_grpc(service, prompt, 3, cache_salt=salt).num_cached_tokens


@pytest.mark.parametrize("ask", [ask_whole, ask_stream, ask_call])
def test_cached_tokens_are_told_alike_by_every_way_to_ask(odd, ask):
    """T020: fresh, its repeats, half shared, and one block more."""
    salt = ask.__name__
    half, longer = [*PROMPT[:50], *ids(50, "half")], [*PROMPT, *ids(17, "longer")]
    prompts = (PROMPT, PROMPT, half, half, longer, PROMPT)
    assert [ask(odd, prompt, salt) for prompt in prompts] == [0, 96, 48, 96, 96, 96]


def test_what_one_keys_holder_asked_is_cached_for_nobody_else_and_for_it_at_either_door(odd, reference):
    """T024."""

    def over_http(headers, **fields):
        body = completion_body(PROMPT, 3, **fields)
        answer = odd.http.post("/v1/completions", json=body, headers=headers).json()
        reference.check(PROMPT, answer["choices"][0]["token_ids"], 3)
        return cached_in(answer["usage"])

    def over_grpc(key):
        return ask_grpc(odd, PROMPT, 3, [("authorization", f"Bearer {key}")]).num_cached_tokens

    first, second = ({"Authorization": f"Bearer key-{k}"} for k in (1, 2))
    assert over_http(first) == 0
    for headers, fields in (
        (second, {}),
        ({}, {"cache_salt": "key-1"}),
        (first, {"cache_salt": "mine"}),
        ({"Authorization": "Bearer KEY-1"}, {}),
        ({"Authorization": "Basic key-1"}, {"cache_salt": "key"}),
    ):
        assert over_http(headers, **fields) == 0, (headers, fields)
        assert over_http(headers, **fields) == 96, (headers, fields)
    assert over_grpc("key-1") == 96
    assert over_grpc("key-3") == 0
    assert over_http({"Authorization": "Bearer key-3"}) == over_http(first) == 96


# ----------------------------------------------------------------------------------------------------- the same address


def talk(service, name: str, message: Any) -> Any:
    """The answer to the first message of a fetch stream with the deployment's secret."""

    async def main() -> Any:
        async with Peer(service) as peer, peer.stream("fetch", name) as stream:
            await stream.send(message)
            return await receive_a(stream, FetchOffers, Frame, FetchEnd)

    return asyncio.run(main())


def model_and_fidelity(service) -> tuple[str, str]:
    with grpc.insecure_channel(service.grpc) as channel:
        model = generation_pb2_grpc.GenerationServiceStub(channel).GetModel(generation_pb2.GetModelRequest())
    return model.model_id, "float32"


def is_another(service, name: str, pid: int) -> bool:
    """Another process is a member under that name."""
    response = service.http.get("/health/ready")
    now = {one["name"]: one["pid"] for one in response.json()["workers"]}
    return response.status_code == 200 and now.get(name, pid) != pid


def fetched_from(service, reference, name: str, turn: object) -> str:
    """Asks, under a new salt each time, until that source's turn has come; returns the salt."""
    for k in range(4):
        salt = f"{name} {turn} {k}"
        answer = service.complete(PROMPT, 3, cache_salt=salt)
        reference.check(PROMPT, answer["choices"][0]["token_ids"], 3)
        (numbers,) = answer["kvferry"]
        assert (numbers["attempts"], numbers["fetched_blocks"]) == (1, 6)
        if numbers["source_worker"] == name:
            return salt
    raise AssertionError(f"{name} was nobody's source")


def failed_fetches(service) -> dict[str, float]:
    return {key: value for key, value in service.metrics().items() if "fetch_failed_" in key and value}


def incarnation_of(service, name: str) -> str:
    offers = talk(service, name, FetchMeet(*model_and_fidelity(service)))
    assert isinstance(offers, FetchOffers)
    return offers.incarnation


@pytest.mark.parametrize(
    ("name", "num_lives"),
    [
        ("prefill-1", 1),
        pytest.param("prefill-1", 10, marks=pytest.mark.soak),
        pytest.param("prefill-2", 10, marks=pytest.mark.soak),
    ],
)
def test_a_source_that_restarts_at_its_address_is_met_anew_and_answers_for_nothing_of_its_former_life(
    odd, reference, name, num_lives
):
    """T038: over shared memory and over gRPC; nobody else is touched. The first request after readiness is served by it."""
    model_id, fidelity = model_and_fidelity(odd)
    address = odd.deployment.children[name].details["address"]
    failed = failed_fetches(odd)
    for life in range(num_lives):
        salt = fetched_from(odd, reference, name, (num_lives, life))
        before, pid = incarnation_of(odd, name), odd.pid(name)
        held = FetchOpen(model_id, fidelity, tuple(PROMPT[: 6 * BLOCK]), salt=salt_of(salt, None), hold_only=True)
        held = replace(held, road="grpc", incarnation=before)
        assert isinstance(talk(odd, name, held), Frame), "the life that has it serves it"
        odd.kill(name)
        wait_until(lambda: is_another(odd, name, pid), 90, f"{name} to be there again")  # noqa: B023 (called at once)
        assert odd.deployment.children[name].details["address"] == address
        stranger, now = talk(odd, name, held), incarnation_of(odd, name)
        assert isinstance(stranger, FetchEnd)
        assert stranger.reason is FetchEndReason.STRANGER
        assert now != before
        missing = talk(odd, name, replace(held, incarnation=now))
        assert isinstance(missing, FetchEnd)
        assert (missing.reason, missing.first_missing_block) == (FetchEndReason.MISSING, 0)
        fetched_from(odd, reference, name, (num_lives, life, "again"))
    assert failed_fetches(odd) == failed


# ------------------------------------------------------------------------------------------------------ a hostile source


async def test_pickles_from_a_source_that_knows_the_secret_are_bad_frames_and_no_roads(odd, reference, bombs):
    """T080, in what a source says and what a member tells of its blocks; `test_cases_strangers.py` has all other fields."""
    model_id, fidelity = model_and_fidelity(odd)
    wanted = odd.tokens(PROMPT, 3)
    sampling = Sampling(1, 3, 0.0)
    for bomb in bombs[::2]:
        mallory = Mallory(bomb)
        async with Peer(odd) as peer, mallory.listening(secret_of(odd)) as address:
            async with peer.stream("attach", "decode-1") as router:
                await router.send(Beat())
                for number, trick in enumerate(Mallory.TRICKS):
                    opening = RequestOpen(number, 1, tuple(PROMPT), (ChoiceStart(0),), sampling, bomb + bytes([number]))
                    await router.send(replace(opening, sources=(Source("mallory", address),)))
                    tokens: list[int] = []
                    while len(tokens) < 3:
                        output = await receive_a(router, StepOutput)
                        tokens += [token for new in output.tokens for token in new.token_ids]
                    assert tokens == wanted
                    assert mallory.played[-1] == trick
            whole = bomb + bytes(-len(bomb) % BLOCK)
            block_ids = tuple(whole[k : k + BLOCK] for k in range(0, len(whole), BLOCK))
            description = WorkerDescription(
                *("mallory", "x", Role.DECODE, address, model_id, fidelity, "n", BLOCK, FORM.block_bytes),
                *(3000, 2048, 49152, 1),
            )
            async with peer.stream("join", "router") as registry:
                await registry.send(description)
                assert await receive_a(registry, Welcome)
                await registry.send(WorkerProgress(sealed_block_ids=block_ids, evicted_block_ids=block_ids[::2]))
                await receive_a(registry, Beat)
    bad = [key for key, value in odd.metrics().items() if "bad_frame_" in key and value]
    for kind in ("header", "digest", "truncated"):
        assert any(f"bad_frame_{kind}" in key for key in bad), bad
    reference.check(PROMPT, odd.tokens(PROMPT, 3, cache_salt="as before"), 3)
