import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine import cumulated
from kvferry.engine.history import History
from kvferry.engine.plan import NON_FINITE, Chunk, Draw
from kvferry.engine.sampling import sample, sample_rows, uniform
from kvferry.engine.scoring import likeliest, logprobs_of
from kvferry.messages import Sampling
from tests.engine import sampled_by_definition

FOUR = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))


def draw(index=0, choice=0, prompt=(), answer=(), **fields):
    history = History([*prompt, *answer], len(prompt)) if prompt or answer else None
    return Draw(Sampling(**{"seed": 1, "max_tokens": 9, **fields}), choice, index, history)


def one(logits, drawn):
    return sample(np.asarray(logits, np.float32)[None], [drawn])[0]


def chi_square(tokens, expected):
    counts = np.bincount(tokens, minlength=len(expected))
    expected = np.asarray(expected) * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_random_number_is_a_function_of_seed_choice_and_index_alone():
    numbers = [uniform(s, c, i) for s in range(4) for c in range(4) for i in range(4)]
    assert len(set(numbers)) == 64
    assert numbers == [uniform(s, c, i) for s in range(4) for c in range(4) for i in range(4)]
    assert all(0 <= number < 1 for number in numbers)


def test_uniform_numbers_are_uniform():
    counts = np.histogram([uniform(5, 0, i) for i in range(20_000)], bins=20, range=(0, 1))[0]
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8  # 99.9 % of 19 degrees of freedom


def test_greedy_takes_the_best_and_of_equals_the_first():
    logits = [0.0, 3.0, 3.0, 1.0]
    assert one(logits, draw(temperature=0)) == 1
    assert one(logits, draw(temperature=2, top_k=1)) == 1
    assert one(logits, draw(temperature=1e-6)) == 1


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_frequencies_follow_the_probabilities(temperature):
    expected = np.exp(FOUR.astype(np.float64) / temperature)
    expected /= expected.sum()
    tokens = [one(FOUR, draw(i, temperature=temperature)) for i in range(4000)]
    assert chi_square(tokens, expected) < 16.3  # 99.9 % of 3 degrees of freedom


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [
        (dict(top_k=2), {0, 1}),
        (dict(top_p=0.7), {0, 1}),
        (dict(top_p=0.01), {0}),
        (dict(min_p=0.4), {0, 1}),
        (dict(min_p=1.0), {0}),
        (dict(top_k=3, top_p=0.8), {0, 1}),  # of the three's 0.9, the first two have 0.83
        (dict(top_k=100, min_p=0.25), {0, 1, 2}),
    ],
)
def test_top_k_top_p_and_min_p_keep_the_likeliest(limits, allowed):
    tokens = [one(FOUR, draw(i, **limits)) for i in range(500)]
    assert set(tokens) == allowed
    kept = np.exp(FOUR.astype(np.float64))[sorted(allowed)]
    if len(allowed) > 1:
        assert chi_square(tokens, kept / kept.sum()) < 13.8  # 99.9 % of 2 degrees of freedom


@given(
    st.lists(st.integers(-6, 6), min_size=2, max_size=60), st.floats(0.01, 1.0), st.integers(0, 70), st.integers(0, 99)
)
@settings(max_examples=200, deadline=None)
def test_what_is_kept_is_what_a_full_sort_keeps(values, top_p, top_k, seed):
    """Ties go to the smaller ids; top_p applies to what top_k has left."""
    logits = np.array(values, np.float32)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))[: top_k or len(values)]
    weights = np.exp(logits[order] - logits.max()).astype(np.float64)
    count = int(np.searchsorted(np.cumsum(weights), top_p * weights.sum() * (1 + 1e-6))) + 1
    token = one(logits, draw(seed=seed, top_p=top_p, top_k=top_k))
    assert token in order[:count]


def test_a_large_vocabulary_is_cut_as_a_small_one():
    rng = np.random.default_rng(0)
    logits = (
        rng.normal(size=50_000).astype(np.float32) * 0.01
    )  # nearly flat: the nucleus is larger than any first guess
    tokens = [one(logits, draw(i, top_p=0.5)) for i in range(200)]
    assert logits[tokens].min() >= np.sort(logits)[-26_000]
    assert len(set(tokens)) > 150


SHAPES = {
    "peaked": lambda rng, size: rng.normal(size=size) * 2 + (rng.random(size) < 0.002) * rng.exponential(4, size),
    "flat": lambda rng, size: rng.normal(size=size) * 0.5,
    "ties": lambda rng, size: rng.integers(-3, 4, size) / 2,
    "equal": lambda rng, size: np.zeros(size),
    "steep": lambda rng, size: rng.normal(size=size) * 40,
    "near ties": lambda rng, size: rng.integers(0, 4, size) * 1e-7,
}
LIMITS = (
    {}, {"top_p": 0.95}, {"top_p": 0.3}, {"top_p": 1 - 1e-12}, {"top_p": 1e-9}, {"min_p": 0.05}, {"top_k": 50},
    {"top_k": 2000, "top_p": 0.9}, {"top_k": 7, "top_p": 0.9, "min_p": 0.001}, {"min_p": 1e-4, "top_p": 0.99},
)  # fmt: skip


@pytest.mark.parametrize("size", [cumulated.FEW + 1, 5000, 49152])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_the_plain_definition(shape, size):
    """The same bits: another worker that goes on with the choice may find them another way."""
    rng = np.random.default_rng(size)
    logits = SHAPES[shape](rng, size).astype(np.float32)
    prompt, answer = rng.integers(0, size, 700).tolist(), rng.integers(0, 90, 200).tolist()
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": -0.2}
    for number, limits in enumerate((*LIMITS, {**LIMITS[1], **penalties}, {"temperature": 0.0, **penalties})):
        drawn = draw(number, 2, prompt, answer, **{"temperature": (0.7, 1.0, 1.9)[number % 3], **limits})
        told = sampled_by_definition.sampled(logits, drawn.sampling, 2, number, prompt, answer)
        assert one(logits, drawn) == told, limits


@pytest.mark.parametrize("shape", SHAPES)
def test_a_share_on_the_very_edge_of_a_token_falls_where_the_plain_sums_say(shape):
    """Where the order of summation decides: shares that are a cumulated sum, and the next number on both sides."""
    logits = SHAPES[shape](np.random.default_rng(1), 3000).astype(np.float32)
    scaled = logits - logits.max()
    weights = np.exp(scaled)
    by_ids, by_size = np.cumsum(weights, dtype=float), np.cumsum(np.sort(weights)[::-1], dtype=float)
    for place in range(0, 2999, 97):
        for towards in (0.0, None, 1.0):
            share, top_p = by_ids[place] / by_ids[-1], by_size[place] / by_size[-1]
            if towards is not None:
                share, top_p = np.nextafter(share, towards), np.nextafter(top_p, towards)
            share, top_p = min(float(share), 1 - 2**-53), min(float(top_p), 1 - 2**-53)
            assert cumulated.place_at(weights, share) == sampled_by_definition.place_at(weights, share)
            kept = cumulated.nucleus(scaled, weights, top_p)
            assert kept.tolist() == sampled_by_definition.nucleus(scaled, weights, top_p).tolist()


def test_a_nucleus_is_of_the_likeliest_even_where_exp_rounds_two_neighbours_the_wrong_way_round():
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=20_000) * 0.001).astype(np.float32)
    scaled = logits - logits.max()
    weights = np.exp(scaled) * (1 + rng.integers(-2, 3, len(scaled)) * np.float32(2**-23)).astype(np.float32)
    assert (np.diff(weights[np.argsort(scaled)]) < 0).any()
    for top_p in (0.2, 0.5, 0.9):
        kept = cumulated.nucleus(scaled, weights, top_p)
        assert kept.tolist() == sampled_by_definition.nucleus(scaled, weights, top_p).tolist()


@pytest.mark.parametrize("size", [1, 5, 64, 400, 30_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_likeliest_are_those_of_a_full_sort(shape, size):
    logits = SHAPES[shape](np.random.default_rng(2), size).astype(np.float32)
    for count in (1, 2, 50, 300, size - 1, size):
        assert likeliest(logits, count).tolist() == sampled_by_definition.likeliest(logits, count).tolist()


def test_extreme_temperatures_stay_finite():
    logits = [1000.0, -1000.0, 999.0]
    assert one(logits, draw(temperature=1e-6)) == 0
    assert one(logits, draw(temperature=1e-4)) == 0
    assert one(logits, draw(temperature=2.0)) in (0, 2)


def test_bias_forbids_and_forces():
    assert one(FOUR, draw(temperature=0, logit_bias=((0, -100.0),))) == 1
    assert one(FOUR, draw(temperature=0, logit_bias=((3, 100.0),))) == 3


def test_stop_tokens_cannot_be_drawn_before_the_minimum():
    fields = dict(temperature=0, min_tokens=2, stop_token_ids=(0, 1))
    assert [one(FOUR, draw(index, **fields)) for index in range(4)] == [2, 2, 0, 0]


def test_penalties_count_the_answer_and_repetition_the_prompt_too():
    logits = [2.0, 1.9, -1.0, 1.0]
    assert one(logits, draw(temperature=0, presence_penalty=0.5, prompt=[0], answer=[1])) == 0
    assert one(logits, draw(temperature=0, presence_penalty=0.5, answer=[0])) == 1
    assert one(logits, draw(temperature=0, frequency_penalty=0.06, answer=[0])) == 0
    assert one(logits, draw(temperature=0, frequency_penalty=0.06, answer=[0, 0])) == 1
    assert one(logits, draw(temperature=0, repetition_penalty=1.5, prompt=[0])) == 1
    assert one(logits, draw(temperature=0, repetition_penalty=2.5, prompt=[0, 1])) == 3
    assert one([-1.0, -1.2], draw(temperature=0, repetition_penalty=1.5, prompt=[0])) == 1
    assert one(logits, draw(temperature=0, presence_penalty=-2.0, answer=[3])) == 3


class ReadTokens(list):
    """Counts what is read of it."""

    num_read = 0

    def __getitem__(self, which):
        found = super().__getitem__(which)
        self.num_read += len(found)
        return found


def test_a_history_reads_the_prompt_once_and_each_token_of_the_answer_once():
    rng = np.random.default_rng(4)
    logits, tokens = rng.normal(size=500).astype(np.float32), ReadTokens(rng.integers(0, 500, 1000).tolist())
    prompt, sampling = (
        list(tokens),
        Sampling(3, 999, repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.1),
    )
    history = History(tokens, len(prompt))
    for index in range(300):
        token = sample(logits[None], [Draw(sampling, 1, index, history)])[0]
        answer = tokens.copy()[len(prompt) :]
        assert token == sampled_by_definition.sampled(logits, sampling, 1, index, prompt, answer)
        tokens.append(token)
    assert tokens.num_read == len(tokens) - 1  # the last one was not looked at yet
    continued = Draw(sampling, 1, 300, History(list(tokens), len(prompt)))
    assert sample(logits[None], [continued]) == sample(logits[None], [Draw(sampling, 1, 300, history)])


def test_rows_do_not_see_each_other():
    """However the batch is made up, a row's token is what it is alone; the caller's logits stay as they are."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(6, 300)).astype(np.float32) * 3
    before = logits.copy()
    draws = [
        draw(0, temperature=0),
        draw(5, top_p=0.9, seed=7),
        draw(5, top_p=0.9, seed=7),
        draw(3, repetition_penalty=1.3, prompt=(1, 2), answer=(3,)),
        draw(2, min_p=0.1, logit_bias=((5, 4.0),)),
        draw(1, top_k=5, choice=2),
    ]
    together = sample(logits, draws)
    assert together == [one(row, drawn) for row, drawn in zip(logits, draws, strict=True)]
    assert (logits == before).all()


def test_rows_that_are_not_finite_fail_alone_and_keep_no_one_from_drawing():
    logits = np.stack([FOUR, FOUR, FOUR, FOUR])
    logits[1, 2], logits[2, 0] = np.nan, np.inf
    chunks = [Chunk(k, (1,), 0, (1,), draw(temperature=0, num_logprobs=1)) for k in range(4)]
    result = sample_rows(chunks, logits)
    assert dict(result.failures) == {1: NON_FINITE, 2: NON_FINITE}
    assert dict(result.tokens) == {0: 0, 3: 0}
    assert set(result.logprobs) == {0, 3}


def test_log_probabilities_are_the_models_own_and_finite():
    found = logprobs_of(FOUR, 2, 3)
    assert found.logprob == pytest.approx(np.log(0.15), abs=1e-6)
    assert found.rank == 3
    assert [token for token, _ in found.top] == [0, 1, 2]
    assert [np.exp(logprob) for _, logprob in found.top] == pytest.approx([0.5, 0.25, 0.15], abs=1e-6)
    extreme = logprobs_of(np.array([3e38, -3e38, 0.0], np.float32), 1, 3)
    assert np.isfinite([extreme.logprob, *(logprob for _, logprob in extreme.top)]).all()


def test_the_likeliest_of_equals_are_the_first():
    assert likeliest(np.array([1, 3, 3, 3, 2], np.float32), 2).tolist() == [1, 2]
    assert likeliest(np.array([1, 3], np.float32), 5).tolist() == [0, 1]
    assert likeliest(np.array([1, 3], np.float32), 0).tolist() == []
