"""`kvferry explain --trace` as a person calls it."""

import json

import pytest
from typer.testing import CliRunner

from deploy.cli import app

MOONCAKE = "\n".join(
    json.dumps({"timestamp": k * 500, "input_length": 1500, "output_length": 40, "hash_ids": [1, 2, 100 + k]})
    for k in range(12)
)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    return path


def explained(*arguments):
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def test_every_policy_is_replayed_and_shared_beginnings_are_found(trace):
    found = explained("--trace", trace, "--json")
    assert found.exit_code == 0, found.output
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["policy"] for line in lines] == ["cost", "prefix", "least-loaded", "round-robin"]
    assert all(line["placed"] == 12 and line["cached_share"] > 0.5 for line in lines)


def test_pools_can_be_described_in_a_file(trace, tmp_path):
    pools = tmp_path / "pools.yaml"
    pools.write_text(
        "prefill: [{count: 2, tokens_per_s: 500}]\ndecode: [{tokens_per_s: 100, step_base_ms: 50}]\nblock_us: 20\n"
    )
    found = explained("--trace", trace, "--pools", pools, "--policy", "cost", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["tpot_p50_ms"] >= 50


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("prefill: [{speed: 3}]", "speed"),
        ("prefill: [{count: 1}]", "decode"),
        ("other: 1", "sections"),
        ("a: [", "cannot read"),
    ],
)
def test_a_description_that_is_wrong_is_refused_by_name(trace, tmp_path, content, names):
    pools = tmp_path / "pools.yaml"
    pools.write_text(content)
    found = explained("--trace", trace, "--pools", pools)
    assert found.exit_code == 2
    assert names in found.output


def test_an_unknown_policy_and_a_missing_trace_are_errors(trace):
    assert "known: cost" in explained("--trace", trace, "--policy", "best").output
    assert explained("--trace", "/nowhere").exit_code == 2
