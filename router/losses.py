"""Which requests the loss of a worker is held against. Pure but for the requests' own records: the clock comes in as an argument.

Only one that took part in the worker's step can be to blame. Of a decode worker the router knows that from the worker itself, of a
prefill worker from the decode worker that fetched there. A worker that was asked to end, or was cut off together with others, accuses
nobody; nor does one that is still a member a while after it was said to be lost. What follows for the accused, suspicion.py knows.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.messages import LostSource
from router.live import Live
from router.members import Member, Members
from router.suspicion import RETURN_S, Loss, Verdict

ENDED_S = 0.25
"""The streams of a process that has ended end together."""
MAX_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class _Gone:
    """How a prefill worker left: a decode worker may tell of it later."""

    incarnation: str
    verdict: Verdict


class Losses:
    """Of the workers of one router."""

    def __init__(self, silence_s: float):
        self._silence_s = silence_s
        self._silent_s = -math.inf
        self._gone: OrderedDict[str, _Gone] = OrderedDict()

    def decode_lost(self, member: Member, lives: Sequence[Live], is_silent: bool, num_others: int, now: float) -> None:
        """`lives` were there, beside `num_others` sequences of other routers."""
        verdict = self._verdict(member, is_silent, bool(lives), now)
        if verdict is Verdict.OUTSIDE:
            return
        was_alone = len(lives) == 1 and lives[0].runs_apart and not num_others
        for live in lives:
            if live.has_begun:
                loss = Loss(member.worker_id, member.description.incarnation, now, was_alone, verdict)
                live.suspicion.add(loss)

    def source_lost(self, live: Live, lost: LostSource, member: Member | None, now: float) -> None:
        """It computed for that request. `member` is who has its name now: be it the same, which the router has not missed yet."""
        gone = self._gone.get(lost.worker_id)
        verdict = gone.verdict if gone is not None and gone.incarnation == lost.incarnation else Verdict.UNCLEAR
        missed_s = RETURN_S if lost.is_hung else ENDED_S
        loss = Loss(lost.worker_id, lost.incarnation, now, live.runs_apart, verdict, True, missed_s)
        if member is not None and loss.is_of(member.description):
            if not member.progress.is_draining:
                live.suspicion.add(loss)
        elif verdict is not Verdict.OUTSIDE:
            live.suspicion.add(loss)
            if member is not None:
                live.suspicion.learn(member.description)

    def source_left(self, member: Member, lives: Iterable[Live], was_used: bool, now: float) -> None:
        """A prefill worker is no member any more: what that means for the requests under which it was lost."""
        verdict = self._verdict(member, member.fell_silent, was_used, now)
        self._gone[member.worker_id] = _Gone(member.description.incarnation, verdict)
        self._gone.move_to_end(member.worker_id)
        while len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)
        for live in lives:
            live.suspicion.settle(member.description, verdict)

    def look_again(self, live: Live, members: Members, now: float) -> None:
        """Who would have left by now, and has not, was not lost."""
        for loss in live.suspicion.unclear(now):
            member = members.get(loss.worker_id)
            if member is not None and loss.is_of(member.description) and now >= loss.at_s + 2 * self._silence_s:
                live.suspicion.learn(member.description)

    def _verdict(self, member: Member, is_silent: bool, had_requests: bool, now: float) -> Verdict:
        if member.progress.is_draining:
            return Verdict.OUTSIDE
        if not is_silent:
            return Verdict.UNCLEAR
        return Verdict.OUTSIDE if had_requests and self._silent_too(now) else Verdict.HANG

    def _silent_too(self, now: float) -> bool:
        """Whether another one that had requests fell silent at about the same time: no request hangs two at once."""
        before, self._silent_s = self._silent_s, now
        return now - before < self._silence_s / 2
