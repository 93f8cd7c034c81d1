"""The C library: which instruction set is taken, and what it says of the machine."""

import logging

import numpy as np
import pytest
import torch

from kvferry.engine.native import library as native
from kvferry.engine.native.build import LEVELS
from kvferry.engine.native.library import KINDS, load_library, processor_levels
from kvferry.engine.roofline import measure_ceilings


@pytest.fixture(autouse=True)
def _found_out_anew():
    load_library.cache_clear()
    yield
    load_library.cache_clear()


def test_a_level_that_the_compiler_does_not_know_leaves_the_next(monkeypatch):
    levels = processor_levels()
    if len(levels) < 2:
        pytest.skip("this processor has one level only")

    def build(level):
        if level is levels[0]:
            raise OSError("cc failed: unknown option")
        return build_it(level)

    build_it = native._built
    monkeypatch.setattr(native, "_built", build)
    library = load_library()
    assert library is not None
    assert library.level == levels[1].name


def test_a_compiler_may_stand_behind_another_program(monkeypatch, tmp_path):
    """CC="ccache gcc" is how many a machine has it."""
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] || for name; do last=$name; done; [ -z "$last" ] || : > "$last"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", f"env {compiler}")
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    assert native._built(LEVELS[-1]).is_file()


def test_without_a_compiler_there_is_no_library_and_the_log_says_why(monkeypatch, caplog):
    monkeypatch.setattr(native, "find_compiler", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert load_library() is None
        measure_ceilings()
    assert caplog.text.count("there is no C compiler") == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_what_ceilings_are_measured_by_does_the_work_that_it_says(threads):
    library = load_library()
    assert library is not None
    numbers = np.arange(64 * 2 * 3, dtype=np.float32)
    assert library.read_much(numbers.ctypes.data, numbers.size, threads) == numbers.sum()
    one, ten = ({kind: library.multiply_much(KINDS[kind], n, threads) for kind in KINDS} for n in (1, 10))
    assert ten == {kind: 10 * operations for kind, operations in one.items()}
    assert (one["bfloat16"], one["int8"]) == (2 * one["float32"], 4 * one["float32"])
    assert one["float32"] % (2 * threads) == 0


def test_ceilings_can_be_measured_with_the_library_and_without(monkeypatch):
    threads = torch.get_num_threads()
    found = [measure_ceilings(kind) for kind in KINDS]
    monkeypatch.setattr(native, "load_library", lambda: None)
    found.append(measure_ceilings("bfloat16"))
    assert all(ceilings.flops_per_s > 1e8 and ceilings.bytes_per_s > 1e8 for ceilings in found)
    assert torch.get_num_threads() == threads
