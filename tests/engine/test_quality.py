"""The measure of quality: against numbers worked out by hand, against transformers, and on tiny random models."""

import json
import math
import random

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from deploy.quality_report import print_quality
from kvferry.engine.load import EngineSettings, load_engine
from kvferry.engine.quality import LogitsRunner, Quality, compare, measure_quality, quality_text
from kvferry.engine.reference import Reference
from kvferry.errors import ConfigurationError, EngineFailure
from tests.engine.test_native import make_checkpoint

VOCABULARY = 199
TOKENS = [random.Random(k).randrange(VOCABULARY) for k in range(300)]
"""Longer than the tiny model's context of 256: two windows."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


class SameRow:
    """A runner that gives the same logits after every token."""

    def __init__(self, *logits):
        self.row = np.array(logits, np.float32)

    def all_logits(self, chunk):
        assert len(chunk.slots) == -(-len(chunk.tokens) // 16)
        return np.tile(self.row, (len(chunk.tokens), 1))


@pytest.mark.parametrize("window_tokens", [1, 3, 70, 512])
def test_every_figure_equals_what_is_worked_out_by_hand(window_tokens):
    tokens = [0, *([1, 0, 0, 0] * 25)]
    quality = compare("half", SameRow(0, math.log(3)), SameRow(0, 0), tokens, window_tokens)
    assert quality.num_tokens == 100
    assert quality.perplexity == pytest.approx(2, rel=1e-12)
    assert quality.agreement == 0
    assert quality.mean_kl == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-6)
    assert quality.max_logit_difference == pytest.approx(math.log(3), rel=1e-6)
    turned = compare("half", SameRow(0, 0), SameRow(0, math.log(3)), tokens, window_tokens)
    assert turned.perplexity == pytest.approx(math.exp(-(0.25 * math.log(0.75) + 0.75 * math.log(0.25))), rel=1e-6)


def test_logits_that_differ_by_a_constant_are_the_same_distribution():
    quality = compare("moved", SameRow(1, 2, 4), SameRow(1001, 1002, 1004), [0, 1, 2, 1], 512)
    assert (quality.agreement, quality.max_logit_difference) == (1, 1000)
    assert quality.mean_kl == pytest.approx(0, abs=1e-12)


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(EngineFailure, match="broken"):
        compare("broken", SameRow(0, 0), SameRow(0, math.nan), [0, 1], 512)


def test_a_second_float32_engine_agrees_fully(checkpoint):
    one, other = (load_engine(checkpoint, EngineSettings(512)).runner for _ in range(2))
    assert isinstance(one, LogitsRunner)
    assert isinstance(other, LogitsRunner)
    quality = compare("float32", one, other, TOKENS, 256)
    assert (quality.agreement, quality.mean_kl, quality.max_logit_difference) == (1, 0, 0)


def test_float32_comes_first_and_its_perplexity_is_transformers(checkpoint):
    first, second = measure_quality(checkpoint, ["float16", "float32"], 1, TOKENS)
    assert (first.kind, second.kind) == ("float32", "float16")
    assert (first.num_tokens, first.agreement, first.mean_kl, first.max_logit_difference) == (299, 1, 0, 0)
    reference = Reference(checkpoint)
    logits = torch.cat([reference.logits(TOKENS[:256]), reference.logits(TOKENS[256:299])]).double()
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(TOKENS[1:])).exp().item()
    assert first.perplexity == pytest.approx(expected, rel=1e-5)


def test_float16_is_close_to_float32_but_not_equal(checkpoint):
    exact, half = measure_quality(checkpoint, ["float16"], 1, TOKENS)
    assert half.perplexity != exact.perplexity
    assert half.perplexity == pytest.approx(exact.perplexity, rel=0.01)
    assert 0.95 < half.agreement <= 1
    assert 0 < half.mean_kl < 1e-3
    assert 0 < half.max_logit_difference < 0.1


def test_coarser_kv_is_measured_with_each_kind_of_weights(checkpoint):
    exact, *coarser = measure_quality(checkpoint, ["float32", "bfloat16", "int8"], 1, TOKENS, kv="bfloat16")
    assert [(one.kind, one.kv) for one in (exact, *coarser)] == [
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("int8", "bfloat16"),
    ]
    losses = [one.mean_kl for one in (exact, *coarser)]
    assert losses == sorted(losses)
    assert losses[0] == 0 < losses[1]


def test_the_perplexity_of_a_uniform_model_is_the_size_of_its_vocabulary(checkpoint, tmp_path):
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(tmp_path)
    for quality in measure_quality(tmp_path, ["float16"], 1, TOKENS):
        assert quality.perplexity == pytest.approx(VOCABULARY, rel=1e-12)
        assert quality.mean_kl == 0


def test_an_unknown_kind_is_refused_by_name(checkpoint):
    with pytest.raises(ConfigurationError, match="int3"):
        list(measure_quality(checkpoint, ["int3"], 1, TOKENS))


def test_the_text_has_prose_korean_and_code():
    text = quality_text()
    assert len(text.split()) >= 1000
    assert any("가" <= letter <= "힣" for letter in text)
    assert "\ndef " in text


def test_the_report_prints_an_object_a_line_or_a_table(checkpoint, monkeypatch, capsys):
    rows = [Quality("float32", 99, 7.25, 1.0, 0.0, 0.0), Quality("float16", 99, 7.5, 0.99, 1e-6, 0.01)]
    monkeypatch.setattr("kvferry.engine.quality.measure_quality", lambda *arguments, kv, device: iter(rows))
    print_quality(checkpoint, ["float16"], "float32", 1, as_json=True)
    exact, half = map(json.loads, capsys.readouterr().out.splitlines())
    assert (exact["figure"], exact["value"], exact["unit"]) == ("perplexity_float32", 7.25, "perplexity")
    assert (half["weights"], half["tokens"], half["agreement"], half["mean_kl"]) == ("float16", 99, 0.99, 1e-6)
    print_quality(checkpoint, ["float16"], "float32", 1, as_json=False)
    assert "99.00%" in capsys.readouterr().out
