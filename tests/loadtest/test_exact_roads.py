"""A named road that brought nothing, or was not the only one, is found out: the answers are right without it."""

from pathlib import Path

import pytest
from rich.console import Console

from loadtest import exact

RIGHT = exact.Comparison(20, "prose", None, 0.0)


@pytest.mark.parametrize(
    ("road", "came_over", "holds"),
    [
        ("auto", ["shm", None], True),
        ("auto", [None, None], True),
        ("shm", ["shm", None], True),
        ("shm", [None, None], False),
        ("shm", ["shm", "grpc"], False),
        ("grpc", ["shm", "shm"], False),
    ],
)
async def test_the_blocks_must_have_come_over_the_road_that_was_named(monkeypatch, capsys, road, came_over, holds):
    numbers = iter([{"road": name, "fetched_blocks": 3 if name else 0} for name in came_over])

    async def ask(*_: object):
        return [1], next(numbers)

    async def ready(*_: object):
        return None

    monkeypatch.setattr(exact, "make_prompts", lambda directory, count: [("prose", [1, 2])] * count)
    monkeypatch.setattr(exact, "check_ready", ready)
    monkeypatch.setattr(exact, "_ask", ask)
    monkeypatch.setattr(exact, "_compare", lambda directory, prompts, answers, notes: [RIGHT] * len(answers))
    for must_equal in (True, False):
        numbers = iter([{"road": name, "fetched_blocks": 3 if name else 0} for name in came_over])
        found = await exact.compare_with_reference("", Path(), 2, 1, must_equal, False, Console(stderr=True), road)
        assert found is holds
    assert ("should have come over" in capsys.readouterr().out) is not holds
