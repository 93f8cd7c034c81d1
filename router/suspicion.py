"""How suspect one request is of killing or hanging workers. Pure: the clock comes in as an argument.

A death counts against it only if nothing from outside explains it. Who started the worker tells how it ended when it is back (a signal
from outside, or a crash); until then nothing is held against anybody, unless deaths pile up. A worker that falls silent hangs, or was
stopped or cut off: a request under which two did so, without a token in between, is suspect, too. Suspects run apart: one that kills or
hangs a worker there is guilty. Which losses are held against which requests is losses.py's to say.
"""

from dataclasses import dataclass
from enum import Enum

from kvferry.messages import WorkerDescription

VERDICT_S = 15.0
"""For a worker to come back and tell; then nothing from outside explains its death."""
MAX_UNCLEAR = 2
"""Deaths without a verdict yet, after which a request waits for one."""
MAX_HANGS = 2
"""Workers that fell silent under a request, one after the other, after which it runs apart."""
MAX_CRASHES = 5
"""A request that took part in so many deaths is given up, wherever it ran."""
FROM_OUTSIDE = (1, 2, 3, 9, 15)
"""HUP, INT, QUIT, KILL, TERM: sent by somebody, be it the kernel for want of memory."""
OUTSIDE_ENDS = {"code 0", *(f"signal {n}" for n in FROM_OUTSIDE), *(f"code {128 + n}" for n in FROM_OUTSIDE)}
"""A worker that was asked to end does so orderly, or as a shell says it."""


class Verdict(Enum):
    UNCLEAR = "unclear"
    OUTSIDE = "outside"
    CRASH = "crash"


@dataclass(slots=True)
class Death:
    """Of a worker, under a request that took part in its steps."""

    worker_id: str
    incarnation: str
    at_s: float
    was_alone: bool
    verdict: Verdict = Verdict.UNCLEAR

    def counts(self, now: float) -> bool:
        if self.verdict is Verdict.UNCLEAR:
            return now >= self.at_s + VERDICT_S
        return self.verdict is Verdict.CRASH


class Suspicion:
    """Of one request."""

    def __init__(self) -> None:
        self._deaths: list[Death] = []
        self._all: list[Death] = []
        self._num_hangs = 0
        self.has_hung_alone = False
        """Its worker fell silent once more, when nobody else was there."""
        self.last = ""
        """The worker that it lost last."""

    def add(self, death: Death) -> None:
        self._deaths.append(death)
        self._all.append(death)
        self.last = death.worker_id

    def hung(self, worker_id: str, was_alone: bool) -> None:
        """Its worker fell silent while it took part in steps."""
        self._num_hangs += 1
        self.has_hung_alone |= was_alone and self._num_hangs > MAX_HANGS
        self.last = worker_id

    @property
    def is_open(self) -> bool:
        """It may be to blame for something, and has not gone on through a step since."""
        return bool(self._deaths) or self._num_hangs >= MAX_HANGS

    def survived(self) -> bool:
        """It went on elsewhere, through a step: that step was not what kills or hangs workers. Whether there was anything to clear."""
        had_any = self.is_open
        self._deaths.clear()
        self._num_hangs, self.has_hung_alone = 0, False
        return had_any

    def learn(self, worker: WorkerDescription) -> None:
        """A worker is (still, or again) there: what became of its earlier life, if it is known."""
        for death in self._all:
            if death.worker_id == worker.worker_id and death.verdict is Verdict.UNCLEAR:
                if death.incarnation == worker.incarnation or worker.previous_end in OUTSIDE_ENDS:
                    death.verdict = Verdict.OUTSIDE
                elif worker.previous_end:
                    death.verdict = Verdict.CRASH

    def is_suspect(self, now: float) -> bool:
        return self._num_hangs >= MAX_HANGS or any(death.counts(now) for death in self._deaths)

    def is_guilty(self, now: float) -> bool:
        is_alone = any(death.was_alone for death in self._deaths if death.counts(now))
        return is_alone or self.has_hung_alone or sum(death.counts(now) for death in self._all) >= MAX_CRASHES

    def waits_for_verdict(self, now: float) -> bool:
        unclear = [d for d in self._deaths if d.verdict is Verdict.UNCLEAR and not d.counts(now)]
        return len(unclear) > MAX_UNCLEAR or any(death.was_alone for death in unclear)
