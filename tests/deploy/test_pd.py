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
