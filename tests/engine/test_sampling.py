import numpy as np
import pytest

from kvferry.engine.plan import Draw
from kvferry.engine.sampling import sample, uniform


def draw(temperature=1.0, top_k=0, top_p=1.0, seed=1, choice=0, index=0):
    return Draw(temperature, top_k, top_p, seed, choice, index)


def test_the_random_number_is_a_function_of_seed_choice_and_index_alone():
    numbers = [uniform(s, c, i) for s in range(4) for c in range(4) for i in range(4)]
    assert len(set(numbers)) == 64
    assert numbers == [uniform(s, c, i) for s in range(4) for c in range(4) for i in range(4)]
    assert all(0 <= number < 1 for number in numbers)


def test_uniform_numbers_are_uniform():
    counts = np.histogram([uniform(5, 0, i) for i in range(20_000)], bins=20, range=(0, 1))[0]
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 43.8  # 99.9 % of 19 degrees of freedom


def test_greedy_takes_the_best_and_of_equals_the_first():
    logits = np.array([0.0, 3.0, 3.0, 1.0], np.float32)
    assert sample(logits, draw(0)) == 1
    assert sample(logits, draw(2, top_k=1)) == 1
    assert sample(logits, draw(1e-6)) in (1, 2)


def test_frequencies_follow_the_probabilities():
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    tokens = [sample(logits, draw(index=i)) for i in range(4000)]
    expected = np.array([0.5, 0.25, 0.15, 0.1]) * 4000
    chi_square = float(((np.bincount(tokens, minlength=4) - expected) ** 2 / expected).sum())
    assert chi_square < 16.3  # 99.9 % of 3 degrees of freedom


@pytest.mark.parametrize(
    ("limits", "allowed"), [(dict(top_k=2), {0, 1}), (dict(top_p=0.7), {0, 1}), (dict(top_p=0.01), {0})]
)
def test_top_k_and_top_p_keep_the_likeliest(limits, allowed):
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    assert {sample(logits, draw(index=i, **limits)) for i in range(500)} == allowed


def test_extreme_temperatures_stay_finite():
    logits = np.array([1000.0, -1000.0, 999.0], np.float32)
    assert sample(logits, draw(1e-6)) == 0
    assert sample(logits, draw(2.0)) in (0, 2)
