"""Requests under whom a decode worker died: they wait beside the queue, where they hold up nobody. Pure but for members' columns.

One that may be what killed it must run where nobody else is. If every decode worker is in use, one of them is kept free of anything
new until it is idle: it stays reserved as long as somebody waits for it, and no longer than it can be used.
"""

from collections.abc import Iterator, Sequence

from router.live import Live
from router.members import Member


class Apart:
    def __init__(self) -> None:
        self._lives: dict[int, Live] = {}
        self._reserved: Member | None = None

    def __len__(self) -> int:
        return len(self._lives)

    def __iter__(self) -> Iterator[Live]:
        """As they came; the caller may take them out meanwhile."""
        return iter(list(self._lives.values()))

    @property
    def is_idle(self) -> bool:
        """Nobody waits, and nothing is kept free."""
        return not self._lives and self._reserved is None

    def push(self, live: Live) -> None:
        self._lives[live.number] = live

    def discard(self, live: Live) -> None:
        self._lives.pop(live.number, None)

    def took(self, member: Member) -> None:
        """A suspect runs there now: it is that one's."""
        if self._reserved is member:
            self._reserved = None

    def reserve(self, decode: Sequence[Member], now: float) -> None:
        """One of the members, if a suspect waits."""
        is_wanted = any(live.suspicion.is_suspect(now) for live in self._lives.values())
        held = self._reserved
        if held is not None and not (is_wanted and held in decode and held.state == "ready"):
            held.is_alone = False
            self._reserved = None
        if is_wanted and self._reserved is None:
            usable = [member for member in decode if member.state == "ready" and not member.is_alone]
            self._reserved = min(usable, key=lambda member: member.num_active, default=None)
            if self._reserved is not None:
                self._reserved.is_alone = True
