"""Token ids through two real processes against plain transformers (T001, T002, T012, T018, T019, T053, T060, T062)."""

import random
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvferry.rpc.v1 import generation_pb2, generation_pb2_grpc
from loadtest.exact import make_prompts

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]
BLOCK = 16


def ids(length: int, seed: object) -> list[int]:
    return [random.Random(f"{seed} {k}").randrange(100, 40_000) for k in range(length)]


def ask_grpc(service, prompt, max_tokens, **fields):
    with grpc.insecure_channel(service.grpc) as channel:
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=prompt),
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            **fields,
        )
        responses = list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request))
    assert responses[-1].HasField("summary")
    assert not any(response.HasField("summary") for response in responses[:-1])
    return [token for response in responses for token in response.token_ids], responses[-1].summary


def test_both_doors_give_the_references_ids(service, reference, model_directory):
    for kind, prompt in make_prompts(model_directory, 8):
        answer = service.tokens(prompt, 8)
        reference.check(prompt, answer, 8)
        assert ask_grpc(service, prompt, 8)[0] == answer, kind
        assert service.stream_tokens(prompt, 8) == answer


def test_an_answer_that_ends_early_or_late_is_not_the_references(reference):
    prompt = ids(20, "short")
    for answer in ([], [1, 2], [1, 2, 3, 4]):
        with pytest.raises(AssertionError, match=f"{len(answer)} of 3 tokens"):
            reference.check(prompt, answer, 3)


EDGES = [1, *(k * BLOCK + beside for k in (1, 2) for beside in (-1, 0, 1))]


@pytest.mark.parametrize("salts", ["shared", "new"])
@pytest.mark.parametrize("whole_blocks", [(5, 9), pytest.param(range(3, 21), marks=pytest.mark.soak)])
def test_lengths_at_block_edges_lose_and_invent_no_block(service, reference, salts, whole_blocks):
    """T002."""
    for length in (*EDGES, *(k * BLOCK for k in whole_blocks)):
        prompt = ids(length, "edge")
        for max_tokens in (1, 2, BLOCK + 1):
            salt = f"{length} {max_tokens}" if salts == "new" else "one"
            answer = service.complete(prompt, max_tokens, cache_salt=salt)
            assert len(answer["choices"][0]["token_ids"]) == max_tokens
            if salts == "new" or max_tokens > 2:  # a prefix of a checked answer needs no check of its own
                reference.check(prompt, answer["choices"][0]["token_ids"], max_tokens)
            if salts == "new":
                missing = (length - 1) // BLOCK
                wanted = missing if missing * BLOCK > 16 else 0
                assert answer["kvferry"][0]["fetched_blocks"] == wanted, length


def test_chunks_of_prompts_that_interleave_are_exact(service, reference):
    prompts = [ids(length, "chunk") for length in (63, 64, 65, 127, 128, 129, 500)]
    with ThreadPoolExecutor(8) as pool:
        for prompt, answer in zip(prompts, pool.map(lambda p: service.tokens(p, 8), prompts), strict=True):
            reference.check(prompt, answer, 8)


def test_a_cache_hit_is_a_miss_but_for_the_cached_tokens(service, reference):
    prompt = ids(300, "hit")
    cached = []
    for _ in range(3):
        answer = service.complete(prompt, 16)
        reference.check(prompt, answer["choices"][0]["token_ids"], 16)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 288, 288]
    for other in ([*prompt[:200], *ids(60, "q")], [*prompt, *ids(40, "r")]):
        answer = service.complete(other, 16)
        reference.check(other, answer["choices"][0]["token_ids"], 16)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 192 + 96 * (other[:300] == prompt)


def test_a_fully_cached_prompt_keeps_a_tail_to_compute(service, reference):
    """T019: the repeats equal the first answer, log-probabilities to the last bit among them."""
    first: dict[int, tuple[list[int], list[float], list[dict[str, float]]]] = {}
    for length in (4 * BLOCK, 4 * BLOCK, 4 * BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK):
        prompt = ids(length, "full")
        for max_tokens in (20, 1):
            answer = service.complete(prompt, max_tokens, logprobs=3)
            (choice,) = answer["choices"]
            logprobs = choice["logprobs"]
            said = choice["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"]
            if length not in first:
                reference.check(prompt, choice["token_ids"], 20)
            begun = first.setdefault(length, said)
            assert said == tuple(part[:max_tokens] for part in begun)
            assert len(begun[1]) == 20
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] < length


def test_concurrent_answers_are_never_mixed(service, reference):
    prompts = [ids(random.Random(k).randrange(1, 120), f"mix {k}") for k in range(24)]
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda p: service.tokens(p, 4 + len(p) % 9), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        reference.check(prompt, answer, 4 + len(prompt) % 9)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_exactly_so_many_tokens(service, reference, max_tokens):
    prompt = ids(40, "count")
    answer = service.complete(prompt, max_tokens)
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"
    reference.check(prompt, choice["token_ids"], max_tokens)


def test_a_seed_gives_the_same_tokens_alone_and_in_any_company(service):
    prompt = ids(50, "seed")
    sampled = dict(temperature=0.8, seed=42)
    alone = service.tokens(prompt, 12, **sampled)
    assert service.tokens(prompt, 12, **sampled) == alone
    assert service.tokens(prompt, 12, temperature=0.8, seed=43) != alone
    with ThreadPoolExecutor(15) as pool:
        strangers = [pool.submit(service.tokens, ids(20 + k, "s"), 12, temperature=1.0) for k in range(7)]
        equals = [pool.submit(service.tokens, prompt, 12, **sampled) for _ in range(8)]
        assert [one.result() for one in equals] == [alone] * 8
        assert all(one.result() for one in strangers)
    assert ask_grpc(service, prompt, 12)[1].seed > 0


def test_choices_of_one_request_have_randomness_of_their_own_and_are_reproducible(service):
    first = service.complete(ids(40, "n"), 10, n=3, temperature=1.0, seed=5)
    again = service.complete(ids(40, "n"), 10, n=3, temperature=1.0, seed=5)
    texts = [choice["token_ids"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert len({tuple(one) for one in texts}) == 3
    assert texts == [choice["token_ids"] for choice in again["choices"]]
    assert service.tokens(ids(40, "n"), 10, temperature=1.0, seed=5) == texts[0]


def test_several_prompts_in_one_request_are_answered_each_by_itself(service, reference):
    prompts = [ids(length, "list") for length in (3, 40, 77)]
    answer = service.complete(prompts, 6)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        reference.check(prompt, choice["token_ids"], 6)
    with service.streaming(prompts, 6) as events:
        streamed = [[] for _ in prompts]
        for chunk in events:
            for choice in chunk["choices"]:
                streamed[choice["index"]] += choice["token_ids"]
    assert streamed == [choice["token_ids"] for choice in answer["choices"]]
