"""What an open-loop run counts, against a service that fails in every way; and that a late service slows no arrival (T090 to T093)."""

import asyncio
from dataclasses import replace

import pytest

from loadtest.arrivals import Arrival
from loadtest.goodput import GoodputReport, Slo, TtftSplit
from loadtest.open_loop import REFUSED_HERE, Sent, drive, drive_http
from loadtest.stream import StreamRecord
from loadtest.transfer import transfer_s
from loadtest.virtual_time import run_virtual
from tests.loadtest.stub_service import BROKEN, FIRST_TEXT_S, stub_service

LOOSE = Slo(60.0, 60.0)


def arrivals(count, gap_s=0.002):
    return [Arrival(number, number * gap_s, 3, 6) for number in range(count)]


def report_of(kinds, count, slo=LOOSE):
    async def run():
        async with stub_service(kinds) as stub:
            return await drive_http(stub.url, arrivals(count), "run")

    return GoodputReport(asyncio.run(run()), 2.0, slo)


def test_failures_are_counted_exactly_by_kind_and_lend_no_time_to_a_percentile():
    report = report_of(BROKEN, 100)
    assert report.failures == {"error_event": 30, "cut": 10, "http_429": 10, "empty": 10}
    assert len(report.succeeded) == 40
    assert report.share_failed == 0.6
    assert report.goodput == 40 / 2.0
    assert len(report.samples_s("ttft")) == len(report.samples_s("e2e")) == 40
    assert min(report.samples_s("ttft")) >= FIRST_TEXT_S  # what failed had its first text at once
    figures = {figure["figure"]: figure["value"] for figure in report.figures()}
    assert (figures["sent"], figures["failed"], figures["failed_error_event"]) == (100, 60, 30)


def test_answers_that_end_at_once_are_told_apart_and_take_no_part_in_a_median():
    report = report_of(["eos", "good", "eos", "eos", "good"], 50)
    assert (report.num_no_text, len(report.succeeded), report.failures) == (30, 20, {})
    assert report.share_failed == 0
    assert len(report.samples_s("ttft")) == 20
    assert report.percentile_s("ttft", 50) >= FIRST_TEXT_S
    assert report.goodput == 10


def test_the_role_chunk_is_no_first_token_and_the_usage_chunk_does_not_extend_the_end():
    (sent,) = report_of(["good"], 1).sent
    assert sent.record.ttft_s >= FIRST_TEXT_S
    assert sent.record.e2e_s < sent.record.ttft_s + FIRST_TEXT_S / 2
    assert (sent.record.num_tokens, len(sent.record.event_s)) == (6, 6)


def test_tokens_are_the_servers_count_and_gaps_are_between_events():
    (sent,) = report_of(["korean"], 1).sent
    assert (sent.record.num_tokens, len(sent.record.gaps_s)) == (7, 2)
    assert sent.record.tpot_s == pytest.approx((sent.record.event_s[-1] - sent.record.event_s[0]) / 6)


def test_a_late_service_slows_no_arrival_and_who_would_be_one_too_many_is_refused_here():
    async def run():
        async with stub_service(["good"]) as stub:
            stub.hold.clear()
            driving = asyncio.create_task(drive_http(stub.url, arrivals(30, 0.01), "run", max_outstanding=20))
            async with asyncio.timeout(10):
                while stub.num_requests < 20:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            stub.hold.set()
            return await driving, stub.num_requests

    sent, num_requests = asyncio.run(run())
    report = GoodputReport(sent, 1.0, LOOSE)
    assert num_requests == len(report.succeeded) == 20
    assert report.failures == {REFUSED_HERE: 10}


def test_requests_go_out_when_they_are_due_in_virtual_time():
    async def run():
        loop = asyncio.get_running_loop()
        began, asked = loop.time(), []

        async def ask(arrival):
            asked.append(loop.time() - began)
            await asyncio.sleep(100)
            return StreamRecord(loop.time())

        sent = await drive([Arrival(k, k * 0.5, 1, 1) for k in range(4)], ask)
        return asked, [one.arrival.number for one in sent], [one.lag_s for one in sent]

    asked, numbers, lags = run_virtual(run)
    assert asked == pytest.approx([0, 0.5, 1.0, 1.5])
    assert numbers == [0, 1, 2, 3]
    assert lags == pytest.approx([0] * 4)


def test_nobody_listening_is_a_failure_of_every_request():
    sent = asyncio.run(drive_http("http://127.0.0.1:9", arrivals(3), "run"))
    assert GoodputReport(sent, 1.0, LOOSE).failures == {"transport": 3}


def sent_of(*records):
    return [Sent(Arrival(k, 0.0, 1, 1), record, 0.0) for k, record in enumerate(records)]


def test_goodput_counts_who_kept_both_objectives():
    good = StreamRecord(0.0, [1.0, 1.1, 1.2], 3)
    late, slow = replace(good, began_s=-0.5), replace(good, event_s=[1.0, 1.5, 1.9])
    short = StreamRecord(0.0, [1.0], 1)  # has no gap
    failed = replace(good, failure="cut")
    report = GoodputReport(sent_of(good, late, slow, short, failed), 4.0, Slo(1.2, 0.2))
    assert report.goodput == 2 / 4.0
    assert report.share_failed == pytest.approx(1 / 5)


def test_a_run_without_requests_is_no_success():
    assert GoodputReport([], 1.0, LOOSE).share_failed == 1


def test_kinds_are_looked_at_apart():
    sent = sent_of(StreamRecord(0.0, [1.0], 1), StreamRecord(0.0, [3.0], 1))
    sent[1] = replace(sent[1], arrival=replace(sent[1].arrival, kind="long"))
    report = GoodputReport(sent, 1.0, LOOSE)
    assert (report.percentile_s("ttft", 99, "long"), report.percentile_s("ttft", 50, "request")) == (3.0, 1.0)
    assert report.percentile_s("ttft", 50, "chat") is None


def told(**instants_ms):
    return StreamRecord(0.0, [0.5], 1, numbers={"instants_ms": instants_ms, "source_worker": "p1"})


def test_the_split_of_ttft_is_the_servers_own():
    fetched, local = told(placed=10, last_block=300, first_token=360), told(placed=10, first_token=360)
    split = TtftSplit.of(fetched)
    assert (split.queue_s, split.fetch_s, split.tail_s) == pytest.approx((0.01, 0.29, 0.06))
    assert split.whole_s == pytest.approx(0.36)
    assert TtftSplit.of(local).fetch_s == 0
    assert TtftSplit.of(local).tail_s == pytest.approx(0.35)
    assert TtftSplit.of(StreamRecord(0.0, [1.0], 1)) is None
    assert GoodputReport(sent_of(fetched, local), 1.0, LOOSE).split.fetch_s == pytest.approx(0.145)


def test_a_transfer_is_what_passed_since_the_last_step_of_the_source():
    record = told(placed=0, last_block=400, first_token=500)  # accepted at 0.0
    assert transfer_s(record, {"p1": [0.1, 0.37, 0.6]}) == pytest.approx(0.03)
    assert transfer_s(record, {"p1": [0.6]}) is None
    assert transfer_s(record, {"p1": [-0.1]}) is None  # of an earlier request: it had all blocks
    assert transfer_s(record, {"p2": [0.1]}) is None
    assert transfer_s(told(placed=0, first_token=500), {"p1": [0.1]}) is None


def test_a_first_event_that_came_late_moves_no_transfer_to_another_step():
    record = replace(told(placed=0, last_block=400, first_token=500), event_s=[0.6])  # accepted between 0.0 and 0.1
    assert transfer_s(record, {"p1": [0.1, 0.43, 0.6]}) == pytest.approx(0.02)
    assert transfer_s(record, {"p1": [0.1, 0.47, 0.6]}) == 0
