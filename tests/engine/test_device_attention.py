"""Attention as a device computes it, on CPU tensors, against the reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine import device_attention
from kvferry.engine.attention import reference_operator
from kvferry.engine.device_attention import StepSpans, attend_on_device
from kvferry.engine.torch_memory import TorchMemory

NUM_SLOTS = 40
SPANS = st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 1, 2, 17, 40])), min_size=1, max_size=5)
WINDOWS = st.sampled_from([0, 1, 7, 16, 17, 50, 500])


def on_device(queries, keys, values, layer, begins, starts, tables, table, *how):
    """With the reference's arguments, which a step has on the host."""
    numbers = (one.numpy() for one in (begins, starts, tables, table))
    spans = StepSpans(*numbers, block_size=keys.shape[-1], device=keys.device)
    return attend_on_device(queries, keys, values, layer, spans, *how)


def numbers_of(spans, seed):
    """begins, starts, tables and table of spans (start, rows) with slots of their own."""
    free = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(seed)) + 1
    counts = [-(-(start + rows) // 16) for start, rows in spans]
    begins = torch.tensor([0, *(rows for _, rows in spans)]).cumsum(0)
    starts = torch.tensor([start for start, _ in spans])
    tables = torch.tensor([0, *counts]).cumsum(0)
    return [one.to(torch.int32) for one in (begins, starts, tables, free[: sum(counts)])]


def memory_of(num_kv_heads, dtype="float32"):
    memory = TorchMemory(NUM_SLOTS, 2, num_kv_heads, 16, 8, dtype)
    memory.blocks.copy_(torch.randn_like(memory.blocks))
    memory.blocks[0] = torch.nan
    return memory


@given(
    SPANS, WINDOWS, st.sampled_from([0.0, 1.5]), st.booleans(), st.sampled_from([1, 2]), st.sampled_from([1, 3]),
    st.sampled_from([(1 << 16, 1 << 20), (100, 1), (32, 700)]), st.integers(0, 100),
)  # fmt: skip
def test_it_equals_the_reference(spans, window, softcap, has_sinks, num_kv_heads, groups, sizes, seed):
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("GROUP_KEYS", "PIECE_SCORES"), sizes, strict=True):
            patch.setattr(device_attention, name, size)
        torch.manual_seed(seed)
        memory, numbers = memory_of(num_kv_heads), numbers_of(spans, seed)
        queries = torch.randn(int(numbers[0][-1]) + 2, num_kv_heads * groups, 8)
        sinks = torch.randn(num_kv_heads * groups) if has_sinks else None
        arguments = (queries, memory.keys, memory.values, 1, *numbers, 0.4, window, softcap, sinks)
        assert torch.allclose(on_device(*arguments), reference_operator(*arguments), atol=1e-5)


@pytest.mark.parametrize("kv", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_whatever_the_queries_and_the_kv_are_only_the_result_is_rounded(dtype, kv, softcap):
    torch.manual_seed(0)
    memory, numbers = memory_of(2, kv), numbers_of([(63, 1), (0, 40), (5, 1)], 0)
    queries = torch.randn(42, 4, 8).to(dtype)
    arguments = (queries, memory.keys, memory.values, 0, *numbers, 0.4, 0, softcap, None)
    got, expected = on_device(*arguments), reference_operator(*arguments)
    assert got.dtype == dtype
    coarser = max(torch.finfo(dtype).eps, torch.finfo(memory.keys.dtype).eps) if dtype != torch.float32 else 0
    assert torch.allclose(got.float(), expected.float(), atol=1e-5 + 2 * coarser)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_other(part, window):
    torch.manual_seed(0)
    spans = [(0, 40), (30, 1), (20, 1)]
    memory, numbers = memory_of(2), numbers_of(spans, 1)
    table = numbers[3].tolist()
    bad = getattr(memory, part).transpose(-1, -2) if part == "keys" else memory.values
    bad[table[1], 0, :, 4] = torch.inf  # the first span's position 20
    bad[table[3 + 1], 0, :, 15] = torch.nan  # behind the second span's end
    bad[table[3 + 2 + 1], 0, :, 5] = torch.nan  # behind the third span's end
    queries = torch.randn(42, 4, 8)
    got = on_device(queries, memory.keys, memory.values, 0, *numbers, 0.4, window, 0.0, None)
    is_bad = ~got.isfinite().flatten(1).all(1)
    assert is_bad.nonzero().flatten().tolist() == list(range(20, 29 if window else 40))
