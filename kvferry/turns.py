"""Whose turn it is: short work may pass long work, which cannot starve. Pure; the schedulers and the router's queue go by it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

SMALLER = 8
"""Work may pass blocked work that is so many times its size."""
MAX_LOOKED = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """The sequence at `place` may have up to `max_tokens` of a step's budget."""

    place: int
    max_tokens: int


def turns(remaining: Sequence[int], budget: int, block_size: int, step: int) -> list[Turn]:
    """Who goes in which order, of sequences that lack `remaining` tokens each, in the order of their arrival.

    Those that lack less than the oldest may pass it, the shortest first, and have together up to half of the budget: a long prompt
    neither holds up short ones nor is ever held up to less than half of its pace. A budget that cannot be halved, since a half is
    less than a block, is theirs in every other `step`.
    """
    if not remaining:
        return []
    half = budget // 2 // block_size * block_size or budget * (step % 2)
    shorter = [place for place in range(1, len(remaining)) if remaining[place] < remaining[0]]
    shorter.sort(key=lambda place: (remaining[place], place))
    passing, left = list[Turn](), half
    for place in shorter:
        if left < min(remaining[place], block_size):
            break
        passing.append(Turn(place, left))
        left -= min(remaining[place], left)
    passed = {turn.place for turn in passing}
    rest = [Turn(place, budget) for place in range(1, len(remaining)) if place not in passed]
    return [*passing, Turn(0, budget), *rest]


def bucket(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << max(count - 1, 0).bit_length()


class Waiting(Protocol):
    """Something that waits for room."""

    num_passed: int
    """The size of what started before it, although it came later."""

    @property
    def priority(self) -> int: ...

    @property
    def size(self) -> int:
        """The room that it may come to need."""
        ...


W = TypeVar("W", bound=Waiting)


def start_in_order(waiting: Iterable[W], try_start: Callable[[W], bool]) -> None:
    """Starts what finds room, in order; the first that finds none may be passed by later ones of its priority.

    `try_start` must be cheap where there is no room. At most MAX_LOOKED are looked at behind the blocked one.
    """
    blocked: W | None = None
    num_looked = 0
    for one in waiting:
        if blocked is not None:
            num_looked += 1
            if num_looked > MAX_LOOKED:
                return
            if one.priority < blocked.priority or not may_pass(one.size, blocked.num_passed, blocked.size):
                continue
        if not try_start(one):
            blocked = blocked or one
        elif blocked is not None:
            blocked.num_passed += one.size


def may_pass(size: int, passed: int, blocked_size: int) -> bool:
    """Whether work of `size` may start before blocked work of `blocked_size` that `passed` has passed already.

    Only what is much smaller, and of that together no more than its own size: nobody waits long for those that passed.
    """
    return size * SMALLER <= blocked_size and passed + size <= blocked_size
