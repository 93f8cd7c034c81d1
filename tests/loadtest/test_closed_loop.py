"""`kvferry bench load` against a service that fails in every way: kinds, percentiles, and the exit code (T090 to T092)."""

import asyncio
import json

from tests.deploy.test_cli import kvferry
from tests.loadtest.stub_service import BROKEN, FIRST_TEXT_S, stub_service

FLAGS = ("--json", "--concurrency=10", "--input-tokens=3", "--output-tokens=6")


async def bench(kinds, *flags):
    """Its exit code and figures. One request each; the first of all is not measured."""
    async with stub_service(["good", *kinds]) as stub:
        command = ("bench", "load", f"--url={stub.url}", f"--requests={len(kinds)}", *FLAGS, *flags)
        run = await asyncio.to_thread(kvferry, *command)
    figures = {line["figure"]: line for line in map(json.loads, run.stdout.splitlines())}
    return run.returncode, {name: line["value"] for name, line in figures.items()}, figures


async def test_failures_are_counted_exactly_by_kind_and_the_exit_code_tells_when_they_are_too_many():
    kinds = BROKEN * 2
    bearable, unbearable = await asyncio.gather(bench(kinds, "--max-failed=0.6"), bench(kinds, "--max-failed=0.59"))
    assert (bearable[0], unbearable[0]) == (0, 1)
    for _, values, figures in (bearable, unbearable):
        failed = {name: value for name, value in values.items() if name.startswith("failed")}
        assert failed == {
            "failed": 12,
            "failed_error_event": 6,
            "failed_cut": 2,
            "failed_http_429": 2,
            "failed_empty": 2,
        }
        assert (values["succeeded"], values["no_text"], figures["ttft_p50"]["n"]) == (8, 0, 8)
        assert values["ttft_p50"] >= FIRST_TEXT_S * 1e3, "what failed had its first text at once"


async def test_answers_that_end_at_once_are_no_failures_and_take_no_part_in_a_percentile():
    code, values, figures = await bench(["eos", "good", "eos", "eos", "good"] * 4)
    assert code == 0
    assert (values["succeeded"], values["no_text"], values["failed"]) == (8, 12, 0)
    assert figures["ttft_p50"]["n"] == figures["e2e_p99"]["n"] == 8
    assert values["ttft_p50"] >= FIRST_TEXT_S * 1e3
