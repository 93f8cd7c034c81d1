"""Text of real answers: split characters, stop strings, the shape of streams (T067, T069, T070, T071, T072, T073)."""

import openai
import pytest

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]
COPY = "Repeat exactly.\nText: 안녕하세요 漢字 é\nText: 안녕하세요 漢字 é\nText:"


def text_of(service, prompt, max_tokens, **fields):
    """Joined deltas, finish reasons and ids of a stream."""
    text, finishes, ids = "", [], []
    with service.streaming(prompt, max_tokens, **fields) as events:
        for chunk in events:
            for choice in chunk["choices"]:
                assert not finishes, "something follows the finish"
                text += choice["text"]
                ids += choice["token_ids"]
                finishes += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
    (finish,) = finishes
    return text, finish, ids


@pytest.mark.parametrize("fields", [dict(), dict(temperature=2.0, seed=3)])
def test_joined_deltas_equal_the_whole_text_and_the_decoding_of_all_ids(service, text, fields):
    for prompt in (COPY, "Q: 서울은 어디에 있나요? A:"):
        whole = service.complete(prompt, 32, **fields)["choices"][0]
        streamed, finish, ids = text_of(service, prompt, 32, **fields)
        assert (streamed, finish, ids) == (whole["text"], whole["finish_reason"], whole["token_ids"])
        assert streamed == text._tokenizer.decode(ids)
    if not fields:
        assert "안녕" in service.complete(COPY, 32)["choices"][0]["text"]


def test_a_limit_within_a_character_ends_as_the_tokenizer_ends_it(service, text):
    ids = service.tokens(COPY, 16)
    for limit in range(1, 17, 3):
        streamed, finish, got = text_of(service, COPY, limit)
        assert (got, finish) == (ids[:limit], "length")
        assert streamed == text._tokenizer.decode(got)


def test_nothing_of_a_stop_string_is_sent(service):
    whole = service.complete(COPY, 32)
    text, ids = whole["choices"][0]["text"], whole["choices"][0]["token_ids"]
    stops = [text[2:4], text[3:8], "안녕", "é", text[1:3] + "zzz"]
    for stop in (*stops, stops[:3]):
        found = [one for one in (stop if isinstance(stop, list) else [stop]) if one in text]
        cut = min((text.index(one) for one in found), default=len(text))
        answer = service.complete(COPY, 32, stop=stop)
        choice = answer["choices"][0]
        streamed, finish, got = text_of(service, COPY, 32, stop=stop)
        assert streamed == choice["text"] == text[:cut]
        assert finish == choice["finish_reason"] == ("stop" if found else "length")
        assert got == choice["token_ids"] == ids[: len(got)]
        assert answer["usage"]["completion_tokens"] == len(got)
        if found and isinstance(stop, str):
            included = service.complete(COPY, 32, stop=stop, include_stop_str_in_output=True)["choices"][0]
            assert included["text"] == text[:cut] + stop


def test_every_way_to_end_has_one_finish_reason_then_usage_then_done(service):
    ways = {
        "stop": dict(prompt="x", max_tokens=50, stop_token_ids=list(range(49_152))[:64], stop=["e", "a", " "]),
        "length": dict(prompt="x", max_tokens=3),
    }
    for expected, way in ways.items():
        with service.streaming(**way, stream_options={"include_usage": True}) as events:
            chunks = list(events)
        finishes = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert finishes == [expected]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] > 0
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        assert chunks[-1]["kvferry"][0]["instants_ms"]["first_token"] > 0


def test_choices_that_end_at_different_times_each_end_once(service):
    with service.streaming("Once upon a time", 12, n=3, temperature=1.5, seed=8, stop=["e"]) as events:
        chunks = list(events)
    for index in range(3):
        finishes = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert finishes[-1] is not None
        assert finishes[:-1] == [None] * (len(finishes) - 1)
    assert all("usage" not in chunk for chunk in chunks)


def test_the_end_of_the_answer_is_the_end_of_sequence_token(service):
    answer = service.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "What is the capital of South Korea?"}], "temperature": 0},
    )
    choice = answer.json()["choices"][0]
    assert "Seoul" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert answer.headers["server-timing"].startswith("queue;dur=")
    assert "ttft;dur=" in answer.headers["server-timing"]


def test_the_openai_client_reads_answers_streams_and_errors(service, text):
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="key", max_retries=0)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the capital of South Korea?"}]
    whole = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=12)
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    roles = [chunk.choices[0].delta.role for chunk in chunks if chunk.choices]
    assert roles[0] == "assistant"
    assert not any(roles[1:])
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert joined == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens == len(text.encode_chat(messages))
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-9", messages=messages)
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model=model, messages=messages, tools=[{"type": "function", "function": {"name": "f"}}]
        )
