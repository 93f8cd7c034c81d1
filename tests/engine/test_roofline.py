"""Operations and bytes against numbers worked out by hand.

The model: 2 layers, hidden size 8, 4 heads of 2 over 2 KV heads, intermediate size 16, 10 words, float32. A layer's projections have
q 64 + k 32 + v 32 + o 64 and 3 x 128, together 576 weights, and norms of 16; with the last norm of 8 that makes 1192.
"""

import pytest
from transformers import AutoConfig

from kvferry.engine.plan import GREEDY, Chunk, Draw, Plan, Scoring
from kvferry.engine.roofline import Ceilings, StepCosts, Throughput, Work

LAYER = {"q": 64, "k": 32, "v": 32, "o": 64, "gate": 128, "up": 128, "down": 128, "norms": 16}
WEIGHTS = {f"model.layers.{k}.{name}": count for k in range(2) for name, count in LAYER.items()}
WEIGHTS |= {"model.norm.weight": 8, "model.embed_tokens.weight": 80}
SIZES = dict(vocab_size=10, hidden_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
KV_BYTES = 64
"""2 layers x 2 (K, V) x 2 KV heads x 2 numbers x 4 bytes."""


def costs(window=0, weights="float32", kind="llama", num_weights=WEIGHTS, **sizes):
    config = AutoConfig.for_model(kind, **SIZES, **sizes)
    return StepCosts.of(config, num_weights, 2, 2, weights, KV_BYTES, window)


def chunk(start, length, is_drawing=False, num_scored=0):
    scoring = Scoring((1,) * num_scored, 0) if num_scored else None
    return Chunk(1, (1,) * length, start, (), Draw(GREEDY) if is_drawing else None, scoring)


def work(found, *chunks):
    return found.of_plan(Plan(1, chunks))


def test_a_models_weights_are_those_of_its_projections_and_its_output_layer():
    found = costs()
    assert (found.num_projection_weights, found.num_output_weights) == (1192, 80)
    assert found.flops_per_key == 2 * 2 * (4 * 2) * 2  # multiply-add, scores and values, heads, layers
    untied = costs(num_weights={**WEIGHTS, "lm_head.weight": 80})
    assert (untied.num_projection_weights, untied.num_output_weights) == (1192, 80)


def test_of_experts_a_row_meets_those_that_it_is_sent_to():
    """4 of 384 weights in each layer, instead of gate, up and down; and 32 that choose 2 of them."""
    dense = {name: count for name, count in WEIGHTS.items() if not name.endswith(("gate", "up", "down"))}
    experts = {f"model.layers.{k}.mlp.experts.{e}.down_proj": 384 for k in range(2) for e in range(4)}
    routers = {f"model.layers.{k}.mlp.gate.weight": 32 for k in range(2)}
    for kind, name in (("qwen3_moe", "num_experts"), ("mixtral", "num_local_experts")):
        found = costs(kind=kind, num_weights={**dense, **experts, **routers}, num_experts_per_tok=2, **{name: 4})
        assert found.num_projection_weights == 424 + 64 + 2 * 2 * 384


@pytest.mark.parametrize(
    ("chunks", "window", "flops", "num_bytes"),
    [
        # 5 rows, 1 + 2 + 3 + 4 + 5 keys, one row of logits: 2 x 1192 x 5 + 2 x 80 + 64 x 15; all weights and 5 tokens
        ([chunk(0, 5, is_drawing=True)], 0, 13_040, 5408),
        # 3 rows, 5 + 6 + 7 keys, no logits: 2 x 1192 x 3 + 64 x 18; the output layer is not read
        ([chunk(4, 3)], 0, 8304, 4768 + 7 * 64),
        # two sequences of 8 and 20 tokens, a row each: 2 x 1192 x 2 + 2 x 80 x 2 + 64 x 28; weights once
        ([chunk(7, 1, is_drawing=True), chunk(19, 1, is_drawing=True)], 0, 6880, 5088 + 28 * 64),
        # 4 rows, 10 keys, logits for 3 targets and a draw: 2 x 1192 x 4 + 2 x 80 x 4 + 64 x 10
        ([chunk(0, 4, is_drawing=True, num_scored=3)], 0, 10_816, 5088 + 4 * 64),
        # 4 rows, 3 + 4 + 5 + 6 keys, logits for 4 targets
        ([chunk(2, 4, num_scored=4)], 0, 2 * 1192 * 4 + 2 * 80 * 4 + 64 * 18, 5088 + 6 * 64),
        # a window of 4 that the chunk does not reach
        ([chunk(0, 3)], 4, 2 * 1192 * 3 + 64 * 6, 4768 + 3 * 64),
        # one that it grows over: 1 + 2 + 3 + 4 + 4 + 4 keys
        ([chunk(0, 6)], 4, 2 * 1192 * 6 + 64 * 18, 4768 + 6 * 64),
        # 3 + 4 + 4
        ([chunk(2, 3)], 4, 2 * 1192 * 3 + 64 * 11, 4768 + 5 * 64),
        # one that is far behind: 4 keys a row; two rows see 5 tokens, one row 4
        ([chunk(50, 2)], 4, 2 * 1192 * 2 + 64 * 8, 4768 + 5 * 64),
        ([chunk(50, 1)], 4, 2 * 1192 + 64 * 4, 4768 + 4 * 64),
    ],
)
def test_a_steps_operations_and_bytes(chunks, window, flops, num_bytes):
    assert work(costs(window), *chunks) == Work(flops, num_bytes)


def test_coarser_weights_are_fewer_bytes_and_as_many_operations():
    exact, eight = (work(costs(weights=weights), chunk(0, 1)) for weights in ("float32", "int8"))
    assert (exact.num_bytes, eight.num_bytes) == (4768 + 64, 1192 * 1.0625 + 64)
    assert exact.flops == eight.flops == 2 * 1192 + 64


def test_a_step_is_no_faster_than_the_slower_of_both_ceilings():
    assert Work(1000, 50).floor_s(Ceilings(100, 10)) == 10
    assert Work(100, 500).floor_s(Ceilings(100, 10)) == 50


def test_throughput_counts_a_step_by_its_time():
    throughput = Throughput()
    throughput.stepped(Work(100, 10), 1.0)
    throughput.stepped(Work(0, 0), 0.0)
    throughput.stepped(Work(900, 90), 3.0)
    assert (throughput.flops_per_s, throughput.bytes_per_s) == (250, 25)
    throughput.stepped(Work(0, 0), 100.0)
    assert throughput.flops_per_s == pytest.approx(250 * 4 / 104)
