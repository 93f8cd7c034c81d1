"""Where the cumulated weights of a vocabulary reach a share of their sum: the token drawn, and the nucleus.

The definition is one sum after the other in float64, in the order of ids or from the largest weight down. Sums by parts find the place
in a fraction of the time; as their rounding is another one, a place that is nearer to the edge than both could err is looked up by the
definition. So the bits are the definition's.
"""

import numpy as np
import numpy.typing as npt

from kvferry.engine.scoring import likeliest

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

FEW = 1024
"""So many weights are summed one after the other at once."""
RUN = 256
SLACK = 1e-9
"""Of a sum of a million weights or fewer, in float64: more than any order of summation can change."""
BUCKET_BITS = 18
"""Left out of a float32's bits: what remains are its exponent and five bits of its fraction."""
EXP_ERROR = 1e-5
"""More than exp's rounding in float32 (numpy's is below 3 units of the last place), so that larger exponents are known from it."""
TINY = 1e-30
"""Below, float32 loses figures."""


def place_at(weights: Floats, share: float) -> int:
    """The first place up to which, inclusive, the sum is more than `share` of the whole."""
    place = _place_by_runs(weights, share) if len(weights) > FEW else None
    if place is None:
        cumulated = np.cumsum(weights.astype(np.float64))
        place = int(np.searchsorted(cumulated, share * cumulated[-1], side="right"))
    return min(place, len(weights) - 1)


def _place_by_runs(weights: Floats, share: float) -> int | None:
    ends = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), RUN), dtype=np.float64))
    wanted, slack = share * ends[-1], SLACK * ends[-1]
    run = int(np.searchsorted(ends, wanted, side="right"))
    before = ends[run - 1] if run else 0.0
    inside = before + np.cumsum(weights[run * RUN : (run + 1) * RUN].astype(np.float64))
    at = int(np.searchsorted(inside, wanted, side="right"))
    if at == len(inside) or inside[at] - wanted < slack or wanted - (inside[at - 1] if at else before) < slack:
        return None
    return run * RUN + at


def nucleus(scaled: Floats, weights: Floats, top_p: float) -> Ids:
    """The smallest set of the likeliest whose weight reaches `top_p` of all, ascending (Holtzman et al., 2020).

    `weights` are exp(`scaled`), of which the largest is 1. Ties go to the smaller ids.
    """
    size = _size_by_buckets(weights, top_p) if len(weights) > FEW else None
    if size is None:
        cumulated = np.cumsum(np.sort(weights)[::-1].astype(np.float64))
        return likeliest(scaled, int(np.searchsorted(cumulated, top_p * cumulated[-1])) + 1)
    count, least = size
    chosen = weights > np.float32(least * (1 + EXP_ERROR) + TINY)
    near = np.flatnonzero((weights >= np.float32(least * (1 - EXP_ERROR) - TINY)) & ~chosen)
    chosen[near[likeliest(scaled[near], count - int(np.count_nonzero(chosen)))]] = True
    return np.flatnonzero(chosen)


def _size_by_buckets(weights: Floats, top_p: float) -> tuple[int, float] | None:
    """How many, and the least of their weights."""
    total = float(weights.sum(dtype=np.float64))
    wanted, slack = top_p * total, SLACK * total
    floor = (1 - top_p) * total / len(weights) * (1 - EXP_ERROR)  # all below it weigh less than what may be left out
    kept = weights[weights >= np.float32(floor)]
    buckets = kept.view(np.int32) >> BUCKET_BITS
    buckets = buckets.max() - buckets  # from the largest weights down
    ends = np.cumsum(np.bincount(buckets, weights=kept))
    bucket = int(np.searchsorted(ends, wanted))
    before = ends[bucket - 1] if bucket else 0.0
    inside = np.sort(kept[buckets == bucket])[::-1]
    cumulated = before + np.cumsum(inside.astype(np.float64))
    at = int(np.searchsorted(cumulated, wanted))
    if at == len(inside) or cumulated[at] - wanted < slack or wanted - (cumulated[at - 1] if at else before) < slack:
        return None
    return int(np.count_nonzero(buckets < bucket)) + at + 1, float(inside[at])
