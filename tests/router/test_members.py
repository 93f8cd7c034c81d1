from dataclasses import replace

import pytest

from kvferry.messages import Role, WorkerDescription
from kvferry.text.model_text import TextSizes
from router.index import PrefixIndex
from router.members import Member, Members

GOOD = WorkerDescription("d1", "x", Role.DECODE, "a:1", "model", "float32", "n", 16, 64, 1000, 500, 1000, 8)


def members():
    made = Members("router", TextSizes(1000, 500), PrefixIndex())
    made._members["d0"] = Member(replace(GOOD, worker_id="d0"), made.view)
    return made


@pytest.mark.parametrize(
    "change",
    [dict(protocol_version=1), dict(model_id="other"), dict(fidelity="bfloat16"), dict(block_size=32), dict(block_bytes=65),
     dict(vocabulary_size=999), dict(context_tokens=400), dict(max_sequences=0), dict(block_size=0), dict(pool_tokens=0),
     dict(worker_id="")],
)  # fmt: skip
def test_a_worker_that_does_not_fit_is_refused_by_field(change):
    refusal = members().refusal(replace(GOOD, **change))
    assert refusal.field == next(iter(change))
    assert refusal.detail


def test_a_worker_that_fits_is_taken_and_may_differ_in_numerics_and_pool():
    assert members().refusal(replace(GOOD, numerics_id="other", pool_tokens=7)) is None
