"""A memory of two sides, on the CPU's torch device: whoever looks at one sees what was last written, to whichever."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.device_memory import DeviceMemory
from kvferry.engine.modules import ModulesRunner
from kvferry.engine.plan import Chunk
from kvferry.engine.torch_memory import TorchMemory

NUM_SLOTS = 5
HERE = torch.device("cpu")
SLOTS = st.lists(st.integers(1, NUM_SLOTS), min_size=1, max_size=NUM_SLOTS, unique=True)


def memory_of(dtype="float32"):
    return DeviceMemory(NUM_SLOTS, 2, 1, 16, 4, dtype, HERE)


def ints(slots):
    return np.array(slots, np.int32)


def fill(memory, slots, number):
    """As a reader does."""
    for slot in slots:
        np.frombuffer(memory.view(slot), np.float32)[:] = number
    memory.filled(slots)


def run_step(memory, read, written, number):
    """As a runner does; returns what it finds in each slot of `read` when it begins."""
    memory.begin_step(ints([*read, *written]), ints(written))
    found = [memory.blocks[slot].unique().tolist() for slot in read]
    for slot in written:
        memory.blocks[slot] = number
    memory.end_step()
    return found


def load(memory, slots):
    """As a source does: what the roads see."""
    memory.to_host(slots)
    return [np.unique(np.frombuffer(memory.view(slot), np.float32)).tolist() for slot in slots]


ACTIONS = st.lists(st.tuples(st.sampled_from(["fill", "step", "load"]), SLOTS, SLOTS), max_size=30)


@given(ACTIONS)
def test_every_look_at_a_slot_sees_what_was_last_written_to_it(actions):
    memory, truth = memory_of(), dict.fromkeys(range(1, NUM_SLOTS + 1), 0.0)
    for number, (action, slots, others) in enumerate(actions, start=1):
        if action == "load":
            assert load(memory, slots) == [[truth[slot]] for slot in slots]
            continue
        if action == "fill":
            fill(memory, slots, number)
        else:
            read = [slot for slot in others if slot not in slots]
            assert run_step(memory, read, slots, number) == [[truth[slot]] for slot in read]
        truth |= dict.fromkeys(slots, float(number))
    assert load(memory, list(truth)) == [[number] for number in truth.values()]
    assert run_step(memory, list(truth), [], 0) == [[number] for number in truth.values()]


def test_what_a_step_adds_to_a_slot_that_was_loaded_before_is_loaded_again():
    """A tail's slot has a row more with each step."""
    memory = memory_of()
    run_step(memory, [], [3], 1)
    assert load(memory, [3]) == [[1]]
    memory.begin_step(ints([3]), ints([3]))
    memory.keys[3, ..., 5] = 2
    memory.end_step()
    assert load(memory, [3]) == [[1, 2]]


def test_what_neither_side_has_changed_is_not_copied_again():
    memory = memory_of()
    run_step(memory, [], [1], 1)
    fill(memory, [2], 2)
    assert load(memory, [1, 2]) == run_step(memory, [1, 2], [], 0) == [[1], [2]]
    memory.blocks[1], memory._mirror.blocks[2] = 3, 3  # unseen
    assert load(memory, [1]) == [[1]]
    assert run_step(memory, [2], [], 0) == [[2]]


def test_a_step_that_fails_leaves_a_slot_that_can_be_filled():
    memory = memory_of()
    memory.begin_step(ints([2]), ints([2]))
    memory.blocks[2] = 7
    fill(memory, [2], 8)
    assert run_step(memory, [2], [], 0) == [[8]]
    assert load(memory, [2]) == [[8]]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_both_sides_have_the_canonical_layout(dtype):
    memory, host = memory_of(dtype), TorchMemory(NUM_SLOTS, 2, 1, 16, 4, dtype)
    assert memory.format == host.format
    numbers = torch.randn(NUM_SLOTS, 2, 1, 16, 4)
    for one in (memory, host):
        one.begin_step(ints(range(1, 6)), ints(range(1, 6)))
        one.keys[1:] = numbers.mT.to(one.keys.dtype)
        one.values[1:] = numbers.to(one.values.dtype)
        one.end_step()
    memory.to_host(range(1, 6))
    for slot in range(1, 6):
        assert memory.view(slot) == host.view(slot)
    at = memory.address + 4 * memory.format.block_bytes
    assert ctypes.string_at(at, memory.format.block_bytes) == bytes(memory.view(4))


def test_a_step_that_fails_has_ended_for_the_memory_too():
    """What it copied from the mirror is copied before one of its slots is another's."""
    ended: list[bool] = []
    memory = SimpleNamespace(
        format=SimpleNamespace(block_size=16),
        begin_step=lambda read, written: None,
        end_step=lambda: ended.append(True),
        blocks=torch.zeros(1),
        keys=None,
        values=None,
    )

    def fail(**_: object) -> None:
        raise torch.OutOfMemoryError("too much")

    runner = ModulesRunner(SimpleNamespace(forward=lambda: None), SimpleNamespace(), memory)
    runner.model = fail
    with pytest.raises(RuntimeError):
        runner.forward((Chunk(0, (1, 2), 0, (1,)),), [1], memory)
    assert ended == [True]
