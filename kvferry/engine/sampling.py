"""Choosing tokens: a pure function of (logits, sampling parameters, history, seed, choice, index).

The order is the field's usual one (vLLM's sampler): logit bias, minimum of tokens, penalties, temperature; then min_p, top_k and top_p
say what is kept; the rest is drawn in the order of token ids by the inverse of the cumulated probabilities. The random number is
the output of a keyed hash over (seed, choice, index), a counter-based generator in the sense of Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3" (SC 2011): no stream of draws, so that batching, preemption and continuation cannot change it.
numpy only; rows are independent, and each of them is a vector as long as the vocabulary.
"""

import struct
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvferry.engine.cumulated import nucleus, place_at
from kvferry.engine.history import History
from kvferry.engine.plan import NON_FINITE, Chunk, Draw, StepResult
from kvferry.engine.scoring import likeliest, logprobs_of
from kvferry.messages import Sampling, TokenLogprobs

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

GREEDY_BELOW = 1e-5
"""Temperatures below are taken for 0."""


def uniform(seed: int, choice: int, index: int) -> float:
    """In [0, 1), 53 bits, a function of its arguments alone."""
    digest = blake2b(
        struct.pack("<QIQ", seed & (2**64 - 1), choice, index), digest_size=8, person=b"kvferry.draw"
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample_rows(drawing: list[Chunk], logits: Floats) -> StepResult:
    """One token per chunk; `logits` [chunks, vocabulary]. A row that is not finite fails its own sequence alone."""
    if not drawing:
        return StepResult({})
    is_finite = np.isfinite(logits.max(axis=1)) & np.isfinite(logits.min(axis=1))
    failures = {drawing[k].sequence_id: NON_FINITE for k in np.flatnonzero(~is_finite)}
    rows = [int(k) for k in np.flatnonzero(is_finite)]
    draws = [draw for k in rows if (draw := drawing[k].draw) is not None]
    tokens, logprobs = dict[int, int](), dict[int, TokenLogprobs]()
    for k, draw, token in zip(
        rows, draws, sample(logits if len(rows) == len(logits) else logits[rows], draws), strict=True
    ):
        tokens[drawing[k].sequence_id] = token
        if draw.sampling.num_logprobs is not None:
            logprobs[drawing[k].sequence_id] = logprobs_of(logits[k], token, draw.sampling.num_logprobs)
    return StepResult(tokens, failures, logprobs=logprobs)


def sample(logits: Floats, draws: list[Draw]) -> list[int]:
    """One token for each row of `logits` [draws, vocabulary], finite. Ties go to the smaller token id."""
    tokens = [int(token) for token in logits.argmax(axis=1)]
    scratch = np.empty((2, logits.shape[1]), np.float32)
    for k, draw in enumerate(draws):
        is_changed, is_greedy = _is_changed(draw), _is_greedy(draw.sampling)
        row = _changed(logits[k], draw) if is_changed else logits[k]
        if not is_greedy:
            tokens[k] = _pick(row, draw, scratch)
        elif is_changed:
            tokens[k] = int(row.argmax())
    return tokens


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW or sampling.top_k == 1


def _is_changed(draw: Draw) -> bool:
    sampling = draw.sampling
    return bool(sampling.logit_bias or sampling.has_penalties or draw.index < sampling.min_tokens)


def _changed(row: Floats, draw: Draw) -> Floats:
    """A copy with bias, minimum of tokens and penalties."""
    row, sampling = row.copy(), draw.sampling
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        row[list(ids)] += np.array(biases, np.float32)
    if draw.index < sampling.min_tokens:
        row[list(sampling.stop_token_ids)] = -np.inf
    if draw.history is not None:
        _penalize(row, sampling, draw.history)
    return row


def _penalize(row: Floats, sampling: Sampling, history: History) -> None:
    ids, counts = history.of_answer
    if sampling.repetition_penalty != 1:
        seen = np.concatenate([history.of_prompt, ids])  # some twice, and what they become is the same
        values, penalty = row[seen], np.float32(sampling.repetition_penalty)
        row[seen] = np.where(values > 0, values / penalty, values * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        row[ids] -= (counts * sampling.frequency_penalty + sampling.presence_penalty).astype(np.float32)


def _pick(row: Floats, draw: Draw, scratch: Floats) -> int:
    """`scratch` [2, vocabulary] stays in the processor's cache from row to row, which a batch's would not."""
    scaled, weights = scratch
    np.subtract(row, row.max(), out=scaled)
    np.divide(scaled, np.float32(draw.sampling.temperature), out=scaled)
    np.exp(scaled, out=weights)  # the largest is 1
    kept = _kept(scaled, weights, draw.sampling)
    share = uniform(draw.sampling.seed, draw.choice, draw.index)
    return place_at(weights, share) if kept is None else int(kept[place_at(weights[kept], share)])


def _kept(scaled: Floats, weights: Floats, sampling: Sampling) -> Ids | None:
    """The ids that may be drawn, ascending; None: all."""
    kept: Ids | None = None
    if sampling.min_p > 0:
        kept = np.flatnonzero(weights >= np.float32(sampling.min_p))
    if 0 < sampling.top_k < len(scaled if kept is None else kept):
        kept = likeliest(scaled, sampling.top_k) if kept is None else kept[likeliest(scaled[kept], sampling.top_k)]
    if sampling.top_p < 1:
        if kept is None:
            return nucleus(scaled, weights, sampling.top_p)
        kept = kept[nucleus(scaled[kept], weights[kept], sampling.top_p)]
    return kept
