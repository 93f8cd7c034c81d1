"""Ratios of two pools to one, where splitting loses, and the picture of them."""

from pathlib import Path

import pytest

from deploy.pd_picture import draw, paths_of
from loadtest.arrivals import Arrival
from loadtest.goodput import GoodputReport, Slo
from loadtest.open_loop import Sent
from loadtest.pool_duel import verdicts
from loadtest.stream import StreamRecord
from loadtest.trial import Layout, Measured

TWO, ONE, ALONE = Layout("1 + 1", 1, 1), Layout("one of 2", 0, 2), Layout("one of 1", 0, 1)


def measured(layout, ttft_s, gap_s, rate=1.0, part="real"):
    record = StreamRecord(0.0, [ttft_s, ttft_s + gap_s], 2)
    chat, long = Arrival(0, 0.0, 1, 2, "chat"), Arrival(1, 0.0, 1, 2, "long")
    sent = [Sent(chat, record, 0.0), Sent(long, record, 0.0)]
    return Measured(part, layout, rate, GoodputReport(sent, 2.0, Slo(1.0, 0.1)), 1.0)


def test_ratios_say_how_many_times_better_two_pools_are():
    found = list(verdicts([measured(TWO, 0.5, 0.05), measured(ONE, 0.25, 0.2)]))
    by_figure = {(one.figure, one.kind): one for one in found}
    assert by_figure["ttft_p50", ""].ratio == pytest.approx(0.5)
    assert by_figure["ttft_p50", ""].loses
    assert by_figure["itl_p99", "chat"].ratio == pytest.approx(4.0)
    assert not by_figure["itl_p99", "chat"].loses
    assert [(one.figure, one.kind) for one in found if one.target is not None] == [("itl_p99", "chat")]


def test_a_target_is_for_as_many_workers_on_the_real_machine_alone():
    sides = [measured(TWO, 0.5, 0.05), measured(ALONE, 0.5, 0.1)]
    assert all(one.target is None for one in verdicts(sides))
    assert all(
        one.holds is None for one in verdicts([measured(TWO, 1, 1, part="sim"), measured(ONE, 1, 1, part="sim")])
    )
    assert [one.holds for one in verdicts([measured(TWO, 1, 0.05), measured(ONE, 1, 0.1)]) if one.target] == [False]


def test_only_the_same_rate_and_part_are_compared():
    assert not list(verdicts([measured(TWO, 1, 1, rate=1.0), measured(ONE, 1, 1, rate=2.0)]))
    assert not list(verdicts([measured(TWO, 1, 1, part="sim"), measured(ONE, 1, 1, part="real")]))


def test_the_picture_is_written_as_png_and_svg_and_the_same_twice(tmp_path):
    pytest.importorskip("matplotlib")
    sides = [measured(layout, 0.5, 0.05, rate) for rate in (1.0, 2.0) for layout in (TWO, ONE)]
    first, again = (draw(tmp_path / folder / "pd.svg", [*sides, measured(TWO, 1, 1, part="sim")]) for folder in "ab")
    assert first[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in first[1].read_text()
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


@pytest.mark.parametrize("name", ["pd", "pd.png", "pd.svg"])
def test_a_picture_has_both_forms_whatever_suffix_was_named(name):
    assert paths_of(Path("a.b") / name) == [Path("a.b/pd.png"), Path("a.b/pd.svg")]
