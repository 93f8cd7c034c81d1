"""The fake model's answers depend on whatever a continuation must carry over, and on nothing else."""

import random
from dataclasses import replace

import pytest

from kvferry.engine.fake import fake_answer
from kvferry.messages import Sampling

GREEDY, SEEDED = Sampling(0, 12, 0.0), Sampling(3, 12, 1.0)


@pytest.fixture(params=range(20))
def prompt(request):
    return [random.Random(request.param).randrange(1000) for _ in range(30)]


def test_greedy_choices_are_equal_and_know_no_seed(prompt):
    answers = [fake_answer(prompt, replace(GREEDY, seed=seed), choice=choice) for seed in (0, 3) for choice in (0, 1)]
    assert answers == [answers[0]] * 4
    beginning = fake_answer(prompt, replace(GREEDY, max_tokens=4))
    assert beginning + fake_answer([*prompt, *beginning], replace(GREEDY, max_tokens=8)) == answers[0]


def test_sampled_ones_depend_on_seed_and_choice_and_index_and_any_on_what_penalties_look_at(prompt):
    first = fake_answer(prompt, SEEDED)
    continued_as_another = [*first[:4], *fake_answer([*prompt, *first[:4]], SEEDED)[:8]]
    others = [
        fake_answer(prompt, SEEDED, choice=1),
        fake_answer(prompt, replace(SEEDED, seed=4)),
        fake_answer(prompt, replace(SEEDED, presence_penalty=0.5)),
        fake_answer(prompt, GREEDY),
        fake_answer(prompt, replace(GREEDY, presence_penalty=0.5)),
    ]
    assert first == fake_answer(prompt, SEEDED)
    assert len({tuple(answer[4:]) for answer in (first, continued_as_another, *others)}) == 7
