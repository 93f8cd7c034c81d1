"""Arrivals are seeded, have the rate that was asked for, and read what others have recorded."""

import itertools
import json
import random
import statistics

import pytest

from kvferry.errors import ConfigurationError
from loadtest.arrivals import Arrival, Fit, poisson_arrivals, prompt_of, replayed_arrivals
from loadtest.goodput import Slo
from loadtest.lengths import CHAT, LENGTHS, LONG, azure_lengths, mix_lengths
from loadtest.request_trace import TraceRow, read_trace
from loadtest.trial import Trial, read_rates

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.1805901,396,109
2023-11-16 18:15:48.1805900,8790,55
"""
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
    {"timestamp": 4000, "input_length": 700, "output_length": 6, "hash_ids": [7, 10]},
]


@pytest.fixture
def azure(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


@pytest.fixture
def mooncake(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    return path


def test_a_seed_decides_everything_and_another_seed_changes_it():
    first, again, other = (poisson_arrivals(5, 20, mix_lengths, Fit(), seed) for seed in (1, 1, 2))
    assert first == again
    assert [one.at_s for one in first] != [one.at_s for one in other]
    assert [one.num_prompt for one in first] != [one.num_prompt for one in other]


@pytest.mark.parametrize("rate", [0.5, 7.0, 300.0])
def test_arrivals_have_the_asked_rate_and_come_at_random(rate):
    arrivals = poisson_arrivals(rate, 100, azure_lengths, Fit(), 3)
    times = [one.at_s for one in arrivals]
    assert len(arrivals) == rate * 100
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 100
    if rate > 1:  # gaps of a Poisson process deviate by as much as they last
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert statistics.pstdev(gaps) * rate == pytest.approx(1, rel=0.2)


def test_another_rate_brings_the_same_requests_sooner():
    slow, fast = (poisson_arrivals(rate, 10, mix_lengths, Fit(), 0) for rate in (3, 6))
    assert [one.num_prompt for one in slow] == [one.num_prompt for one in fast[: len(slow)]]


def test_the_azure_shape_has_the_means_and_medians_of_the_trace():
    """Which are 1,155 and 1,020 of prompts, 211 and 129 of answers."""
    drawn = [azure_lengths(random.Random(k), k) for k in range(20_000)]
    prompts, outputs = [one.num_prompt for one in drawn], [one.num_output for one in drawn]
    assert statistics.mean(prompts) == pytest.approx(1155, rel=0.05)
    assert statistics.median(prompts) == pytest.approx(1020, rel=0.05)
    assert statistics.mean(outputs) == pytest.approx(211, rel=0.05)
    assert statistics.median(outputs) == pytest.approx(129, rel=0.05)


def test_the_mix_is_of_chats_and_a_tenth_of_long_prompts_in_a_short_run_too():
    drawn = [mix_lengths(random.Random(k), k) for k in range(1000)]
    long = [one for one in drawn if one.kind == LONG]
    assert len(long) == 100
    assert LONG in {one.kind for one in drawn[:8]}
    assert min(one.num_prompt for one in long) > 5 * max(one.num_prompt for one in drawn if one.kind == CHAT)


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_are_scaled_and_cut_to_fit(name):
    fit = Fit(0.2, max_prompt=500, max_output=30)
    arrivals = poisson_arrivals(100, 10, LENGTHS[name], fit, 0)
    assert max(one.num_prompt for one in arrivals) == 500
    assert max(one.num_output for one in arrivals) == 30
    assert min(min(one.num_prompt, one.num_output) for one in arrivals) >= 1


def test_an_azure_trace_is_read_in_the_order_of_time(azure):
    rows = read_trace(azure)
    assert [(round(row.at_s, 3), row.num_prompt, row.num_output) for row in rows] == [
        (0.0, 374, 44),
        (1.5, 8790, 55),
        (3.5, 396, 109),
    ]


def test_a_mooncake_trace_is_read_with_what_its_prompts_share(mooncake):
    assert read_trace(mooncake) == (TraceRow(0.0, 1100, 5, (7, 8, 9)), TraceRow(3.0, 700, 6, (7, 10)))


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_equal_hash_ids_are_equal_tokens_at_any_scale(mooncake, scale):
    first, second = replayed_arrivals(read_trace(mooncake), 2, 1, Fit(scale))
    prompts = [prompt_of(one, "run") for one in (first, second)]
    shared = round(512 * scale)
    assert [len(prompt) for prompt in prompts] == [round(1100 * scale), round(700 * scale)]
    assert prompts[0][:shared] == prompts[1][:shared]
    assert prompts[0][shared:] != prompts[1][shared:]
    assert prompt_of(first, "another run")[:shared] != prompts[0][:shared]


def test_a_prompt_that_was_cut_keeps_its_beginning(mooncake):
    rows = read_trace(mooncake)
    whole, cut = (prompt_of(replayed_arrivals(rows, 2, 1, fit)[0], 0) for fit in (Fit(), Fit(max_prompt=600)))
    assert cut == whole[:600]


def test_a_trace_is_stretched_to_the_asked_rate():
    rows = [TraceRow(at_s, 10, 10) for at_s in (0, 1, 9, 10, 40)]
    assert [one.at_s for one in replayed_arrivals(rows, 3, 1, Fit())] == pytest.approx([0, 0.1, 0.9])
    assert [one.at_s for one in replayed_arrivals(rows, 2.5, 2, Fit())] == pytest.approx([0, 0.05, 0.45, 0.5, 2])


def test_rows_at_one_instant_come_as_a_burst():
    assert [one.at_s for one in replayed_arrivals([TraceRow(0, 1, 1)] * 4, 1, 2, Fit())] == [0, 0]


def test_a_trace_that_is_too_short_is_refused():
    with pytest.raises(ConfigurationError, match="has 2 rows"):
        replayed_arrivals([TraceRow(0, 1, 1)] * 2, 10, 1, Fit())


@pytest.mark.parametrize(
    "text",
    ["", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n", "a,b\n1,2\n", '{"timestamp": 1}\n', '{"timestamp": 1,\n',
     AZURE.replace("374", "many"), AZURE.replace("374", "-1")],
)  # fmt: skip
def test_what_is_no_trace_is_refused_by_its_name(tmp_path, text):
    path = tmp_path / "broken.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"broken\.csv"):
        read_trace(path)


def test_prompts_differ_between_requests_and_runs():
    one, other = Arrival(1, 0, 50, 1), Arrival(2, 0, 50, 1)
    assert prompt_of(one, "a") == prompt_of(one, "a")
    assert prompt_of(one, "a") != prompt_of(other, "a")
    assert prompt_of(one, "a") != prompt_of(one, "b")


def test_a_trial_takes_the_trace_where_there_is_one():
    trial = Trial((1.0,), 2, Slo(1, 1), Fit(), rows=[TraceRow(0, 11, 1), TraceRow(1, 22, 2)])
    assert [one.num_prompt for one in trial.arrivals(1.0)] == [11, 22]


def test_rates_rise():
    assert read_rates("0.5,1, 2") == (0.5, 1.0, 2.0)
    for text in ("", "1,x", "2,1", "1,1", "0", "-1", "inf", "nan"):
        with pytest.raises(ConfigurationError, match="rates"):
            read_rates(text)
