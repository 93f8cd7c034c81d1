"""How suspect one request is of killing or hanging workers. Pure: the clock comes in as an argument.

A loss counts against it only if nothing from outside explains it. Who started the worker tells how it ended when it is back (a signal
from outside, or a crash); until then nothing is held against anybody, unless losses pile up. A worker that falls silent hangs, or was
stopped or cut off: a request under which two did so, without a token in between, is suspect, too. Suspects run apart: one that kills or
hangs a worker there is guilty. Which losses are held against which requests is losses.py's to say.
"""

from dataclasses import dataclass
from enum import Enum

from kvferry.messages import WorkerDescription

VERDICT_S = 15.0
"""For a worker to come back and tell; then nothing from outside explains its death."""
RETURN_S = 4.0
"""For a source to come back and tell, or to be missed, before its request is computed without the last one that is left."""
MAX_UNCLEAR = 2
"""Losses without a verdict yet, after which a request waits for one."""
MAX_HANGS = 2
"""Workers that fell silent under a request, one after the other, after which it runs apart."""
MAX_CRASHES = 5
"""A request that took part in so many crashes is given up, wherever it ran."""
FROM_OUTSIDE = (1, 2, 3, 9, 15)
"""HUP, INT, QUIT, KILL, TERM: sent by somebody, be it the kernel for want of memory."""
OUTSIDE_ENDS = {"code 0", *(f"signal {n}" for n in FROM_OUTSIDE), *(f"code {128 + n}" for n in FROM_OUTSIDE)}
"""A worker that was asked to end does so orderly, or as a shell says it."""


class Verdict(Enum):
    UNCLEAR = "unclear"
    OUTSIDE = "outside"
    CRASH = "crash"
    HANG = "hang"


@dataclass(slots=True)
class Loss:
    """Of a worker, under a request that took part in its step."""

    worker_id: str
    incarnation: str
    at_s: float
    was_alone: bool
    verdict: Verdict = Verdict.UNCLEAR
    is_source: bool = False
    """It computed the prompt for a decode worker."""
    missed_s: float = 0.0
    """After so long, the router has missed it, if it is not there."""

    def is_unclear(self, now: float) -> bool:
        return self.verdict is Verdict.UNCLEAR and now < self.at_s + VERDICT_S

    def is_crash(self, now: float) -> bool:
        return self.verdict is Verdict.CRASH or (self.verdict is Verdict.UNCLEAR and not self.is_unclear(now))

    def is_of(self, worker: WorkerDescription) -> bool:
        """Of this very life."""
        return (self.worker_id, self.incarnation) == (worker.worker_id, worker.incarnation)


class Suspicion:
    """Of one request."""

    def __init__(self) -> None:
        self._open: list[Loss] = []
        self._all: list[Loss] = []

    def add(self, loss: Loss) -> None:
        self._open.append(loss)
        self._all.append(loss)

    @property
    def last(self) -> str:
        """The worker that it lost last."""
        return self._all[-1].worker_id if self._all else ""

    @property
    def is_open(self) -> bool:
        """It may be to blame for something, and has not gone on through a step since."""
        return any(loss.verdict is not Verdict.HANG or loss.is_source for loss in self._open) or self._has_hung_enough

    @property
    def _hangs(self) -> list[Loss]:
        return [loss for loss in self._open if loss.verdict is Verdict.HANG]

    @property
    def _has_hung_enough(self) -> bool:
        return len(self._hangs) >= MAX_HANGS

    @property
    def has_hung_alone(self) -> bool:
        """A worker fell silent once more, when nobody else was there."""
        return any(loss.was_alone for loss in self._hangs[MAX_HANGS:])

    @property
    def has_lost_source(self) -> bool:
        return any(loss.is_source and loss.verdict is not Verdict.OUTSIDE for loss in self._open)

    def has_just_lost(self, worker: WorkerDescription, now: float) -> bool:
        """So it is said: whoever asks has not missed it yet."""
        return any(loss.is_of(worker) and now < loss.at_s + loss.missed_s for loss in self._open)

    def waits_for_return(self, now: float) -> bool:
        """Of a source that it lost."""
        return any(loss.is_source and now < loss.at_s + RETURN_S for loss in self.unclear(now))

    def survived(self) -> bool:
        """It went on elsewhere, through a step: that step was not what kills or hangs workers. Whether there was anything to clear."""
        had_any = self.is_open
        self._open.clear()
        return had_any

    def learn(self, worker: WorkerDescription) -> None:
        """A worker is (still, or again) there: what became of its earlier life, if it is known."""
        for loss in self._all:
            if loss.worker_id == worker.worker_id and loss.verdict is Verdict.UNCLEAR:
                if loss.is_of(worker) or worker.previous_end in OUTSIDE_ENDS:
                    loss.verdict = Verdict.OUTSIDE
                elif worker.previous_end:
                    loss.verdict = Verdict.CRASH

    def settle(self, worker: WorkerDescription, verdict: Verdict) -> None:
        """What became of this very life."""
        for loss in self._all:
            if loss.is_of(worker) and loss.verdict is Verdict.UNCLEAR:
                loss.verdict = verdict

    def unclear(self, now: float) -> list[Loss]:
        """Losses of which a verdict may still come."""
        return [loss for loss in self._open if loss.is_unclear(now)]

    def is_suspect(self, now: float) -> bool:
        return self._has_hung_enough or any(loss.is_crash(now) for loss in self._open)

    def is_guilty(self, now: float) -> bool:
        is_alone = any(loss.was_alone for loss in self._open if loss.is_crash(now))
        return is_alone or self.has_hung_alone or sum(loss.is_crash(now) for loss in self._all) >= MAX_CRASHES

    def waits_for_verdict(self, now: float) -> bool:
        unclear = self.unclear(now)
        return len(unclear) > MAX_UNCLEAR or any(loss.was_alone for loss in unclear)
