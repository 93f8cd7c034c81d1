"""Engines whose steps run on a device, with the CPU's torch device for one: tiny random models against transformers alone."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from deploy.engine_report import print_engine_figures
from kvferry.engine.device import Room, device_called
from kvferry.engine.device_memory import DeviceMemory
from kvferry.engine.load import EngineSettings, load_engine
from kvferry.engine.load_device import load_on_device
from kvferry.engine.modules_check import ROUNDINGS, SHARE_COMPARED
from kvferry.engine.plan import GREEDY, Chunk, Draw, Plan
from kvferry.engine.quality import measure_quality
from kvferry.engine.roofline import Ceilings, measure_device_ceilings
from kvferry.errors import ConfigurationError
from tests.engine.test_modules import ARCHITECTURES, make_checkpoint, tokens_of

HERE = torch.device("cpu")


def load(directory, kv_tokens=512, **settings):
    return load_on_device(directory, EngineSettings(kv_tokens, **settings), HERE)


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma2", "gpt oss"])
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), **ARCHITECTURES[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), **ARCHITECTURES["llama"])


def reference(directory, dtype, tokens):
    """transformers' own run in that dtype: [tokens, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def logits_in_two_steps(engine, prompts):
    """Of each prompt [tokens, vocabulary]: all prompts share two steps, and the memory was never written."""
    engine.memory.blocks.fill_(float("nan"))
    parts, slots = [], [tuple(range(1 + 8 * number, 9 + 8 * number)) for number in range(len(prompts))]
    for half in range(2):
        chunks = []
        for number, prompt in enumerate(prompts):
            first, last = ((0, len(prompt) * 3 // 5), (len(prompt) * 3 // 5, len(prompt)))[half]
            chunks.append(Chunk(number, tuple(prompt[first:last]), first, slots[number][: -(-last // 16)]))
        num_rows = sum(len(chunk.tokens) for chunk in chunks)
        logits = engine.runner.forward(tuple(chunks), range(num_rows), engine.memory)
        parts.append(np.split(logits, np.cumsum([len(chunk.tokens) for chunk in chunks])[:-1]))
    return [np.concatenate(halves) for halves in zip(*parts, strict=True)]


PROMPTS = [tokens_of(number, length) for number, length in enumerate((100, 5, 33))]


def test_in_float32_logits_equal_transformers(checkpoint):
    engine = load(checkpoint)
    assert isinstance(engine.memory, DeviceMemory)
    for prompt, logits in zip(PROMPTS, logits_in_two_steps(engine, PROMPTS), strict=True):
        assert np.allclose(logits, reference(checkpoint, torch.float32, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_in_16_bits_logits_are_transformers_own_but_for_rounding(checkpoint, kind):
    engine, dtype = load(checkpoint, weights=kind, kv="auto"), getattr(torch, kind)
    assert engine.runner.model.dtype == engine.memory.blocks.dtype == dtype
    for prompt, logits in zip(PROMPTS, logits_in_two_steps(engine, PROMPTS), strict=True):
        expected = reference(checkpoint, dtype, prompt)
        assert logits.dtype == np.float32
        difference = np.quantile(abs(logits - expected).max(axis=1), SHARE_COMPARED)
        assert difference <= ROUNDINGS * torch.finfo(dtype).eps * abs(expected).max()


def test_a_mixed_step_gives_each_sequence_its_own_tokens(llama):
    runner = load(llama).runner
    prompts, draw = [*PROMPTS, tokens_of(9, 16)], Draw(GREEDY)
    slots = [tuple(range(1 + 8 * number, 9 + 8 * number)) for number in range(len(prompts))]
    whole = [[*prompt] for prompt in prompts]
    for step in range(4):
        starts = [0 if step == 0 else len(tokens) - 1 for tokens in whole]
        chunks = tuple(
            Chunk(number, tuple(tokens[start:]), start, slots[number][: -(-len(tokens) // 16)], draw)
            for number, (tokens, start) in enumerate(zip(whole, starts, strict=True))
        )
        for number, token in runner.run(Plan(step, chunks)).tokens.items():
            assert token == reference(llama, torch.float32, whole[number])[-1].argmax()
            whole[number].append(token)


# ------------------------------------------------------------------------------------------------ what it is, and its size


def test_auto_weights_are_the_checkpoints_own_and_auto_kv_what_the_weights_are(llama, tmp_path):
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert load(tmp_path, weights="auto", kv="auto").memory.format.dtype == "bfloat16"
    assert load(llama, weights="auto", kv="auto").memory.format.dtype == "float32"
    engine = load(tmp_path, weights="auto", kv="float16")
    assert (engine.identity.fidelity, engine.costs.weights) == ("float16", "bfloat16")


def test_the_identity_says_what_decides_kv_and_bits(llama):
    here = load_engine(llama, EngineSettings(512))
    single, half = load(llama).identity, load(llama, weights="float16").identity
    assert single.model_id == here.identity.model_id != half.model_id
    assert half.model_id != load_engine(llama, EngineSettings(512, weights="float16")).identity.model_id
    capability = torch.backends.cpu.get_cpu_capability()
    assert single.numerics_id == f"modules-torch-{torch.__version__}-cpu-{capability}-float32"
    assert half.numerics_id == f"modules-torch-{torch.__version__}-cpu-{capability}-float16"


def test_a_pool_whose_size_nobody_says_is_what_fits(llama, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3_000_000))
    num_weights = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(llama).parameters())
    fitting = min(int(3_000_000 * 0.9) - 4 * num_weights, 1_500_000) // (2 * 3 * 2 * 16 * 4)
    assert load(llama, 0).num_slots == fitting // 16


ROOM = Room("cuda:0 (NVIDIA L4)", 1_000_000, 600_000, 500_000, 1_000)


@pytest.mark.parametrize(
    ("changes", "wanted", "tokens"),
    [({}, 400, 400), ({}, 0, 288), (dict(host_bytes=10**9), 0, 400), (dict(host_bytes=10_000), 0, 16)],
)
def test_the_pool_fits_into_device_and_host(changes, wanted, tokens):
    assert dataclasses.replace(ROOM, **changes).tokens(wanted, 16) == tokens


@pytest.mark.parametrize(
    ("changes", "wanted", "message"),
    [
        (
            {},
            401,
            "kv_tokens is 401, which needs 401 x 1,000 = 401,000 bytes. cuda:0 (NVIDIA L4): 90% of 1,000,000 free bytes are 900,000, "
            "the weights take 500,000, which leaves 400,000: lower kv_tokens to at most 400, or use a --kv of 16 bits",
        ),
        (
            dict(host_bytes=300_000),
            400,
            "kv_tokens is 400: the pool's mirror in the host's memory needs 400 x 1,000 = 400,000 bytes, but "
            "300,000 are available: lower kv_tokens to at most 300",
        ),
        (
            dict(weight_bytes=890_000),
            0,
            "cuda:0 (NVIDIA L4): 90% of 1,000,000 free bytes are 900,000, the weights take 890,000, which leaves no block of "
            "16 x 1,000 bytes: use --weights bfloat16 or float16, a device with more memory, or end what else runs on it",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(changes, wanted, message):
    with pytest.raises(ConfigurationError) as caught:
        dataclasses.replace(ROOM, **changes).tokens(wanted, 16)
    assert caught.value.message == message


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_device_that_is_not_there_is_refused_saying_what_to_do(llama, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigurationError) as caught:
        load_engine(llama, EngineSettings(512, device="cuda"))
    assert caught.value.message == (
        f"device 'cuda': torch {torch.__version__} here has no CUDA; use --device cpu, or install a torch for this accelerator"
    )
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(ConfigurationError, match=r"is for CUDA 12\.8, and finds no device or driver; use --device cpu"):
        device_called("cuda:0")


def test_a_device_beyond_the_last_is_refused_naming_those_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_called("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigurationError) as caught:
        device_called("cuda:7")
    assert caught.value.message == "device 'cuda:7': this process sees 2: cuda:0, cuda:1; use one of them"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(weights="int8"), "weights 'int8' are the CPU's only: on cpu use float32, float16, bfloat16 or auto"),
        (dict(kv="int8"), "kv 'int8': choose one of float32, float16, bfloat16"),
        (dict(kv_tokens=8), "kv_tokens is 8: a pool needs at least one block of 16 tokens"),
    ],
)
def test_what_a_device_cannot_do_is_refused_by_name(llama, settings, message):
    with pytest.raises(ConfigurationError) as caught:
        load(llama, **settings)
    assert caught.value.message == message


def test_kv_of_a_device_alone_is_refused_on_the_cpu(llama):
    with pytest.raises(ConfigurationError, match="kv 'float16': choose one of float32, bfloat16"):
        load_engine(llama, EngineSettings(512, kv="float16"))


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_devices_ceilings_are_measured(weights):
    ceilings = measure_device_ceilings(weights, "cpu", side=64, num_numbers=1 << 14)
    assert ceilings.flops_per_s > 0
    assert ceilings.bytes_per_s > 0


def test_steps_and_quality_are_measured_where_they_are_told_to_be(llama, monkeypatch, capsys):
    """The device's memory and modules, and its ceilings, by the options of the two commands."""
    asked = []
    monkeypatch.setattr("kvferry.engine.load.device_called", lambda name: asked.append(name) or HERE)
    monkeypatch.setattr("kvferry.engine.bench.measure_device_ceilings", lambda weights, name: Ceilings(1e9, 1e9))
    monkeypatch.setattr("kvferry.engine.bench.PREFILLS", (16,))
    monkeypatch.setattr("kvferry.engine.bench.DECODES", ((16, 2),))
    monkeypatch.setattr("kvferry.engine.bench.SAMPLED", (8, 2))
    monkeypatch.setattr("kvferry.engine.quality.WINDOW_TOKENS", 64)
    print_engine_figures(llama, "float32", "auto", 1, as_json=True, device="cuda:0")
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["workload"], one["device"]) for one in figures] == [
        ("prefill_16", "cuda:0"),
        ("decode_c16_b2", "cuda:0"),
        ("sampled_c8_b2", "cuda:0"),
    ]
    assert {one["ceiling_gflop_s"] for one in figures} == {1.0}
    tokens = tokens_of(0, 100)
    exact, half = measure_quality(llama, ["bfloat16"], 1, tokens, "bfloat16", "cuda:0")
    assert exact.agreement == 1
    assert 0 < half.mean_kl < 0.1
    assert asked == ["cuda:0"] * 3
