import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv.block_id import chain, chain_root, extend_chain, num_whole_blocks_before_tail

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=100)


@given(TOKENS, st.integers(0, 100))
def test_extending_a_chain_gives_the_same_ids_as_making_it_at_once(tokens, cut):
    root = chain_root("model", "float32")
    ids = extend_chain([], root, tokens[:cut], 16)
    assert extend_chain(ids, root, tokens, 16) == chain(root, tokens, 16)
    assert len(chain(root, tokens, 16)) == len(tokens) // 16


def test_every_part_of_a_blocks_identity_changes_its_id():
    base = list(range(32))
    last = chain(chain_root("m", "float32"), base, 16)[-1]
    others = [
        chain(chain_root("m2", "float32"), base, 16)[-1],
        chain(chain_root("m", "bfloat16"), base, 16)[-1],
        chain(chain_root("m", "float32", b"salt"), base, 16)[-1],
        *(chain(chain_root("m", "float32"), [*base[:k], 999, *base[k + 1 :]], 16)[-1] for k in range(32)),
        chain(chain_root("m", "float32"), [*base[:16], base[17], base[16], *base[18:]], 16)[-1],
    ]
    assert len({last, *others}) == len(others) + 1


def test_parts_of_the_root_cannot_run_into_each_other():
    assert chain_root("ab", "c") != chain_root("a", "bc")
    assert chain_root("a", "b", b"c") != chain_root("a", "bc")


def test_ids_are_equal_in_every_process_whatever_its_hash_seed():
    code = "from kvferry.kv.block_id import *; print(chain(chain_root('m','f',b's'), list(range(64)), 16)[-1].hex())"
    ids = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(ids) == 1


def test_the_tail_has_one_to_block_size_tokens():
    for length in range(1, 100):
        tail = length - 16 * num_whole_blocks_before_tail(length, 16)
        assert 1 <= tail <= 16
    assert num_whole_blocks_before_tail(0, 16) == 0


def test_ten_thousand_blocks_that_differ_in_one_token_have_different_ids():
    root = chain_root("m", "f")
    ids = {chain(root, [*range(15), k], 16)[0] for k in range(10_000)}
    assert len(ids) == 10_000
