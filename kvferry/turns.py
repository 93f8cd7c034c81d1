"""Whose turn it is: short work may pass long work, which cannot starve. Pure; the schedulers and the router's queue go by it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """The sequence at `place` may have up to `max_tokens` of a step's budget."""

    place: int
    max_tokens: int


def turns(remaining: Sequence[int], budget: int, block_size: int) -> list[Turn]:
    """Who goes in which order, of sequences that lack `remaining` tokens each, in the order of their arrival.

    Those that lack less than the oldest may pass it, the shortest first, and have together up to half of the budget: a long prompt
    neither holds up short ones nor is ever held up to less than half of its pace.
    """
    if not remaining:
        return []
    half = min(budget // 2 // block_size * block_size, budget - block_size)
    shorter = [place for place in range(1, len(remaining)) if remaining[place] < remaining[0]]
    shorter.sort(key=lambda place: (remaining[place], place))
    passing, left = list[Turn](), half
    for place in shorter:
        if left < block_size:
            break
        passing.append(Turn(place, left))
        left -= min(remaining[place], left)
    passed = {turn.place for turn in passing}
    rest = [Turn(place, budget) for place in range(1, len(remaining)) if place not in passed]
    return [*passing, Turn(0, budget), *rest]


def may_pass(size: int, passed: int, blocked_size: int) -> bool:
    """Whether work of `size` may start before blocked work of `blocked_size` that `passed` has passed already.

    Nobody is passed by more than its own size: so nobody starves.
    """
    return passed + size <= blocked_size
