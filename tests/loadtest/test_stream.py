"""What counts as a success, and when the first token was: against canned streams."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest

from loadtest import stream as under_test
from loadtest.report import LoadReport, percentile
from loadtest.stream import StreamRecord, stream_completion


def chunk(text="", finish=None, usage=None, **more):
    choices = [] if usage else [{"index": 0, "text": text, "finish_reason": finish}]
    return f"data: {json.dumps({'choices': choices, 'usage': usage, **more})}\n\n"


USAGE = chunk(usage={"completion_tokens": 3}, kvferry=[{"seed": 1}])
DONE = "data: [DONE]\n\n"
GOOD = [chunk("a"), chunk("b"), chunk("c", "length"), USAGE, DONE]


def record_of(parts, status=200, clock=None, monkeypatch=None):
    class Body(httpx.AsyncByteStream):
        async def __aiter__(self):
            for part in parts:
                if isinstance(part, Exception):
                    raise part
                yield part.encode()

    if clock:
        times = iter(clock)
        monkeypatch.setattr(under_test, "time", SimpleNamespace(perf_counter=lambda: next(times)))

    async def run():
        transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=Body()))
        async with httpx.AsyncClient(transport=transport) as client:
            return await stream_completion(client, "http://x", {})

    return asyncio.run(run())


def test_a_whole_stream_is_a_success():
    record = record_of(GOOD)
    assert (record.failure, record.num_tokens, len(record.event_s)) == ("", 3, 3)
    assert record.numbers == {"seed": 1}


@pytest.mark.parametrize(
    ("parts", "status", "kind"),
    [
        (GOOD[:-1], 200, "cut"),
        (GOOD[:2], 200, "cut"),
        ([chunk("a"), 'data: {"error": {"message": "no"}}\n\n', DONE], 200, "error_event"),
        ([chunk("a"), chunk("b"), DONE], 200, "incomplete"),
        ([chunk("", "stop"), USAGE, DONE], 200, "empty"),
        ([], 200, "cut"),
        (['{"error": {"message": "busy"}}'], 429, "http_429"),
        ([chunk("a"), httpx.ReadError("gone")], 200, "transport"),
    ],
)
def test_everything_else_is_a_failure_of_its_kind(parts, status, kind):
    assert record_of(parts, status).failure == kind


def test_an_empty_first_chunk_is_no_token_and_the_usage_chunk_ends_nothing(monkeypatch):
    parts = [chunk(""), chunk("a"), chunk("b", "length"), USAGE, DONE]
    record = record_of(parts, clock=[0.0, 1.0, 3.0, 4.0, 9.0, 9.5, 10.0], monkeypatch=monkeypatch)
    assert record.ttft_s == 3.0
    assert record.e2e_s == 4.0
    assert record.gaps_s == [1.0]
    assert record.tpot_s == 0.5


def test_failures_are_left_out_of_the_latencies_and_counted_by_kind():
    good = [StreamRecord(0.0, [float(k), float(k) + 1], 2) for k in range(1, 5)]
    bad = [StreamRecord(0.0, [0.001], failure="cut"), StreamRecord(0.0, failure="http_429")]
    report = LoadReport([*good, *bad], 2.0)
    figures = {figure["figure"]: figure for figure in report.figures()}
    assert figures["ttft_p50"] == {"figure": "ttft_p50", "value": 2000.0, "unit": "ms", "n": 4}
    assert figures["output_throughput"]["value"] == 4.0
    assert (figures["failed"]["value"], figures["failed_cut"]["value"], figures["failed_http_429"]["value"]) == (
        2,
        1,
        1,
    )
    assert report.share_failed == pytest.approx(1 / 3)


def test_percentiles_are_real_samples():
    assert [percentile([1, 2, 3, 4], share) for share in (1, 25, 50, 51, 99, 100)] == [1, 1, 2, 3, 4, 4]
