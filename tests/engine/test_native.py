"""The native decoder against transformers, on tiny random models of each family; and that a position's bits depend on its prefix alone."""

import gc
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvferry.engine.load import EngineSettings, load_engine
from kvferry.engine.native.family import rope_tables
from kvferry.engine.native.library import load_library, processor_levels
from kvferry.engine.plan import GREEDY, Chunk, Draw, Plan
from kvferry.engine.reference import Reference
from kvferry.errors import ConfigurationError
from kvferry.messages import Sampling

LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN_ROPE = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
FAMILIES = {
    "llama": dict(model_type="llama", num_key_value_heads=2),
    "llama with all heads": dict(model_type="llama", num_key_value_heads=4),
    "llama, tied": dict(model_type="llama", num_key_value_heads=2, tie_word_embeddings=True),
    "llama, scaled rope": dict(model_type="llama", num_key_value_heads=1, rope_parameters=LLAMA3_ROPE),
    "llama, yarn": dict(model_type="llama", num_key_value_heads=2, rope_parameters=YARN_ROPE),
    "llama, wide heads": dict(model_type="llama", num_key_value_heads=2, head_dim=64),
    "mistral": dict(model_type="mistral", num_key_value_heads=2, head_dim=32, sliding_window=None),
    "mistral, window": dict(model_type="mistral", num_key_value_heads=1, head_dim=16, sliding_window=21),
    "qwen2": dict(model_type="qwen2", num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", num_key_value_heads=2, head_dim=32),
}
KINDS = ("float32", "float16", "bfloat16", "int8")


def make_checkpoint(directory, **changes):
    torch.manual_seed(0)
    settings = {
        **dict(
            model_type="llama",
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
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                tensor.add_(torch.randn_like(tensor) * 0.3)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_type="default", rope_theta=5e5),
        dict(rope_type="linear", rope_theta=1e4, factor=3.0),
        LLAMA3_ROPE,
        YARN_ROPE,
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_tables_are_those_of_transformers_bit_for_bit(rope):
    config = AutoConfig.for_model("llama", max_position_embeddings=512, rope_parameters=dict(rope))
    cosine, sine = rope_tables(config, 300)
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(300)[None])
    assert torch.equal(cosine, expected[0][0])
    assert torch.equal(sine, expected[1][0])
    assert config.rope_parameters["rope_type"] == rope["rope_type"]


def load(directory, kv_tokens=512, **settings):
    return load_engine(directory, EngineSettings(kv_tokens, **settings))


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), **FAMILIES[request.param])


@pytest.fixture(params=["native", "modules"])
def form(request, monkeypatch):
    """Which engine runs it: the C decoder, or transformers' modules, where that cannot be had."""
    if request.param == "modules":
        monkeypatch.setattr("kvferry.engine.load.load_library", lambda: None)
    return request.param


@pytest.mark.parametrize("cut", [1, 7, 16, 64, 1000])
def test_logits_equal_transformers_however_the_prompt_is_cut(checkpoint, cut, form):
    engine = load(checkpoint, 512)
    assert form in type(engine.runner).__name__.lower()
    tokens = [random.Random(k).randrange(199) for k in range(100)]
    expected = Reference(checkpoint).logits(tokens)
    slots = tuple(random.Random(1).sample(range(1, 33), 7))
    runner = engine.runner
    for start in range(0, len(tokens), cut):
        end = min(start + cut, len(tokens))
        chunk = Chunk(1, tuple(tokens[start:end]), start, slots[: -(-end // 16)], None)
        logits = torch.from_numpy(runner.all_logits(chunk))
        assert torch.allclose(logits, expected[start:end], atol=1e-4)


def test_a_mixed_step_gives_each_sequence_its_own_tokens(checkpoint, form):
    engine = load(checkpoint, 2048)
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
    engine = load(make_checkpoint(tmp_path), 512)
    engine.memory.blocks[5].fill_(float("nan"))
    draw = Draw(GREEDY)
    plan = Plan(1, (Chunk(1, (3,), 16, (5, 6), draw), Chunk(2, (3,), 0, (7,), draw)))
    result = engine.runner.run(plan)
    assert set(result.failures) == {1}
    assert set(result.tokens) == {2}


def test_a_token_that_is_not_finite_leaves_those_before_it_as_they_are(tmp_path, form):
    """KV is a function of its prefix: also where the prefix of another ends in a fault, in one chunk with it."""
    runner = load(make_checkpoint(tmp_path, num_key_value_heads=4)).runner
    tokens = [random.Random(k).randrange(9, 199) for k in range(40)]
    chunk = Chunk(1, tuple(tokens), 0, (1, 2, 3), None)
    clean = runner.all_logits(chunk)
    embedding = (
        runner._weights.embedding.clone() if form == "native" else runner.model.get_input_embeddings().weight.data
    )
    embedding[5] = float("nan")
    if form == "native":
        runner._weights.embedding = embedding
    faulty = runner.all_logits(Chunk(1, (*tokens[:30], 5, *tokens[31:]), 0, (4, 5, 6), None))
    assert abs(faulty[:30] - clean[:30]).max() < 1e-4
    assert not np.isfinite(faulty[30:]).any()


def test_memory_that_was_never_written_does_not_leak_into_attention(tmp_path, form):
    engine = load(make_checkpoint(tmp_path), 512)
    plan = Plan(1, (Chunk(1, (3, 4, 5), 0, (5,), Draw(GREEDY)),))
    clean = engine.runner.run(plan).tokens
    engine.memory.blocks.fill_(float("nan"))
    assert engine.runner.run(plan).tokens == clean


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv", ["float32", "bfloat16"])
def test_keys_that_a_row_does_not_see_may_be_anything(tmp_path, weights, kv):
    """Those behind it, and those before its window; both also where only one of a pair of keys is seen."""
    engine = load(make_checkpoint(tmp_path, **FAMILIES["mistral, window"]), weights=weights, kv=kv)
    runner, memory, window = engine.runner, engine.memory, 21
    tokens = tuple(random.Random(k).randrange(199) for k in range(70))
    clean = runner.all_logits(Chunk(1, tokens, 0, (1, 2, 3, 4, 5), None))
    assert np.isfinite(clean).all()
    for position in range(40, 70):
        runner.all_logits(Chunk(1, tokens, 0, (1, 2, 3, 4, 5), None))
        for unseen in (*range(position - window + 1), *range(position + 1, 80)):
            memory.keys[1 + unseen // 16, :, :, :, unseen % 16] = float("nan")
            memory.values[1 + unseen // 16, :, :, unseen % 16] = float("nan")
        logits = runner.all_logits(Chunk(1, tokens[position : position + 1], position, (1, 2, 3, 4, 5), None))
        assert logits[0].tobytes() == clean[position].tobytes()


LOUD = 198
"""A token whose embedding is scaled up."""


class RandomSchedule:
    """Prompts in random company, cuts and slots.

    Now and then one begins anew in other slots, as after a preemption, and its former ones are soon another's: there are few more than
    all need. What begins goes on behind whole blocks that another has computed of their common beginning.
    """

    def __init__(self, runner, prompts, seed):
        self._runner, self._prompts, self._rng = runner, prompts, random.Random(seed)
        self._tables, self._done = [()] * len(prompts), [0] * len(prompts)
        needs = [-(-len(prompt) // 16) for prompt in prompts]
        self._slots = range(1, 1 + sum(needs) + max(needs))
        self.bits = [[] for _ in prompts]
        """By prompt: (tokens, logits after the last of them)."""
        self.num_restarts = self.num_hits = 0

    def run(self):
        while any(count < len(prompt) for count, prompt in zip(self._done, self._prompts, strict=True)):
            chunks = [chunk for number in range(len(self._prompts)) if (chunk := self._next_chunk(number))]
            if chunks:
                rows = self._runner.logits(tuple(chunks), chunks)
                for chunk, row in zip(chunks, rows, strict=True):
                    self._done[chunk.sequence_id] = end = chunk.start + len(chunk.tokens)
                    self.bits[chunk.sequence_id].append((end, row.tobytes()))
        return self

    def _next_chunk(self, number):
        prompt = self._prompts[number]
        if self._done[number] < len(prompt) and self._rng.random() < (0.05 if self._tables[number] else 0.3):
            self._begin(number)
        start = self._done[number]
        end = min(start + self._rng.choice([0, 1, 2, 5, 16, 33]), len(prompt))
        if not self._tables[number] or end == start:
            return None
        return Chunk(number, tuple(prompt[start:end]), start, self._tables[number][: -(-end // 16)], Draw(GREEDY))

    def _begin(self, number):
        before, self._tables[number], self._done[number] = self._tables[number], (), 0
        shared = max((self._shared(number, other) for other in range(len(self._prompts))), key=len)
        taken = {slot for table in (before, *self._tables) for slot in table}
        num_own = -(-len(self._prompts[number]) // 16) - len(shared)
        own = self._rng.sample([slot for slot in self._slots if slot not in taken], num_own)
        self._tables[number], self._done[number] = (*shared, *own), 16 * len(shared)
        self.num_restarts += bool(before)
        self.num_hits += bool(shared)

    def _shared(self, number, other):
        """Slots of the whole blocks before the prompt's last token that `other` has, too."""
        mine, theirs, count = self._prompts[number], self._prompts[other], 0
        most = min(self._done[other], len(mine) - 1) // 16
        while count < most and mine[: 16 * (count + 1)] == theirs[: 16 * (count + 1)]:
            count += 1
        return self._tables[other][:count]


def random_prompts(rng):
    """Some of them begin alike; one is loud."""
    prompts = [[rng.randrange(LOUD) for _ in range(rng.randrange(1, 100))] for _ in range(6)]
    common = [rng.randrange(LOUD) for _ in range(60)]
    prompts += [[*common[: rng.randrange(16, 60)], *prompt[:39]] for prompt in prompts[:3]]
    return [*prompts, [LOUD] * rng.randrange(20, 60)]


def load_loud(checkpoint, **settings):
    runner = load(checkpoint, 2048, **settings).runner
    runner._weights.embedding = runner._weights.embedding.clone()
    runner._weights.embedding[LOUD] *= 1e4
    assert torch.isfinite(runner._weights.embedding).all()
    return runner


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize(("threads", "kv"), [(1, "float32"), (2, "float32"), (1, "bfloat16"), (2, "bfloat16")])
def test_a_positions_bits_depend_on_its_prefix_alone(checkpoint, weights, threads, kv):
    """Whatever shares the step, however the prompt is cut, wherever its blocks are and whoever computed them, before and after a
    preemption, beside a loud neighbour, with one thread or two."""
    alone = load_loud(checkpoint, weights=weights, kv=kv)
    shared = load_loud(checkpoint, weights=weights, kv=kv, num_threads=threads)
    prompts = random_prompts(random.Random(7))
    expected = []
    for prompt in prompts:
        chunk = Chunk(1, tuple(prompt), 0, tuple(range(1, 1 + -(-len(prompt) // 16))), None)
        expected.append([row.tobytes() for row in alone.all_logits(chunk)])
    schedules = [RandomSchedule(shared, prompts, seed).run() for seed in range(12)]
    for schedule in schedules:
        for prompt_bits, got in zip(expected, schedule.bits, strict=True):
            for end, bits in got:
                assert bits == prompt_bits[end - 1]
    assert min(sum(one.num_restarts for one in schedules), sum(one.num_hits for one in schedules)) > 12


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        (dict(weights="float16"), 0.02),
        (dict(weights="bfloat16"), 0.1),
        (dict(weights="int8"), 0.2),
        (dict(kv="bfloat16"), 0.1),
        (dict(weights="bfloat16", kv="bfloat16"), 0.1),
        (dict(weights="int8", kv="bfloat16"), 0.2),
    ],
)
def test_coarser_numbers_stay_close_to_float32(checkpoint, settings, share):
    tokens = tuple(random.Random(k).randrange(199) for k in range(60))
    chunk = Chunk(1, tokens, 0, (1, 2, 3, 4), None)
    exact, coarse = (load(checkpoint, **one).runner.all_logits(chunk) for one in (dict(), settings))
    assert 0 < abs(exact - coarse).max() < share * abs(exact).max()


@pytest.mark.parametrize("weights", KINDS)
def test_every_instruction_set_that_this_processor_has_agrees(checkpoint, weights, monkeypatch):
    """To rounding: their sums run in other orders."""
    tokens = tuple(random.Random(k).randrange(199) for k in range(60))
    chunk, found = Chunk(1, tokens, 0, (1, 2, 3, 4), None), []
    for level in processor_levels():
        monkeypatch.setattr("kvferry.engine.load.load_library", lambda name=level.name: load_library(name))
        found.append(load(checkpoint, weights=weights).runner.all_logits(chunk))
    tolerance = {"bfloat16": 0.01, "int8": 0.1}.get(weights, 1e-4)  # a rounding apart may be a step of theirs apart
    for other in found[1:]:
        assert abs(other - found[0]).max() <= tolerance * abs(found[0]).max()


def test_a_loud_neighbour_changes_nothing_of_int8_rows(tmp_path):
    runner = load(make_checkpoint(tmp_path), weights="int8").runner
    quiet = Chunk(1, (3, 4, 5), 0, (1,), Draw(GREEDY))
    alone = runner.logits((quiet,), [quiet])
    runner._weights.embedding = runner._weights.embedding.clone()
    runner._weights.embedding[9] *= 1e6
    loud = Chunk(2, (9, 9, 9), 0, (2,), Draw(GREEDY))
    assert runner.logits((loud, quiet), [quiet]).tobytes() == alone.tobytes()


def test_auto_takes_float16_and_float32_where_that_cannot_hold_a_weight(tmp_path):
    make_checkpoint(tmp_path)
    assert load(tmp_path, weights="auto").identity == load(tmp_path, weights="float16").identity
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 1e5
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"layers\.1\.mlp\.down_proj"):
        load(tmp_path, weights="float16")
    assert load(tmp_path, weights="auto").identity == load(tmp_path, weights="float32").identity


def test_resident_memory_is_flat_over_20_000_steps(tmp_path):
    """Batches of all sizes, sampled in all ways, after a warm-up."""
    runner = load(make_checkpoint(tmp_path), 4096).runner
    rng, process = random.Random(0), psutil.Process()
    samplings = [GREEDY, Sampling(1, 9, 1.0, top_p=0.9), Sampling(1, 9, 0.7, num_logprobs=3, repetition_penalty=1.2)]
    before = 0
    for step in range(20_000):
        chunks = []
        for number in range(rng.randrange(1, 5)):
            start, length = rng.randrange(0, 60), rng.choice([1, 1, 1, 7])
            slots = tuple(range(1 + 5 * number, 1 + 5 * number + -(-(start + length) // 16)))
            tokens = tuple(rng.randrange(199) for _ in range(length))
            chunks.append(Chunk(number, tokens, start, slots, Draw(rng.choice(samplings), 0, step)))
        runner.run(Plan(step, tuple(chunks)))
        if step == 2_000:
            gc.collect()
            before = process.memory_info().rss
    gc.collect()
    assert process.memory_info().rss - before < 4 * 1024 * 1024


LOADING = """
import sys
from pathlib import Path
from kvferry.engine.checkpoint import read_config
from kvferry.engine.load import EngineSettings, load_engine
read_config(Path(sys.argv[1]))  # imports what loading would
def kilobytes():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])
before, peak = kilobytes(), 0
def look(share):
    global peak
    peak = max(peak, kilobytes() - before)
engine = load_engine(Path(sys.argv[1]), EngineSettings(1024, weights=sys.argv[2]), look)
print(peak * 1024 / sum(one.nbytes for one in engine.runner._weights._kept if hasattr(one, "nbytes")))
"""


@pytest.mark.model
@pytest.mark.parametrize("weights", KINDS)
def test_loading_holds_little_more_than_the_weights(model_directory, weights):
    """At most 1.3 times the packed weights: a checkpoint's own pages are the file's."""
    command = [sys.executable, "-c", LOADING, str(model_directory), weights]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 1 < float(run.stdout) < 1.3


def flags_of_pages(address):
    """What the kernel says of the mapping that holds it."""
    mappings = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    for mapping in mappings:
        first, last = (int(bound, 16) for bound in mapping.split(maxsplit=1)[0].split("-"))
        if first <= address < last:
            return re.search("VmFlags: (.*)", mapping)[1].split()
    return []


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no large pages")
def test_weights_and_pool_lie_in_large_pages_where_the_system_has_them(tmp_path):
    """And each matrix from a cache line's beginning on."""
    engine = load(make_checkpoint(tmp_path, vocab_size=203))
    weights = engine.runner._weights
    matrices = [one.ctypes.data for one in weights._kept if isinstance(one, np.ndarray)]
    assert len(matrices) == 4 * 3 + 1
    assert not any(address % 64 for address in matrices)
    for address in (*matrices, engine.memory.address):
        assert "hg" in flags_of_pages(address)


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(model_type="mamba"), "layer_types"),
        (dict(model_type="no such"), "model_type"),
        (dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4)), "longrope"),
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
        load(tmp_path, 512)


def test_a_checkpoint_without_safetensors_is_refused(tmp_path):
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match="safetensors only"):
        load(tmp_path, 512)


def test_the_model_id_depends_on_weights_rope_and_block_size(tmp_path):
    one = load(make_checkpoint(tmp_path / "a"), 512).identity.model_id
    assert load(make_checkpoint(tmp_path / "b"), 512).identity.model_id == one
    assert load(tmp_path / "a", 512, block_size=32).identity.model_id != one
    assert load(tmp_path / "a", 512, weights="float16").identity.model_id != one
    change_config(tmp_path / "b", rope_parameters=dict(rope_type="default", rope_theta=5e4))
    assert load(tmp_path / "b", 512).identity.model_id != one
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "a")).save_pretrained(tmp_path / "c")
    assert load(tmp_path / "c", 512).identity.model_id != one


def test_the_numerics_id_names_the_number_of_threads_where_bits_may_depend_on_it(tmp_path, form):
    make_checkpoint(tmp_path)
    one, two = (load(tmp_path, num_threads=count).identity.numerics_id for count in (1, 2))
    assert (one == two) is (form == "native")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (dict(kv_tokens=8), "kv_tokens"),
        (dict(block_size=24), "block size"),
        (dict(context_tokens=999), "max_position_embeddings"),
        (dict(context_tokens=200, kv_tokens=128), "raise kv_tokens"),
        (dict(weights="int3"), "float16"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(tmp_path, arguments, named):
    make_checkpoint(tmp_path)
    with pytest.raises(ConfigurationError, match=named):
        load(tmp_path, **{"kv_tokens": 512, **arguments})
