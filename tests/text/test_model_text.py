"""The real tokenizer's text: incremental decoding, chat template, encodings."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, decoders, models

from kvferry.errors import ConfigurationError, InvalidRequest
from kvferry.text.decoding import WindowStream
from kvferry.text.model_text import ModelText

pytestmark = pytest.mark.model
SAMPLES = [
    "안녕하세요 👩‍👩‍👧 漢字 é",
    "plain text",
    "  spaces   and\n\nlines\t",
    "한글과 English를 mixed",
    "🇰🇷🎉",
    "e\u0301 NFD 각",
    "\x00\ufeff",
]


@pytest.fixture(scope="module")
def text(model_directory):
    return ModelText(model_directory)


@pytest.mark.parametrize("sample", SAMPLES)
def test_joined_pieces_equal_the_decoding_of_all_ids_and_no_piece_has_half_a_character(text, sample):
    ids = text.encode(sample)
    stream = text.stream()
    pieces = [stream.push(token) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join([*pieces, stream.flush()]) == sample == text._tokenizer.decode(ids)


def test_hangul_really_splits_over_tokens(text):
    assert len(text.encode("안녕하세요")) > 5


@pytest.mark.parametrize("cut", range(1, 12))
def test_an_unfinished_character_ends_as_the_tokenizer_ends_it(text, cut):
    ids = text.encode("안녕 👩‍👩‍👧")[:cut]
    assert text.decode(ids) == text._tokenizer.decode(ids)


def test_random_ids_decode_as_the_tokenizer_decodes_them(text):
    import random

    for seed in range(200):
        ids = [random.Random(f"{seed} {k}").randrange(49152) for k in range(30)]
        assert text.decode(ids) == text._tokenizer.decode(ids, skip_special_tokens=True)


def test_the_window_decoder_agrees_where_no_character_is_split(text):
    for sample in ("plain text with words", "two  spaces"):
        stream = WindowStream(text._tokenizer)
        pieces = [stream.push(token) for token in text.encode(sample)]
        assert "".join([*pieces, stream.flush()]) == sample


def test_the_window_decoder_keeps_the_spaces_of_a_sentencepiece_vocabulary():
    words = {"▁hello": 0, "▁world": 1, "▁": 2, "!": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="!"))
    tokenizer.decoder = decoders.Metaspace()
    stream = WindowStream(tokenizer)
    pieces = [stream.push(token) for token in (0, 1, 3, 1)]
    assert "".join([*pieces, stream.flush()]) == "hello world! world"


def test_the_chat_template_renders_as_transformers_renders_it(text, model_directory):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(model_directory)
    for messages in (
        [{"role": "user", "content": "What is the capital of South Korea?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "안녕"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    ):
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        ids = expected["input_ids"] if not isinstance(expected, list) else expected
        assert text.encode_chat(messages) == list(ids)


def test_half_a_surrogate_pair_is_refused(text):
    with pytest.raises(InvalidRequest, match="surrogate"):
        text.encode("a\ud800b")


@pytest.mark.parametrize("eos", [49152, -1, "2"])
def test_an_end_that_is_no_token_of_the_model_is_refused(model_directory, tmp_path, eos):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_directory / name, tmp_path / name)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, eos]}))
    with pytest.raises(ConfigurationError, match=f"eos_token_id {eos!r} of generation_config.json"):
        ModelText(tmp_path)


def test_a_tokenizer_file_that_cannot_be_read_is_named(model_directory, tmp_path):
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(model_directory / name, tmp_path / name)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json: tokenizers cannot read it"):
        ModelText(tmp_path)


def test_a_tokenizer_that_is_not_the_models_is_refused(model_directory, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_directory / name, tmp_path / name)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 32000}))
    with pytest.raises(ConfigurationError, match="do not belong together"):
        ModelText(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match="fast tokenizer"):
        ModelText(tmp_path)
