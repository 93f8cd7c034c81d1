"""What `kvferry bench exact` finds out: answers that are not the reference's, and a named road that brought nothing or was not the
only one."""

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
    monkeypatch.setattr(exact, "_compare", lambda directory, prompts, answers, *_: [RIGHT] * len(answers))
    for must_equal in (True, False):
        numbers = iter([{"road": name, "fetched_blocks": 3 if name else 0} for name in came_over])
        found = await exact.compare_with_reference("", Path(), 2, 1, must_equal, False, Console(stderr=True), road)
        assert found is holds
    assert ("should have come over" in capsys.readouterr().out) is not holds


@pytest.mark.parametrize(
    ("answer", "index", "is_right"),
    [
        ([5, 6, 7, 8], None, True),
        ([5, 6, 9, 9], 2, False),
        ([5, 9, 7, 8], 1, True),
        ([], 0, False),
        ([5], 1, False),
        ([5, 6, 7], 3, False),
        ([5, 9, 7], 1, False),
        ([5, 6, 7, 8, 9], 4, False),
    ],
)
async def test_an_answer_that_ends_early_or_late_is_wrong_and_no_close_call_excuses_it(
    monkeypatch, capsys, answer, index, is_right
):
    class Reference:
        def __init__(self, directory):
            pass

        def greedy(self, tokens, num_tokens):
            return [5, 6, 7, 8][:num_tokens], [1.0, 1e-9, 1.0, 1e-9][:num_tokens]

    async def ask(*_: object):
        return answer, {"fetched_blocks": 0}

    async def ready(*_: object):
        return None

    monkeypatch.setattr("kvferry.engine.reference.Reference", Reference)
    monkeypatch.setattr(exact, "MAX_SHARE_EXCUSED", 1.0)
    monkeypatch.setattr(exact, "make_prompts", lambda directory, count: [("prose", [1, 2])] * count)
    monkeypatch.setattr(exact, "check_ready", ready)
    monkeypatch.setattr(exact, "_ask", ask)
    assert await exact.compare_with_reference("", Path(), 1, 4, True, False, Console(stderr=True)) is is_right
    assert (f"from step {index}" in capsys.readouterr().out) is (index is not None)
