"""Other architectures, through transformers' own modules over the paged pool, against transformers alone; tiny random models."""

import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from kvferry.engine.attention import Span, paged_attention, paged_attention_operator
from kvferry.engine.checkpoint import read_config
from kvferry.engine.modules_attention import ATTENTION
from kvferry.engine.modules_load import load_modules
from kvferry.engine.modules_shape import modules_shape
from kvferry.engine.plan import GREEDY, Chunk, Draw, Plan
from kvferry.engine.reference import Reference
from kvferry.engine.torch_memory import TorchMemory
from kvferry.errors import ConfigurationError

VOCABULARY = 199
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
ARCHITECTURES = {
    "llama": dict(model_type="llama"),
    "qwen2": dict(model_type="qwen2"),
    "qwen2 with windows": dict(model_type="qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3": dict(model_type="qwen3", head_dim=32),
    "mistral": dict(model_type="mistral", sliding_window=24),
    "gemma": dict(model_type="gemma", head_dim=16, num_key_value_heads=1),
    "gemma2": dict(
        model_type="gemma2",
        head_dim=32,
        sliding_window=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=20,
    ),
    "gemma3": dict(model_type="gemma3_text", head_dim=32, sliding_window=24, query_pre_attn_scalar=20),
    "qwen3 moe": dict(model_type="qwen3_moe", head_dim=16, **EXPERTS),
    "mixtral": dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
    "phi3": dict(model_type="phi3", sliding_window=24),
    "olmo2": dict(model_type="olmo2"),
    "granite": dict(model_type="granite", attention_multiplier=0.1, logits_scaling=2.0, residual_multiplier=0.5),
    "gpt oss": dict(
        model_type="gpt_oss",
        head_dim=32,
        sliding_window=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=YARN,
    ),
    "gpt2": dict(model_type="gpt2", num_key_value_heads=None),
    "opt": dict(model_type="opt", num_key_value_heads=None, ffn_dim=96, word_embed_proj_dim=64),
    "gpt neox": dict(model_type="gpt_neox", num_key_value_heads=None),
    "phi": dict(model_type="phi"),
    "cohere2": dict(model_type="cohere2", sliding_window=24, sliding_window_pattern=2),
    "smollm3": dict(model_type="smollm3"),
    "starcoder2": dict(model_type="starcoder2", sliding_window=24),
    "glm4": dict(model_type="glm4", head_dim=16),
}


def make_checkpoint(directory, **changes):
    torch.manual_seed(0)
    settings = {name: value for name, value in {**SIZES, **changes}.items() if value is not None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("bias", "sinks", "norm.weight", "layernorm.weight")):
                tensor.add_(torch.randn_like(tensor) * 0.3)
    model.save_pretrained(directory)
    return directory


def load(directory, num_slots=128, block_size=16):
    config = read_config(directory)
    shape = modules_shape(directory, config)
    memory = TorchMemory(num_slots, shape.num_layers, shape.num_kv_heads, block_size, shape.head_size)
    return load_modules(directory, config, memory)


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), **ARCHITECTURES[request.param])


@pytest.fixture(scope="module")
def runner(checkpoint):
    return load(checkpoint)


@pytest.fixture(scope="module")
def reference(checkpoint):
    """transformers' own attention, by the plainest of its forms: sdpa knows neither softcaps nor sinks."""
    found = Reference(checkpoint)
    found._model.set_attn_implementation("eager")
    return found


def tokens_of(seed, count):
    return [random.Random(f"{seed} {k}").randrange(3, VOCABULARY) for k in range(count)]


@pytest.mark.parametrize("cut", [1, 7, 16, 64, 1000])
def test_logits_equal_transformers_however_the_prompt_is_cut(runner, reference, cut):
    tokens = tokens_of(0, 100)
    expected = reference.logits(tokens)
    slots = tuple(random.Random(cut).sample(range(1, 129), 7))
    for start in range(0, len(tokens), cut):
        end = min(start + cut, len(tokens))
        logits = runner.all_logits(Chunk(1, tuple(tokens[start:end]), start, slots[: -(-end // 16)]))
        assert logits.dtype == np.float32
        assert torch.allclose(torch.from_numpy(logits), expected[start:end], atol=1e-4, rtol=1e-4)


def test_a_mixed_step_gives_each_sequence_its_own_tokens(runner, reference):
    prompts = [tokens_of(number, length) for number, length in enumerate((1, 15, 16, 33, 60))]
    answers = [[] for _ in prompts]
    for step in range(4):
        chunks = []
        for number, prompt in enumerate(prompts):
            tokens = [*prompt, *answers[number]]
            start = 0 if step == 0 else len(tokens) - 1
            slots = tuple(range(1 + 10 * number, 1 + 10 * number + -(-len(tokens) // 16)))
            chunks.append(Chunk(number, tuple(tokens[start:]), start, slots, Draw(GREEDY)))
        result = runner.run(Plan(step, tuple(chunks)))
        assert not result.failures
        for number, token in result.tokens.items():
            answers[number].append(token)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == reference.greedy(prompt, 4)[0]


def test_logits_come_in_the_order_they_are_asked_for(runner, reference):
    prompts = [tokens_of(number, length) for number, length in enumerate((20, 3, 9))]
    chunks = tuple(
        Chunk(number, tuple(prompt), 0, (1 + 2 * number, 2 + 2 * number)) for number, prompt in enumerate(prompts)
    )
    asked = [2, 0]
    logits = torch.from_numpy(runner.logits(chunks, [chunks[number] for number in asked]))
    expected = torch.stack([reference.logits(prompts[number])[-1] for number in asked])
    assert torch.allclose(logits, expected, atol=1e-4, rtol=1e-4)


def test_memory_that_was_never_written_does_not_leak_into_attention(runner):
    plan = Plan(1, (Chunk(1, (3, 4, 5), 0, (5,)), Chunk(2, tuple(tokens_of(1, 40)), 0, (9, 2, 7))))
    clean = runner.logits(plan.chunks, list(plan.chunks))
    runner.memory.blocks.fill_(float("nan"))
    assert (runner.logits(plan.chunks, list(plan.chunks)) == clean).all()
    written = ~runner.memory.blocks.isnan().all(dim=(1, 2, 3, 4))
    assert written.nonzero().flatten().tolist() == [2, 5, 7, 9]


def test_a_step_that_wants_no_logits_still_writes_its_kv(runner, reference):
    tokens = tokens_of(3, 40)
    assert runner.run(Plan(1, (Chunk(1, tuple(tokens[:39]), 0, (4, 8, 6)),))).tokens == {}
    logits = runner.all_logits(Chunk(1, (tokens[39],), 39, (4, 8, 6)))
    assert torch.allclose(torch.from_numpy(logits), reference.logits(tokens)[39:], atol=1e-4, rtol=1e-4)


def test_rows_that_are_not_finite_fail_alone(tmp_path):
    runner = load(make_checkpoint(tmp_path, model_type="llama"))
    runner.memory.blocks[5].fill_(float("nan"))
    draw = Draw(GREEDY)
    result = runner.run(Plan(1, (Chunk(1, (3,), 16, (5, 6), draw), Chunk(2, (3,), 0, (7,), draw))))
    assert set(result.failures) == {1}
    assert set(result.tokens) == {2}


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_any_block_size_gives_the_same_logits(tmp_path, block_size):
    make_checkpoint(tmp_path, **ARCHITECTURES["mistral"])
    tokens = tokens_of(0, 100)
    runner = load(tmp_path, 8, block_size)
    slots = (7, 2, 5, 1, 6, 3, 8)
    runner.all_logits(Chunk(1, tuple(tokens[:70]), 0, slots))
    logits = runner.all_logits(Chunk(1, tuple(tokens[70:]), 70, slots))
    assert torch.allclose(torch.from_numpy(logits), Reference(tmp_path).logits(tokens)[70:], atol=1e-4)


def test_a_half_precision_checkpoint_is_run_in_float32(tmp_path):
    make_checkpoint(tmp_path / "a", model_type="qwen2")
    AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.bfloat16).save_pretrained(tmp_path / "b")
    tokens = tokens_of(0, 20)
    logits = load(tmp_path / "b").all_logits(Chunk(1, tuple(tokens), 0, (1, 2)))
    assert torch.allclose(torch.from_numpy(logits), Reference(tmp_path / "b").logits(tokens), atol=1e-4)


def test_the_text_part_of_a_model_of_several_parts_is_run(tmp_path):
    text = {**SIZES, "head_dim": 16, "sliding_window": 8}
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, image_size=28)
    ids = dict(boi_token_index=3, eoi_token_index=4, image_token_index=5)
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=1, **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokens = tokens_of(0, 40)
    tokens = [token if token > 5 else 6 for token in tokens]
    logits = load(tmp_path).all_logits(Chunk(1, tuple(tokens), 0, (1, 2, 3)))
    assert torch.allclose(torch.from_numpy(logits), Reference(tmp_path).logits(tokens), atol=1e-4, rtol=1e-4)


def test_the_shape_sizes_the_pool(tmp_path):
    shape = modules_shape(tmp_path, read_config(make_checkpoint(tmp_path, model_type="qwen3", head_dim=32)))
    assert (shape.num_layers, shape.num_kv_heads, shape.head_size) == (3, 2, 32)
    assert (shape.vocabulary_size, shape.context_tokens) == (VOCABULARY, 256)


def test_loading_tells_its_progress(tmp_path):
    make_checkpoint(tmp_path, model_type="llama")
    shares = []
    load_modules(tmp_path, read_config(tmp_path), TorchMemory(4, 3, 2, 16, 16), shares.append)
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[-1] == 1


# ------------------------------------------------------------------------------------------------------------- refusals

LONG = dict(rope_theta=1e4, rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8)
LINEAR = dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
MAMBA_MIXER = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=8, mamba_chunk_size=8, mamba_expand=2)
LATENT = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(model_type="mamba"), "layer_types has 'linear_attention' for layer 0"),
        (dict(model_type="recurrent_gemma", lru_width=64), "layer_types"),
        (dict(model_type="bamba", attn_layer_indices=[1], **MAMBA_MIXER), "layer_types has 'linear_attention'"),
        (dict(model_type="qwen3_next", **LINEAR, **EXPERTS), "layer_types has 'linear_attention'"),
        (dict(model_type="llama", rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)), "'dynamic'"),
        (
            dict(model_type="phi3", original_max_position_embeddings=64, rope_parameters=LONG),
            "rope type 'longrope'",
        ),
        (dict(model_type="deepseek_v2", num_key_value_heads=4, **LATENT), "kv_lora_rank is 16"),
        (dict(model_type="deepseek_v3", num_key_value_heads=4, **LATENT), "kv_lora_rank is 16"),
        (dict(model_type="gemma3n_text", num_kv_shared_layers=1), "num_kv_shared_layers is 1"),
        (dict(model_type="t5", num_layers=2, d_kv=16), "no language model|is_encoder_decoder"),
        (dict(model_type="bart", d_model=64), "is_encoder_decoder"),
        (dict(model_type="llama4_text", attention_chunk_size=32), "layer_types has 'chunked_attention'"),
        (dict(model_type="unheard_of"), "model_type 'unheard_of'"),
        (dict(model_type="llama", quantization_config=dict(quant_method="awq")), "quantization_config"),
        (dict(model_type="llama", num_hidden_layers="three"), "does not accept|num_hidden_layers"),
        (dict(model_type="llama", head_dim=16, v_head_dim=8), "head_dim 16, v_head_dim 8"),
        (dict(model_type="llama", is_causal=False), "is_causal"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_an_architecture_that_cannot_be_run_is_refused_before_its_weights_are_read(tmp_path, changes, named):
    settings = {name: value for name, value in {**SIZES, **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigurationError, match=named):
        load_modules(tmp_path, read_config(tmp_path), TorchMemory(4, 3, 2, 16, 16))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(model_type="rwkv", context_length=64), "layers 0, 1, 2 never called"),
        (dict(model_type="bamba", attn_layer_indices=[1], **MAMBA_MIXER), "layers 0, 2 never called"),
        (dict(model_type="falcon_h1", mamba_d_ssm=128, head_dim=16, **MAMBA_MIXER), "logits differ"),
        (
            dict(model_type="llama4_text", attention_chunk_size=32, intermediate_size_mlp=64, head_dim=16,
                 num_local_experts=2, layer_types=["chunked_attention"] * 3, no_rope_layers=[1, 1, 1]),
            "layer 0 masks otherwise",
        ),
        (dict(model_type="phimoe", sliding_window=24, num_local_experts=2, num_experts_per_tok=1), "masks otherwise"),
        (dict(model_type="bert", num_key_value_heads=None, is_decoder=False), "sees later tokens"),
        (dict(model_type="diffllama"), "layers 0, 1, 2 called the attention function more than once"),
        (dict(model_type="doge", keep_window_size=8), "does not run over paged attention"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_model_whose_state_or_mask_is_not_ours_is_refused_by_trying_it(tmp_path, monkeypatch, changes, named):
    """Even those whose configuration would have told."""
    monkeypatch.setattr("kvferry.engine.modules_shape._refuse_layers", lambda path, config: None)
    make_checkpoint(tmp_path, **changes)
    with pytest.raises(ConfigurationError, match=named) as caught:
        load(tmp_path)
    assert str(tmp_path) in caught.value.message


def test_a_mask_of_the_models_own_is_refused(tmp_path, monkeypatch):
    make_checkpoint(tmp_path, model_type="llama")
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, ATTENTION, lambda **_: torch.zeros(1))
    with pytest.raises(ConfigurationError, match="layer 0 has a mask of the model's own"):
        load(tmp_path)


def change_tensors(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is missing"),
        (lambda t: t.update({"model.layers.1.odd.weight": torch.ones(3)}), "model.layers.1.odd.weight is unknown"),
        (lambda t: t.update({"model.layers.7.mlp.up_proj.weight": torch.ones(96, 64)}), "layers.7.* is unknown"),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), r"model.norm.weight has shape \(63,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, change, named):
    change_tensors(make_checkpoint(tmp_path, model_type="qwen3", head_dim=16), change)
    with pytest.raises(ConfigurationError, match=named) as caught:
        load(tmp_path)
    assert str(tmp_path) in caught.value.message


def test_tables_of_rotary_positions_in_a_checkpoint_are_no_reason_to_refuse_it(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    change_tensors(make_checkpoint(tmp_path, model_type="mistral"), lambda tensors: tensors.update(extra))
    load(tmp_path)


def test_a_checkpoint_without_safetensors_is_refused(tmp_path):
    make_checkpoint(tmp_path, model_type="qwen2")
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="safetensors only"):
        load(tmp_path)


def test_a_pool_of_another_shape_is_refused(tmp_path):
    make_checkpoint(tmp_path, model_type="qwen2")
    with pytest.raises(ConfigurationError, match=r"a pool of .*\(3, 2, 16\), not \(3, 4, 16\)"):
        load_modules(tmp_path, read_config(tmp_path), TorchMemory(4, 3, 4, 16, 16))


@pytest.mark.parametrize(
    ("keywords", "named"),
    [(dict(position_bias=torch.zeros(1)), "position_bias"), (dict(indices=torch.zeros(1)), "indices"),
     (dict(is_causal=False), "later tokens"), (dict(kvferry_batch=None), "which layer and step")],
)  # fmt: skip
def test_an_attention_keyword_that_is_not_known_is_refused(tmp_path, monkeypatch, keywords, named):
    runner = load(make_checkpoint(tmp_path, model_type="llama"))
    forward = runner.model.forward
    monkeypatch.setattr(runner.model, "forward", lambda **given: forward(**{**given, **keywords}))
    with pytest.raises(ConfigurationError, match=named):
        runner.all_logits(Chunk(1, (3, 4), 0, (1,)))


# ------------------------------------------------------------------------------------------------------------ attention


def plain_attention(query, key, value, start, scale, window, softcap, sinks):
    """One row and one head at a time, in float64: [rows, heads, dim] over [context, KV heads, dim]."""
    rows, heads, _ = query.shape
    groups = heads // key.shape[1]
    output = torch.zeros_like(query, dtype=torch.float64)
    for row in range(rows):
        position = start + row
        first = max(position - window + 1, 0) if window else 0
        for head in range(heads):
            scores = key[first : position + 1, head // groups].double() @ query[row, head].double() * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum() + (sinks[head].double().exp() if sinks is not None else 0)
            output[row, head] = weights @ value[first : position + 1, head // groups].double() / total
    return output


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 1, 7, 16, 17, 500])
def test_paged_attention_equals_its_definition(monkeypatch, window, softcap, sinks):
    monkeypatch.setattr("kvferry.engine.attention.PIECE_SCORES", 1)
    torch.manual_seed(0)
    memory = TorchMemory(20, 2, 2, 16, 8)
    memory.blocks.fill_(float("nan"))
    spans, expected, rows = [], [], 0
    free = torch.randperm(20) + 1
    for start, count in ((0, 1), (0, 40), (37, 20), (63, 1), (64, 1)):
        context = start + count
        slots, free = free[: -(-context // 16)], free[-(-context // 16) :]
        key, value = torch.randn(2, context, 2, 8)
        for position in range(context):
            memory.keys[slots[position // 16], 1, :, :, position % 16] = key[position]
            memory.values[slots[position // 16], 1, :, position % 16] = value[position]
        query = torch.randn(count, 4, 8)
        spans.append((Span(rows, rows + count, start, slots), query))
        expected.append(plain_attention(query, key, value, start, 0.4, window, softcap, sinks))
        rows += count
    queries = torch.cat([query for _, query in spans] + [torch.randn(2, 4, 8)])
    spans = [span for span, _ in spans]
    got = paged_attention(queries, memory.keys, memory.values, 1, spans, 0.4, window, softcap, sinks)
    assert torch.allclose(got[:rows], torch.cat(expected).float(), atol=1e-5)
    assert not got[rows:].any()
    lists = [[0, *(span.end for span in spans)], [span.start for span in spans]]
    lists.append([0, *np.cumsum([len(span.slots) for span in spans]).tolist()])
    numbers = [torch.tensor(values, dtype=torch.int32) for values in lists]
    table = torch.cat([span.slots for span in spans]).int()
    arguments = (queries, memory.keys, memory.values, 1, *numbers, table, 0.4, window, softcap, sinks)
    assert torch.equal(torch.ops.kvferry.paged_attention(*arguments), got)
    torch.library.opcheck(paged_attention_operator, arguments, test_utils=("test_schema", "test_faketensor"))
