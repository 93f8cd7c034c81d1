"""How long prompts and answers are: shapes to draw from, in tokens of a model with a long context; scaled later (loadtest/arrivals.py).

Knows no time and no service. A shape is a function of a random generator and the request's number;
`LENGTHS` has them by name.
"""

import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one request. `kind` tells apart those of one shape that are to be looked at separately."""

    num_prompt: int
    num_output: int
    kind: str = "request"


Quantiles = tuple[tuple[float, float], ...]
"""(share of requests, tokens at most), rising."""

# Our own rounding of the quantiles of the Azure LLM inference trace 2023, conversation part (CC-BY 4.0, Azure/AzurePublicDataset;
# described in Patel et al., "Splitwise", ISCA 2024). Drawn independently: there the two correlate with -0.1. The longest prompts,
# less than 1 %, are cut.
AZURE_PROMPT: Quantiles = ((0.0, 8), (0.01, 29), (0.05, 180), (0.1, 207), (0.2, 387), (0.3, 403), (0.4, 703), (0.5, 1020),
                           (0.6, 1071), (0.7, 1130), (0.8, 1315), (0.9, 2730), (0.95, 4080), (1.0, 4300))  # fmt: skip
AZURE_OUTPUT: Quantiles = ((0.0, 7), (0.05, 41), (0.1, 54), (0.2, 77), (0.3, 91), (0.4, 103), (0.5, 129), (0.6, 177),
                           (0.7, 384), (0.8, 400), (0.9, 424), (0.95, 451), (0.99, 601), (1.0, 1000))  # fmt: skip

CHAT, LONG = "chat", "long"
EVERY_LONG = 10
CHAT_PROMPT, CHAT_OUTPUT = (200, 600), (200, 400)
LONG_PROMPT, LONG_OUTPUT = (6000, 10000), (50, 150)


def drawn(quantiles: Quantiles, share: float) -> int:
    """The tokens at that share, straight between the table's rows."""
    after = min(bisect_right(quantiles, share, key=lambda row: row[0]), len(quantiles) - 1)
    (low, few), (high, many) = quantiles[after - 1], quantiles[after]
    return round(few + (many - few) * (share - low) / (high - low))


def azure_lengths(rng: random.Random, number: int) -> Lengths:
    """The shape of a service's conversations in 2023: prompts of about 1,150 tokens, answers of about 210."""
    del number
    return Lengths(drawn(AZURE_PROMPT, rng.random()), drawn(AZURE_OUTPUT, rng.random()))


def mix_lengths(rng: random.Random, number: int) -> Lengths:
    """Chats with longish answers, and amid them long prompts with short ones: what one pool is said to suffer from.

    Every tenth is long: by chance, a short run might have none.
    """
    if number % EVERY_LONG == EVERY_LONG // 2:
        return Lengths(rng.randint(*LONG_PROMPT), rng.randint(*LONG_OUTPUT), LONG)
    return Lengths(rng.randint(*CHAT_PROMPT), rng.randint(*CHAT_OUTPUT), CHAT)


Draw = Callable[[random.Random, int], Lengths]
"""Of the request of that number."""

LENGTHS: dict[str, Draw] = {"azure": azure_lengths, "mix": mix_lengths}


def lengths_called(name: str) -> Draw:
    """Raises ConfigurationError."""
    if name not in LENGTHS:
        raise ConfigurationError(f"lengths {name!r} are not known; known: {', '.join(LENGTHS)}")
    return LENGTHS[name]
