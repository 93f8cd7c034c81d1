"""Figures of the router's parts, from made-up answers."""

import math

import pytest

from kvferry.errors import KvferryError
from loadtest import overload, placement_load, router_contest
from loadtest.overload import Ordeal, Slo, goodput, recovery_s
from loadtest.placement_load import PlacementMeasurement, PlacementScale, measure_placement, points_of
from loadtest.raw_stream import RawAnswer
from loadtest.router_contest import ATTACHED, DIRECT, OURS, Reading, reading_of, standings_of
from loadtest.router_figures import RouterFigure

SLO = Slo(ttft_s=1.0, tpot_s=0.05)


def answer(sent_s, ttft_s=0.1, took_s=1.0, status=200, tokens=64, worker_s=None):
    is_whole = status == 200
    return RawAnswer(status, sent_s, sent_s + ttft_s, sent_s + took_s, tokens, tokens, is_whole, worker_s)


def by_name(figures):
    return {figure.name: figure for figure in figures}


# ------------------------------------------------------------------------------------------------------------- a figure


@pytest.mark.parametrize(
    ("limits", "holds"),
    [
        ({}, None),
        ({"at_most": 2.0}, True),
        ({"at_most": 1.9}, False),
        ({"at_least": 2.0}, True),
        ({"at_least": 2.1}, False),
        ({"at_least": 1.0, "at_most": 1.5}, False),
    ],
)
def test_a_figure_holds_within_its_limits(limits, holds):
    assert RouterFigure("x", 2.0, "s", **limits).holds is holds


# -------------------------------------------------------------------------------------------------------------- contest


def test_while_it_goes_on_an_attached_client_has_no_rate_of_tokens():
    assert Reading(ATTACHED, 0.003, 0.003).told == "TTFT 3.00 ms"
    assert Reading(OURS, 0.003, 0.004, 20_000).told == "TTFT 4.00 ms, 20,000 tokens/s"


def test_each_router_is_less_what_a_client_without_it_waits():
    ours = reading_of(
        OURS, [answer(0, 0.005, worker_s=0.003)] * 3, [answer(0, 0.004, worker_s=0.0015)] * 3, [answer(0)]
    )
    attached = Reading(ATTACHED, 0.003, 0.003)
    direct = Reading(DIRECT, 0.001, 0.001, 70_000, 70_000, 0.002)
    peer = Reading("peer", 0.0015, 0.041, 50_000, 50_000, 0.006)
    standings = standings_of([attached, ours, direct, peer])
    assert standings[OURS].added_ttft_ms == pytest.approx(2.0)
    assert standings[OURS].kept_added_ttft_ms == pytest.approx(1.0)
    assert standings[OURS].beyond_worker_ms == pytest.approx(2.5)
    assert standings["peer"].added_ttft_ms == pytest.approx(0.5)
    assert standings["peer"].kept_added_ttft_ms == pytest.approx(40.0)
    figures = by_name(router_contest.figures_of(standings))
    assert figures["added_ttft_ratio_to_peer"].value == pytest.approx(4.0)
    assert figures["added_ttft"].holds is False
    assert figures["added_ttft_kept"].holds is True
    assert figures["tokens_ratio_to_peer"].value == pytest.approx(64 / 50_000)
    assert figures["attached_ttft"].value == pytest.approx(3.0)
    assert not any("attached" in name and "ratio" in name for name in figures)


def test_tokens_per_second_are_over_the_time_of_all_streams():
    reading = reading_of(OURS, [answer(0)], [answer(0)], [answer(0, took_s=1.0), answer(1.0, took_s=3.0)])
    assert reading.tokens_per_s == pytest.approx(128 / 4.0)


def test_standings_are_medians_over_the_rounds_each_less_its_own_round():
    readings = [
        reading
        for direct, peer in ((1.0, 1.5), (2.0, 2.6), (3.0, 3.1))
        for reading in (Reading(DIRECT, direct, 0, 1, 1, 0), Reading("peer", peer, 0, 1, 1, 0))
    ]
    assert standings_of(readings)["peer"].added_ttft_ms == pytest.approx(500.0)


def test_ours_alone_has_no_ratios():
    standings = standings_of([Reading(OURS, 0.001, 0.001, 20_000, 20_000, 0.01)])
    figures = router_contest.figures_of(standings)
    assert not [figure for figure in figures if "ratio" in figure.name]
    assert by_name(figures)["tokens_per_s"].holds is True


# ------------------------------------------------------------------------------------------------------------- overload


def test_goodput_counts_what_ends_within_the_slo_while_others_arrive():
    answers = [answer(0.1 * k) for k in range(101)]  # one each 0.1 s, for 10 s
    assert goodput(answers, SLO) == pytest.approx(10.0, rel=0.02)
    late = [answer(0.1 * k, ttft_s=1.1, took_s=2.0) for k in range(101)]
    assert goodput(late, SLO) == 0.0
    slow = [answer(0.1 * k, took_s=0.1 + 0.051 * 63) for k in range(101)]
    assert goodput(slow, SLO) == 0.0
    assert goodput([answer(0.1 * k, status=429) for k in range(101)], SLO) == 0.0


def test_a_load_without_time_for_its_ramp_is_refused():
    with pytest.raises(KvferryError, match="too short"):
        goodput([answer(0), answer(0.5)], SLO)


def test_recovery_is_the_first_row_of_normal_probes_after_the_last_arrival():
    before = [answer(0.5 * k, ttft_s=0.01) for k in range(10)]
    slow = [answer(5 + 0.5 * k, ttft_s=0.2) for k in range(4)]
    normal = [answer(7 + 0.5 * k, ttft_s=0.01) for k in range(10)]
    # of five in a row the median counts: two slow ones may be among them
    assert recovery_s([*before, *slow, *normal], 5.0, 0.015) == pytest.approx(1.0)
    assert recovery_s([*before, *slow], 5.0, 0.015) == math.inf
    refused = [answer(5 + 0.5 * k, ttft_s=0.01, status=429) for k in range(10)]
    assert recovery_s(refused, 5.0, 0.015) == math.inf


def ordeal(answers, best=10.0, rss=(100, 100, 100, 100)):
    probes = [answer(20 + 0.1 * k, ttft_s=0.1) for k in range(10)]
    return Ordeal(best, SLO, 0.1, answers, [value * 2**20 for value in rss], probes)


def test_an_overload_that_is_borne_holds_everywhere():
    good = [answer(0.1 * k) for k in range(101)]
    refused = [answer(0.025 * k, took_s=0.004, status=429) for k in range(401)]
    figures = by_name(overload.figures_of(ordeal(good + refused)))
    assert all(figure.holds is not False for figure in figures.values())
    assert figures["refusal_p99"].value == pytest.approx(4.0)


def test_late_refusals_lost_answers_and_growth_miss_their_targets():
    good = [answer(0.1 * k) for k in range(101)]
    refused = [answer(0.1 * k, took_s=3.0, status=503) for k in range(50)]
    lost = [answer(1.0, status=0), answer(1.0, status=500)]
    figures = by_name(overload.figures_of(ordeal(good + refused + lost, best=20.0, rss=(100, 110, 120, 130))))
    misses = {name for name, figure in figures.items() if figure.holds is False}
    assert misses == {"goodput_share", "refusal_p99", "broken", "rss_ratio"}
    assert figures["broken"].value == 2


def test_a_service_that_refuses_nothing_under_overload_misses():
    figures = by_name(overload.figures_of(ordeal([answer(0.1 * k) for k in range(101)])))
    assert figures["refusal_p99"].holds is False


# ------------------------------------------------------------------------------------------------------------ placement


def test_points_are_every_eighth_block_and_the_end():
    chain = [bytes([k]) for k in range(20)]
    assert points_of(chain, 8) == [bytes([7]), bytes([15]), bytes([19])]
    assert points_of(chain[:16], 8) == [bytes([7]), bytes([15])]
    assert points_of(chain, 1) == chain


class RecordingIndex:
    def __init__(self, num_workers):
        self.held = [set() for _ in range(num_workers)]
        self.prompts, self.num_hashed, self.num_unknown = [], [], 0

    def apply_events(self, worker, sealed, evicted):
        self.num_unknown += len(set(evicted) - self.held[worker])
        self.held[worker] |= set(sealed)
        self.held[worker] -= set(evicted)

    def hash(self, tokens):
        self.num_hashed.append(len(tokens))

    def prepare(self, block_ids):
        return block_ids

    def place(self, block_ids):
        longest = max((k for k, one in enumerate(block_ids, 1) for held in self.held if one in held), default=0)
        return len(block_ids), longest

    def note(self, block_ids, placement):
        self.prompts.append(placement)


def test_the_load_fills_places_and_evicts_what_was_sealed(monkeypatch):
    monkeypatch.setattr(placement_load, "NUM_PLACED", 100)
    monkeypatch.setattr(placement_load, "NUM_SAMPLES", 20)
    made = []

    def new_index(num_workers):
        made.append(RecordingIndex(num_workers))
        return made[0]

    measured = measure_placement(new_index, PlacementScale(num_workers=10, num_blocks=50_000))
    (index,) = made
    assert 50_000 <= measured.num_blocks < 60_000
    assert measured.blocks_per_point == pytest.approx(8, rel=0.01)
    assert index.num_unknown == 0
    assert {size for size, _ in index.prompts} == {placement_load.PROMPT_BLOCKS}
    depths = [longest for _, longest in index.prompts]
    assert min(depths) == 0  # some know nobody
    assert sum(depth > placement_load.MAX_FAMILY_BLOCKS for depth in depths) > 20  # some go on deep in a chain
    assert len(measured.place_s) == 100
    assert len(measured.hash_s) == len(index.num_hashed)
    assert set(index.num_hashed) == {placement_load.PROMPT_TOKENS}


def test_placement_figures_stand_beside_their_targets():
    measured = PlacementMeasurement([1e-3] * 100, [1e-4] * 100, [1e-5] * 100, 1000, 8000, 200_000, 0.1, 100_000, 8.0)
    figures = by_name(placement_load.figures_of(measured))
    assert figures["hash_p99"].value == pytest.approx(1000)
    assert figures["place_p99"].value == pytest.approx(100)
    assert figures["note_p99"].value == pytest.approx(10)
    assert figures["entry_bytes"].holds is False
    assert figures["events_core_share"].value == pytest.approx(200_000 / 8 / 1e6)
    assert figures["points_core_share"].value == pytest.approx(0.2)
