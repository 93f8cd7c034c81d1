"""`kvferry bench pd` as a person calls it, simulated: what it prints, and when it fails."""

import json

import pytest

from tests.deploy.test_cli import kvferry

SMALL = ("bench", "pd", "--no-real", "--sim-workers", "2", "--sim-rates", "5,10", "--sim-seconds", "1")


def test_json_lines_name_part_layout_and_rate_of_each_figure():
    run = kvferry(*SMALL, "--json")
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    goodput = {(line["layout"], line["rate"]) for line in lines if line["figure"] == "goodput"}
    assert goodput == {(layout, rate) for layout in ("1 prefill + 1 decode", "one pool of 2") for rate in (5.0, 10.0)}
    assert all({"figure", "value", "unit", "part", "rate"} <= line.keys() for line in lines)
    assert {"two_pools_better", "transfer_share", "ttft_fetch_mean", "took"} <= {line["figure"] for line in lines}


@pytest.mark.parametrize(("max_failed", "code"), [("0.5", 1), ("1", 0)])
def test_the_exit_code_tells_of_failures_above_the_threshold(tmp_path, max_failed, code):
    """Of prompts that no context holds."""
    trace = tmp_path / "trace.csv"
    rows = "\n".join(f"2023-11-16 18:15:{second}.0000000,90000,4" for second in range(10, 20))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}\n")
    shape = ("--sim-shape", "smollm2-135m", "--trace", str(trace), "--scale", "0.01")
    run = kvferry(*SMALL, *shape, "--rates", "0.1", "--max-failed", max_failed)
    assert run.returncode == code, run.stderr
    assert "'http_400': 10" in run.stdout


@pytest.mark.parametrize("num_output", [1, *(pytest.param(many, marks=pytest.mark.soak) for many in (16, 256))])
def test_rates_may_be_shares_of_what_the_slowest_layout_can_do_and_answers_of_one_length(num_output):
    """T094: what moving takes of the time to the first token is told, and bounded."""
    small = ("bench", "pd", "--no-real", "--sim-workers=2", f"--sim-seconds={1 if num_output < 256 else 4}")
    run = kvferry(*small, "--load=25,50,80", f"--output-tokens={num_output}", "--json")
    assert run.returncode == 0, run.stderr
    told = [line.split(": ")[1].split()[0] for line in run.stderr.splitlines() if line.endswith("requests/s at most")]
    capacity = min(map(float, told))
    assert len(told) == 2
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    goodput = [line for line in lines if line["figure"] == "goodput"]
    for load in (0.25, 0.5, 0.8):
        two = [line for line in goodput if line["load"] == load]
        assert len(two) == 2
        assert [line["rate"] for line in two] == pytest.approx([capacity * load] * 2, rel=0.02)
    sent, tokens = ([line for line in lines if line["figure"] == name] for name in ("sent", "tpot_p50"))
    assert min(line["value"] for line in sent) >= 5
    assert bool(tokens) == (num_output > 1), "an answer of one token has no gaps"
    shares = [line["value"] for line in lines if line["figure"] == "transfer_share"]
    assert len(shares) == 3
    assert 0 < max(shares) < 0.05


def test_shares_that_cannot_be_are_refused_before_anything_is_measured():
    run = kvferry(*SMALL, "--load=50,25")
    assert run.returncode != 0
    assert "50,25" in run.stderr
    assert not run.stdout
