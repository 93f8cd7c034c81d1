"""The native decoder against transformers, on tiny random models."""

import json
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvferry.engine.load import load_engine
from kvferry.engine.native.decoder import NativeRunner
from kvferry.engine.plan import GREEDY, Chunk, Draw, Plan
from kvferry.engine.reference import Reference
from kvferry.errors import ConfigurationError

VARIANTS = {
    "grouped": dict(num_key_value_heads=2),
    "all heads": dict(num_key_value_heads=4),
    "tied": dict(num_key_value_heads=2, tie_word_embeddings=True),
    "scaled rope": dict(
        num_key_value_heads=1,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=10000.0,
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "wide heads": dict(num_key_value_heads=2, head_dim=32),
}


def make_checkpoint(directory, **changes):
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            **dict(
                vocab_size=199,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=3,
                num_attention_heads=4,
                max_position_embeddings=256,
                initializer_range=0.2,
            ),
            **changes,
        }
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=list(VARIANTS))
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), **VARIANTS[request.param])


@pytest.fixture(params=["native", "torch"])
def form(request, monkeypatch):
    """Which decoder runs: the C one, or the plain torch one that is taken where it cannot be had."""
    if request.param == "torch":
        monkeypatch.setattr("kvferry.engine.load.load_library", lambda: None)
    return request.param


def logits_after_each(runner, chunk):
    if isinstance(runner, NativeRunner):
        return torch.from_numpy(runner.all_logits(chunk))
    hidden = runner._model.forward(runner._batch(Plan(1, (chunk,))), runner._memory)
    return runner._model.logits(hidden[: len(chunk.tokens)])


@pytest.mark.parametrize("cut", [1, 7, 16, 64, 1000])
def test_logits_equal_transformers_however_the_prompt_is_cut(checkpoint, cut, form):
    engine = load_engine(checkpoint, 512)
    assert form in type(engine.runner).__name__.lower()
    tokens = [random.Random(k).randrange(199) for k in range(100)]
    expected = Reference(checkpoint).logits(tokens)
    slots = tuple(random.Random(1).sample(range(1, 33), 7))
    runner = engine.runner
    with torch.inference_mode():
        for start in range(0, len(tokens), cut):
            end = min(start + cut, len(tokens))
            chunk = Chunk(1, tuple(tokens[start:end]), start, slots[: -(-end // 16)], None)
            logits = logits_after_each(runner, chunk)
            assert torch.allclose(logits, expected[start:end], atol=1e-4)


def test_a_mixed_step_gives_each_sequence_its_own_tokens(checkpoint, form):
    engine = load_engine(checkpoint, 2048)
    reference = Reference(checkpoint)
    prompts = [
        [random.Random(f"{n} {k}").randrange(199) for k in range(length)]
        for n, length in enumerate((1, 15, 16, 33, 90))
    ]
    answers = [[] for _ in prompts]
    for step in range(6):
        chunks = []
        for number, prompt in enumerate(prompts):
            tokens = [*prompt, *answers[number]]
            start = 0 if step == 0 else len(tokens) - 1
            slots = tuple(range(1 + 10 * number, 1 + 10 * number + -(-len(tokens) // 16)))
            chunks.append(Chunk(number, tuple(tokens[start:]), start, slots, Draw(GREEDY)))
        result = engine.runner.run(Plan(step, tuple(chunks)))
        assert not result.failures
        for number, token in result.tokens.items():
            answers[number].append(token)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == reference.greedy(prompt, 6)[0]


def test_rows_that_are_not_finite_fail_alone(tmp_path, form):
    engine = load_engine(make_checkpoint(tmp_path), 512)
    engine.memory.blocks[5].fill_(float("nan"))
    draw = Draw(GREEDY)
    plan = Plan(1, (Chunk(1, (3,), 16, (5, 6), draw), Chunk(2, (3,), 0, (7,), draw)))
    result = engine.runner.run(plan)
    assert set(result.failures) == {1}
    assert set(result.tokens) == {2}


def test_memory_that_was_never_written_does_not_leak_into_attention(tmp_path, form):
    engine = load_engine(make_checkpoint(tmp_path), 512)
    plan = Plan(1, (Chunk(1, (3, 4, 5), 0, (5,), Draw(GREEDY)),))
    clean = engine.runner.run(plan).tokens
    engine.memory.blocks.fill_(float("nan"))
    assert engine.runner.run(plan).tokens == clean


def random_schedule(runner, prompts, seed):
    """All logits of each prompt, computed in random company, cuts and slots; bits by prompt."""
    rng = random.Random(seed)
    free = list(range(1, 129))
    rng.shuffle(free)
    tables = [tuple(free.pop() for _ in range(-(-len(prompt) // 16))) for prompt in prompts]
    done, logits = [0] * len(prompts), [[] for _ in prompts]
    while any(count < len(prompt) for count, prompt in zip(done, prompts, strict=True)):
        chunks, owners = [], []
        for number, prompt in enumerate(prompts):
            count = min(rng.choice([0, 1, 2, 5, 16, 33]), len(prompt) - done[number])
            if count:
                end = done[number] + count
                draw = Draw(GREEDY)
                chunks.append(
                    Chunk(
                        number, tuple(prompt[done[number] : end]), done[number], tables[number][: -(-end // 16)], draw
                    )
                )
                owners.append((number, end))
                done[number] = end
        if chunks:
            for (number, end), row in zip(owners, runner.logits(tuple(chunks), list(chunks)), strict=True):
                logits[number].append((end, row.tobytes()))
    return logits


@pytest.mark.parametrize("weights", ["float32", "float16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_positions_bits_depend_on_its_prefix_alone(checkpoint, weights, threads):
    """Whatever shares the step, however the prompt is cut, wherever its blocks are, with one thread or two."""
    alone = load_engine(checkpoint, 2048, weights=weights).runner
    shared = load_engine(checkpoint, 2048, weights=weights, num_threads=threads).runner
    rng = random.Random(7)
    prompts = [[rng.randrange(199) for _ in range(rng.randrange(1, 100))] for _ in range(9)]
    expected = []
    for prompt in prompts:
        chunk = Chunk(1, tuple(prompt), 0, tuple(range(1, 1 + -(-len(prompt) // 16))), None)
        expected.append([row.tobytes() for row in alone.all_logits(chunk)])
    for seed in range(12):
        for prompt_bits, got in zip(expected, random_schedule(shared, prompts, seed), strict=True):
            for end, bits in got:
                assert bits == prompt_bits[end - 1]


def test_float16_weights_stay_close_to_float32(checkpoint):
    tokens = tuple(random.Random(k).randrange(199) for k in range(60))
    chunk = Chunk(1, tokens, 0, (1, 2, 3, 4), None)
    exact, half = (
        load_engine(checkpoint, 512, weights=kind).runner.all_logits(chunk) for kind in ("float32", "float16")
    )
    assert 0 < abs(exact - half).max() < 0.02 * abs(exact).max()


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(model_type="mamba"), "model_type"),
        (dict(hidden_act="gelu"), "hidden_act"),
        (dict(attention_bias=True), "attention_bias"),
        (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)), "rope type 'dynamic'"),
        (dict(rope_scaling=dict(type="dynamic", factor=2.0), rope_parameters=None), "rope type 'dynamic'"),
        (dict(hidden_size=32), "shape"),
        (dict(num_hidden_layers=4), "model.layers.3"),
        (dict(num_hidden_layers=2), "unknown tensors"),
    ],
)
def test_a_checkpoint_that_cannot_be_run_is_refused_by_name(tmp_path, changes, named):
    change_config(make_checkpoint(tmp_path), **changes)
    with pytest.raises(ConfigurationError, match=named):
        load_engine(tmp_path, 512)


def test_a_checkpoint_without_safetensors_is_refused(tmp_path):
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match="safetensors only"):
        load_engine(tmp_path, 512)


def test_the_model_id_depends_on_weights_rope_and_block_size(tmp_path):
    one = load_engine(make_checkpoint(tmp_path / "a"), 512).identity.model_id
    assert load_engine(make_checkpoint(tmp_path / "b"), 512).identity.model_id == one
    assert load_engine(tmp_path / "a", 512, block_size=32).identity.model_id != one
    assert load_engine(tmp_path / "a", 512, weights="float16").identity.model_id != one
    change_config(tmp_path / "b", rope_parameters=dict(rope_type="default", rope_theta=5e4))
    assert load_engine(tmp_path / "b", 512).identity.model_id != one
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path / "a")).save_pretrained(tmp_path / "c")
    assert load_engine(tmp_path / "c", 512).identity.model_id != one


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (dict(kv_tokens=8), "kv_tokens"),
        (dict(block_size=24), "block size"),
        (dict(context_tokens=999), "context_tokens"),
        (dict(weights="int3"), "float16"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(tmp_path, arguments, named):
    make_checkpoint(tmp_path)
    with pytest.raises(ConfigurationError, match=named):
        load_engine(tmp_path, **{"kv_tokens": 512, **arguments})
