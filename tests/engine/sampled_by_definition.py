"""The sampler written down plainly: every penalty anew from all tokens, the whole vocabulary sorted, one sum after the other."""

from collections.abc import Sequence

import numpy as np

from kvferry.engine.sampling import GREEDY_BELOW, uniform
from kvferry.messages import Sampling


def sampled(
    logits: np.ndarray, sampling: Sampling, choice: int, index: int, prompt: Sequence[int], answer: Sequence[int]
) -> int:
    row = changed(logits, sampling, index, prompt, answer)
    if sampling.temperature < GREEDY_BELOW or sampling.top_k == 1:
        return int(row.argmax())
    scaled = (row - row.max()) / np.float32(sampling.temperature)
    weights = np.exp(scaled)
    kept = np.arange(len(row))
    if sampling.min_p > 0:
        kept = kept[weights >= np.float32(sampling.min_p)]
    if 0 < sampling.top_k < len(kept):
        kept = kept[likeliest(scaled[kept], sampling.top_k)]
    if sampling.top_p < 1:
        kept = kept[nucleus(scaled[kept], weights[kept], sampling.top_p)]
    return int(kept[place_at(weights[kept], uniform(sampling.seed, choice, index))])


def changed(
    logits: np.ndarray, sampling: Sampling, index: int, prompt: Sequence[int], answer: Sequence[int]
) -> np.ndarray:
    row = logits.copy()
    for token, bias in sampling.logit_bias:
        row[token] += np.float32(bias)
    if index < sampling.min_tokens:
        row[list(sampling.stop_token_ids)] = -np.inf
    if sampling.repetition_penalty != 1:
        seen = np.unique(np.array([*prompt, *answer], np.intp))
        penalty = np.float32(sampling.repetition_penalty)
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    ids, counts = np.unique(np.array(answer, np.intp), return_counts=True)
    row[ids] -= (counts * sampling.frequency_penalty + sampling.presence_penalty).astype(np.float32)
    return row


def likeliest(values: np.ndarray, count: int) -> np.ndarray:
    return np.sort(np.argsort(-values, kind="stable")[:count])


def nucleus(scaled: np.ndarray, weights: np.ndarray, top_p: float) -> np.ndarray:
    cumulated = np.cumsum(np.sort(weights)[::-1], dtype=np.float64)
    return likeliest(scaled, int(np.searchsorted(cumulated, top_p * cumulated[-1])) + 1)


def place_at(weights: np.ndarray, share: float) -> int:
    cumulated = np.cumsum(weights, dtype=np.float64)
    return min(int(np.searchsorted(cumulated, share * cumulated[-1], side="right")), len(weights) - 1)
