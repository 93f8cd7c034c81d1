"""Log-probabilities of tokens under the model's own distribution: the log-softmax of its logits, before anything changes them.

Sums in float64, so that values agree with any careful reference. numpy only.
"""

import numpy as np
import numpy.typing as npt

from kvferry.engine.plan import Scoring
from kvferry.messages import TokenLogprobs


def logprobs_of(logits: npt.NDArray[np.float32], token: int, num_top: int) -> TokenLogprobs:
    """`logits` [vocabulary], finite. Among equals the smaller id comes first."""
    highest = float(logits.max())
    normalizer = highest + float(np.log(np.exp(logits - np.float32(highest)).sum(dtype=np.float64)))
    rank = int((logits > logits[token]).sum() + (logits[:token] == logits[token]).sum()) + 1
    best = likeliest(logits, num_top)
    best = best[np.argsort(-logits[best], kind="stable")]
    top = tuple((int(other), float(logits[other]) - normalizer) for other in best)
    return TokenLogprobs(float(logits[token]) - normalizer, rank, top)


def scores_of(logits: npt.NDArray[np.float32], scoring: Scoring) -> tuple[TokenLogprobs, ...]:
    """`logits` [targets, vocabulary], one row for each target."""
    return tuple(
        logprobs_of(row, target, scoring.num_top) for row, target in zip(logits, scoring.targets, strict=True)
    )


def likeliest(values: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """The places of the `count` largest, ascending; among equals the first ones."""
    if count <= 0:
        return np.empty(0, np.intp)
    count = min(count, len(values))
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    above, equal = np.flatnonzero(values > threshold), np.flatnonzero(values == threshold)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))
