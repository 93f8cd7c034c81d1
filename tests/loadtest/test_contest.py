"""Rounds, medians, ratios and verdicts of made-up lines; processes that end well, badly, late or not at all."""

import json
import sys
import time
from itertools import pairwise

import psutil
import pytest

from loadtest.contenders import Contender, contenders_in, take_turn
from loadtest.contest import DUELS, WORKLOADS, Duel, Outcome, Timing, Turn, hold, read_timings


def line(workload, step_ms):
    return json.dumps({"peer": "x", "threads": 1, "weights": "w", "workload": workload, "tok_s": 1, "step_ms": step_ms})


def turn(contender, step_s, workload="prefill_128", failure=""):
    return Turn(contender, (Timing(workload, step_s),), failure)


def script(code, **more):
    return Contender("made-up", (sys.executable, "-c", code), **more)


def test_contenders_take_their_turns_one_after_another_in_each_round():
    order = []

    def take(contender, number):
        order.append((contender, number))
        return turn(contender, 1.0)

    hold(["a", "b"], 2, take)
    assert order == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_who_failed_sits_out_the_later_rounds_and_keeps_what_it_had_timed():
    outcome = hold(["a", "b"], 3, lambda name, number: turn(name, number, failure="broke" if name == "a" else ""))
    assert [one.contender for one in outcome.turns] == ["a", "b", "b", "b"]
    assert outcome.failures == {"a": "broke"}
    assert outcome.samples_s("a", "prefill_128") == [1]


def test_a_step_is_the_median_over_the_rounds():
    outcome = Outcome(tuple(turn("a", step_s) for step_s in (3.0, 1.0, 90.0)))
    assert outcome.step_s("a", "prefill_128") == 3.0
    assert outcome.step_s("a", "prefill_1024") is None


def test_a_ratio_is_in_tokens_per_second_so_a_shorter_step_of_ours_is_above_one():
    outcome = Outcome((turn("ours", 2.0), turn("theirs", 3.0)))
    duels = [
        Duel("ours", "theirs", {"prefill_128": 1.5}),
        Duel("ours", "theirs", {"prefill_128": 1.51}),
        Duel("ours", "theirs"),
    ]
    verdicts = outcome.verdicts(duels)
    assert [verdict.ratio for verdict in verdicts] == [1.5] * 3
    assert [verdict.holds for verdict in verdicts] == [True, False, None]


def test_a_duel_without_one_side_has_no_verdict():
    assert not Outcome((turn("ours", 2.0),)).verdicts([Duel("ours", "theirs", {"prefill_128": 1.5})])


def test_every_duel_is_of_known_contenders_and_workloads(tmp_path):
    known = contenders_in(tmp_path, tmp_path)
    for duel in DUELS:
        assert {duel.ours, duel.theirs} <= set(known)
        assert set(duel.at_least) <= set(WORKLOADS)


def test_lines_that_are_no_timing_are_passed_over():
    junk = ["", "Loading weights: 100%", "{", "null", "3", "[]", '{"workload": "prefill_128"}', '{"step_ms": 1}', line("new", 1),
            line("prefill_128", "fast"), line("prefill_128", 0), line(["prefill_128"], 1), '{"workload": {}}']  # fmt: skip
    printed = "\n".join([*junk, line("prefill_128", 12.5), *junk])
    assert read_timings(printed) == (Timing("prefill_128", 0.0125),)


def test_a_turn_reads_what_the_process_printed_on_one_thread():
    code = f"import os; print('warning: x'); print({line('prefill_128', 5)!r}); assert os.environ['OMP_NUM_THREADS'] == '1'"
    assert take_turn(script(code)) == Turn("made-up", (Timing("prefill_128", 0.005),))


def test_a_failing_contender_is_reported_with_its_last_words_and_what_it_had_timed():
    code = f"import sys; print({line('prefill_128', 5)!r}); sys.exit('error: weights int8: choose another')"
    failed = take_turn(script(code))
    assert failed.failure == "exit code 1: error: weights int8: choose another"
    assert failed.timings == (Timing("prefill_128", 0.005),)


def test_a_contender_that_prints_nothing_has_failed():
    assert "no timing" in take_turn(script("pass")).failure


def test_a_contender_that_cannot_be_started_has_failed(tmp_path):
    assert "cannot be started" in take_turn(Contender("made-up", (str(tmp_path / "python"),))).failure


@pytest.mark.parametrize("leader_ends", [False, True])
def test_a_late_contender_is_ended_with_its_children_and_keeps_what_it_had_timed(tmp_path, leader_ends):
    code = (
        "import subprocess, time\n"
        f"print({line('prefill_128', 5)!r}, flush=True)\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        f"time.sleep({0 if leader_ends else 60})"
    )
    late = take_turn(script(code), timeout_s=2.0)
    assert late.failure == "not done within 2 s"
    assert late.timings == (Timing("prefill_128", 0.005),)
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child of a late contender still runs"
        time.sleep(0.05)


@pytest.mark.parametrize("present", [True, False])
def test_a_peer_says_what_it_misses(tmp_path, present):
    for path in ("llama/bin/python", "model-F16.gguf") if present else ():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    missing = contenders_in(tmp_path, tmp_path)["llama.cpp-F16"].missing
    assert missing == ([] if present else [tmp_path / "llama/bin/python", tmp_path / "model-F16.gguf"])


def test_ours_and_theirs_of_one_kind_follow_each_other(tmp_path):
    """So that they meet the machine in the same state."""
    follows = list(pairwise(contenders_in(tmp_path, tmp_path)))
    assert {("kvferry-float16", "llama.cpp-F16"), ("kvferry-int8", "llama.cpp-Q8_0")} <= set(follows)
