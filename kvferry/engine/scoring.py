"""Log-probabilities of tokens under the model's own distribution: the log-softmax of its logits, before anything changes them.

Sums in float64, so that values agree with any careful reference. numpy only.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvferry.engine.packing import PackedChunks
from kvferry.engine.plan import NON_FINITE, Plan, StepResult
from kvferry.messages import TokenLogprobs

LOGIT_ROWS = 64
"""Logits of so many rows are held at a time where a whole prompt's are wanted."""

RUN = 64
"""Values that are first looked at by their maximum alone."""


def logprobs_of(logits: npt.NDArray[np.float32], token: int, num_top: int) -> TokenLogprobs:
    """`logits` [vocabulary], finite. Among equals the smaller id comes first."""
    highest = float(logits.max())
    with np.errstate(over="ignore"):  # a difference beyond float32 has the probability 0
        normalizer = highest + float(np.log(np.exp(logits - np.float32(highest)).sum(dtype=np.float64)))
    rank = int((logits > logits[token]).sum() + (logits[:token] == logits[token]).sum()) + 1
    best = likeliest(logits, num_top)
    best = best[np.argsort(-logits[best], kind="stable")]
    top = tuple((int(other), float(logits[other]) - normalizer) for other in best)
    return TokenLogprobs(float(logits[token]) - normalizer, rank, top)


def score_chunks(
    plan: Plan,
    result: StepResult,
    logits_of: Callable[[npt.NDArray[np.int32]], npt.NDArray[np.float32]],
    packed: PackedChunks,
) -> StepResult:
    """`result` with the scores of the plan's chunks that want some; `logits_of` is asked for LOGIT_ROWS rows at a time."""
    scores, failures = dict[int, tuple[TokenLogprobs, ...]](), dict(result.failures)
    for chunk in plan.chunks:
        if chunk.scoring is None:
            continue
        targets, found = chunk.scoring.targets, list[TokenLogprobs]()
        rows = packed.rows_of(chunk, len(targets))
        for begin in range(0, len(rows), LOGIT_ROWS):
            logits = logits_of(rows[begin : begin + LOGIT_ROWS])
            if not np.isfinite(logits).all():
                failures[chunk.sequence_id] = NON_FINITE
                break
            part = targets[begin : begin + LOGIT_ROWS]
            found += [logprobs_of(row, target, chunk.scoring.num_top) for row, target in zip(logits, part, strict=True)]
        scores[chunk.sequence_id] = tuple(found)
    return replace(result, scores=scores, failures=failures) if scores else result


def likeliest(values: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """The places of the `count` largest, ascending; among equals the first ones."""
    if count <= 0:
        return np.empty(0, np.intp)
    count = min(count, len(values))
    candidates = _candidates(values, count)
    found = values if candidates is None else values[candidates]
    threshold = np.partition(found, len(found) - count)[len(found) - count]
    above, equal = np.flatnonzero(found > threshold), np.flatnonzero(found == threshold)
    chosen = np.sort(np.concatenate([above, equal[: count - len(above)]]))
    return chosen if candidates is None else candidates[chosen]


def _candidates(values: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp] | None:
    """Places among which the largest are, if few can be told in one pass: `count` runs have a maximum of at least the bound."""
    num_runs = len(values) // RUN
    if count * 4 > num_runs:
        return None
    runs = values[: num_runs * RUN].reshape(RUN, num_runs)  # each a column: their maxima are one vector operation a row
    highest = runs.max(axis=0)
    bound = np.partition(highest, num_runs - count)[num_runs - count]
    return np.flatnonzero(values >= bound)
