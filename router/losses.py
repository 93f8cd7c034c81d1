"""Which requests the loss of a worker is held against. Pure but for the requests' own records: the clock comes in as an argument.

Only one that took part in the worker's steps can be to blame. A worker that was asked to end, or was cut off together with others,
accuses nobody. What follows for a request that is accused, suspicion.py knows.
"""

import math
from collections.abc import Sequence

from router.live import Live
from router.members import Member
from router.suspicion import Death


class Losses:
    """Of the workers of one router."""

    def __init__(self, silence_s: float):
        self._silence_s = silence_s
        self._silent_s = -math.inf

    def lost(self, member: Member, lives: Sequence[Live], may_have_died: bool, num_others: int, now: float) -> None:
        """`lives` ran on that decode worker, beside `num_others` sequences of other routers."""
        if not lives or not self._accuses(member, now):
            return
        was_alone = len(lives) == 1 and lives[0].runs_apart and not num_others
        for live in lives:
            if not live.has_begun:
                continue
            if may_have_died:
                live.suspicion.add(Death(member.worker_id, member.description.incarnation, now, was_alone))
            else:
                live.suspicion.hung(member.worker_id, was_alone)

    def _accuses(self, member: Member, now: float) -> bool:
        return not (member.progress.is_draining or (member.fell_silent and self._silent_too(now)))

    def _silent_too(self, now: float) -> bool:
        """Whether another one that had requests fell silent at about the same time: no request hangs two at once."""
        before, self._silent_s = self._silent_s, now
        return now - before < self._silence_s / 2
