import json

import pytest

from kvferry.errors import InvalidRequest
from router.openai_request import ChatBody, CompletionBody, parse_body

USER = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return parse_body(ChatBody, json.dumps({"messages": USER, **fields}).encode())


def completion(**fields):
    return parse_body(CompletionBody, json.dumps({"prompt": "hi", **fields}).encode())


NUMBERS = ["temperature", "top_p", "top_k", "seed", "n", "max_tokens", "timeout_s"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["1", True, [], {}, 1e300, "NaN"])
def test_a_wrong_type_or_range_is_refused_naming_the_field(name, value):
    with pytest.raises(InvalidRequest) as error:
        chat(**{name: value})
    assert error.value.param == name


@pytest.mark.parametrize("name", NUMBERS)
def test_null_means_the_default(name):
    assert getattr(chat(**{name: None}), name) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", 2.1), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("n", 0), ("n", 100_000),
     ("max_tokens", 0), ("max_tokens", 2**31), ("stop", ["x"] * 1000), ("stop", [""]), ("stop", "x" * 10_000),
     ("stop_token_ids", [-5]), ("stop_token_ids", [10**10]), ("tools", [{}]), ("best_of", 1000), ("logit_bias", {"1": 101}), ("logit_bias", {"1": None}), ("logit_bias", [1]),
     ("logit_bias", {str(k): 0 for k in range(2000)}), ("top_logprobs", 50_000), ("top_logprobs", 3), ("logprobs", 2),
     ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repetition_penalty", 11),
     ("min_p", -0.1), ("min_p", 1.1), ("min_tokens", -1), ("prompt_logprobs", 21), ("prompt_logprobs", True),
     ("response_format", {"type": "json_object"}), ("stream_options", {"include_usage": True}), ("stream", "yes")],
)  # fmt: skip
def test_what_is_out_of_range_or_not_supported_is_refused_naming_the_field(name, value):
    with pytest.raises(InvalidRequest) as error:
        chat(**{name: value})
    assert error.value.param == name


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_are_not_json_are_refused(constant):
    with pytest.raises(InvalidRequest, match=constant.strip("-")):
        parse_body(ChatBody, f'{{"messages":[{{"role":"user","content":"x"}}],"temperature":{constant}}}'.encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        '{"a": "안"}'.encode("euc-kr"),
        b"[" * 200_000,
        b'{"a":' * 100_000,
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(raw):
    with pytest.raises(InvalidRequest):
        parse_body(ChatBody, raw)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ("hi", "messages"),
        (None, "messages"),
    ],
)
def test_bad_messages_are_refused_naming_the_place(messages, param):
    with pytest.raises(InvalidRequest) as error:
        chat(messages=messages)
    assert error.value.param == param


def test_message_shapes_of_real_clients_are_read():
    body = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "name": "kim", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "user", "content": ""},
        ],
        user="u", metadata={}, store=False, parallel_tool_calls=True, logit_bias={}, tools=[], n=1,
    )  # fmt: skip
    assert [m.rendered() for m in body.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], None, 5, [-1], [3.5], [[1], "a"], ["a"] * 1000, [True]])
def test_bad_prompts_are_refused_naming_the_prompt(prompt):
    with pytest.raises(InvalidRequest) as error:
        completion(prompt=prompt)
    assert error.value.param == "prompt"


def test_the_four_forms_of_a_prompt_are_read():
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompts == [[1], [2, 3]]


def test_two_different_limits_are_refused_and_one_is_enough():
    with pytest.raises(InvalidRequest):
        chat(max_tokens=5, max_completion_tokens=6)
    assert chat(max_completion_tokens=6).max_completion_tokens == 6


BAD_NUMBERS = {
    "temperature": (-0.1, 1e300, "1", True, [], {}),
    "top_p": (-1, 0, 1e300, "1", True, [], {}),
    "top_k": (-2, 1.5, 1e300, "1", True, [], {}),
    "min_p": (-1, 1e300, "1", True, [], {}),
    "presence_penalty": (-3, 1e300, "1", True, [], {}),
    "frequency_penalty": (-3, 1e300, "1", True, [], {}),
    "repetition_penalty": (-1, 0, 1e300, "1", True, [], {}),
    "seed": (1.5, 1e300, "1", True, [], {}),
    "n": (-1, 0, 1.5, 1e300, "1", True, [], {}),
    "max_tokens": (-1, 1.5, 1e300, "1", True, [], {}),
    "min_tokens": (-1, 1.5, 1e300, "1", True, [], {}),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_NUMBERS.items() for value in values])
def test_numbers_that_are_none_are_refused_naming_the_field(name, value):
    """T066."""
    with pytest.raises(InvalidRequest) as caught:
        parse_body(CompletionBody, json.dumps({"prompt": "x", name: value}).encode())
    assert caught.value.param == name


@pytest.mark.parametrize("name", BAD_NUMBERS)
def test_null_means_the_default_and_what_json_has_not_is_refused(name):
    assert getattr(parse_body(CompletionBody, json.dumps({"prompt": "x", name: None}).encode()), name) is None
    for word in ("NaN", "Infinity", "1e400"):
        with pytest.raises(InvalidRequest):
            parse_body(CompletionBody, f'{{"prompt": "x", "{name}": {word}}}'.encode())


def test_no_tokens_are_an_answer_only_with_an_echo_or_log_probabilities_of_the_prompt():
    def completion(**fields):
        return parse_body(CompletionBody, json.dumps({"prompt": "x", "max_tokens": 0, **fields}).encode())

    with pytest.raises(InvalidRequest) as caught:
        completion()
    assert caught.value.param == "max_tokens"
    assert completion(echo=True).num_prompt_logprobs is None
    assert completion(echo=True, logprobs=3).num_prompt_logprobs == 3
    assert completion(prompt_logprobs=2).num_prompt_logprobs == 2


@pytest.mark.parametrize("key", ["abc", "-1", "1.5", " 1", "", "９", "9" * 20, "01"])
def test_a_bias_for_what_is_no_token_id_is_refused(key):
    body = parse_body(CompletionBody, json.dumps({"prompt": "x", "logit_bias": {key: 5}}).encode())
    with pytest.raises(InvalidRequest) as caught:
        _ = body.biases
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("regex", "[0-9]+", None), ("ebnf", "root ::= 'a'", None), ("grammar", "root ::= 'a'", ""),
        ("json_schema", {"type": "object"}, {}), ("guided_whitespace_pattern", " ", None), ("typical_p", 0.9, 1.0),
        ("no_repeat_ngram_size", 3, 0), ("repeat_penalty", 1.1, 1), ("mirostat", 2, 0), ("top_n_sigma", 1.0, -1),
        ("dry_multiplier", 0.8, 0.0), ("xtc_probability", 0.5, 0), ("watermark", True, False), ("num_beams", 4, 1),
        ("max_new_tokens", 9, None), ("adapter_id", "other", None),
    ],
)  # fmt: skip
def test_what_other_servers_would_sample_otherwise_for_is_refused_and_its_neutral_value_is_not(field, value, neutral):
    for harmless in (None, neutral):
        parse_body(CompletionBody, json.dumps({"prompt": "a", field: harmless}).encode())
    with pytest.raises(InvalidRequest, match=f"{field} is not supported") as caught:
        parse_body(CompletionBody, json.dumps({"prompt": "a", field: value}).encode())
    assert caught.value.param == field
