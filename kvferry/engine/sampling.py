"""Choosing a token: a pure function of (logits, parameters, seed, choice, index).

The random number is the output of a keyed hash over (seed, choice, index), a counter-based generator in the sense of Salmon et
al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011): no stream of draws, so that batching, preemption and continuation
cannot change it. numpy only.
"""

import struct
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvferry.engine.plan import Chunk, Draw, StepResult


def uniform(seed: int, choice: int, index: int) -> float:
    """In [0, 1), 53 bits, a function of its arguments alone."""
    digest = blake2b(
        struct.pack("<QIQ", seed & (2**64 - 1), choice, index), digest_size=8, person=b"kvferry.draw"
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample_rows(drawing: list[Chunk], logits: npt.NDArray[np.float32]) -> StepResult:
    """One token per chunk; `logits` [chunks, vocabulary]. A row that is not finite fails its own sequence alone."""
    tokens, failures = dict[int, int](), dict[int, str]()
    for chunk, row in zip(drawing, logits, strict=True):
        assert chunk.draw is not None
        if np.isfinite(row.min()) and np.isfinite(row.max()):
            tokens[chunk.sequence_id] = sample(row, chunk.draw)
        else:
            failures[chunk.sequence_id] = "the model's logits are not finite"
    return StepResult(tokens, failures)


def sample(logits: npt.NDArray[np.float32], draw: Draw) -> int:
    """`logits` [vocabulary], finite. Ties go to the smaller token id."""
    if draw.temperature == 0 or draw.top_k == 1:
        return int(np.argmax(logits))
    return int(_pick(logits, draw))


def _pick(logits: npt.NDArray[np.float32], draw: Draw) -> int:
    """Temperature, then top_k, then top_p, in the field's usual order; then the inverse of the cumulated probabilities."""
    count = draw.top_k if 0 < draw.top_k < len(logits) else len(logits)
    scaled = (logits.astype(np.float64) - float(logits.max())) / draw.temperature
    order = np.argsort(-scaled, kind="stable")[:count]
    probabilities = np.exp(scaled[order])
    cumulated = np.cumsum(probabilities)
    if draw.top_p < 1:
        kept = int(np.searchsorted(cumulated, draw.top_p * cumulated[-1])) + 1
        order, cumulated = order[:kept], cumulated[:kept]
    position = int(
        np.searchsorted(cumulated, uniform(draw.seed, draw.choice, draw.index) * cumulated[-1], side="right")
    )
    return int(order[min(position, len(order) - 1)])
