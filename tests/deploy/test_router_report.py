"""What `kvferry bench router` prints, with parts that measure nothing."""

import asyncio
import json
import math

import pytest
from rich.console import Console

from deploy import router_bench
from deploy.placement_adapter import new_index
from deploy.router_bench import LONG_STEPS, SHORT_STEPS, RouterBench
from deploy.router_report import print_router_figures
from kvferry.errors import ConfigurationError
from loadtest.placement_load import PlacementScale, measure_placement
from loadtest.router_figures import RouterFigure
from loadtest.router_peers import PeerRouter, peer_routers

FIGURES = [
    RouterFigure("added_ttft", 2.0, "ms", at_most=1.5),
    RouterFigure("tokens_per_s", 20_000, "tokens/s", at_least=15_000, note="64 streams"),
    RouterFigure("recovery", math.inf, "s", at_most=10),
    RouterFigure("plain", 0.5, "times"),
]


def shown(tmp_path, monkeypatch, capsys, parts, as_json):
    async def measure(bench, notes):
        return FIGURES

    monkeypatch.setattr(router_bench, "PARTS", dict.fromkeys(router_bench.PARTS, measure))
    notes = Console(stderr=True, highlight=False)
    asyncio.run(print_router_figures(RouterBench(tmp_path), parts, as_json, notes))
    return capsys.readouterr().out


def test_json_lines_have_targets_and_verdicts_and_no_infinity(tmp_path, monkeypatch, capsys):
    out = shown(tmp_path, monkeypatch, capsys, ["streams"], True)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert [line.get("holds") for line in lines] == [False, True, False, None]
    assert lines[0] | {"note": ""} == {
        "figure": "added_ttft", "value": 2.0, "unit": "ms", "part": "streams", "at_most": 1.5, "holds": False, "note": "",
    }  # fmt: skip
    assert lines[2]["value"] is None


def test_the_table_shows_each_part_that_was_asked_for(tmp_path, monkeypatch, capsys):
    out = shown(tmp_path, monkeypatch, capsys, ["overload", "streams"], False)
    assert out.index("streams") < out.index("overload")
    assert "placement" not in out
    assert "≤ 1.5" in out
    assert "≥ 15,000" in out
    assert "never" in out


def test_unknown_parts_and_missing_peers_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="'all' is not known; known: streams, placement, overload"):
        router_bench.parts_called(["all"])
    with pytest.raises(ConfigurationError, match="routers/bin/python is not there"):
        peer_routers(tmp_path)


def test_a_peer_is_told_its_ports_and_all_workers(tmp_path):
    command = PeerRouter("peer", tmp_path / "python", ("a.b",)).command(1, 2, ["http://x", "http://y"])
    assert command[-3:] == ["--worker-urls", "http://x", "http://y"]
    assert command[command.index("--port") + 1] == "1"


def test_simulated_steps_are_as_long_as_their_parts_want():
    assert 0.0005 < SHORT_STEPS.step_s < 0.001
    assert 0.010 < LONG_STEPS.step_s < 0.013


def test_the_adapter_drives_the_routers_own_placement():
    measured = measure_placement(new_index, PlacementScale(num_workers=4, num_blocks=40_000))
    assert measured.num_entries > 4000
    assert min(measured.place_s) > 0
