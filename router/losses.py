"""Which request is to blame for a decode worker's death, if any. Pure: the clock comes in as an argument.

A death counts against a request only if it took part in the worker's steps and nothing from outside explains it. Who started the worker
tells how it ended when it is back (a signal from outside, or a crash); until then nothing is held against anybody, unless deaths pile
up. Suspects run apart, on a worker that nobody else uses: one that kills it there is refused for ten minutes, by its fingerprint.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from kvferry.messages import WorkerDescription
from router.request import GenerationRequest

REFUSED_S = 600.0
VERDICT_S = 15.0
"""For a worker to come back and tell; then nothing from outside explains its death."""
MAX_UNCLEAR = 2
"""Deaths without a verdict yet, after which a request waits for one."""
MAX_CRASHES = 5
"""A request that took part in so many deaths is given up, wherever it ran."""
MAX_REFUSED = 10_000
OUTSIDE_SIGNALS = {f"signal {number}" for number in (1, 2, 3, 9, 15)}
"""HUP, INT, QUIT, KILL, TERM: somebody sent them."""


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


class Deaths:
    """Of one request."""

    def __init__(self) -> None:
        self._deaths: list[Death] = []

    def add(self, death: Death) -> None:
        self._deaths.append(death)

    def survived(self) -> bool:
        """It went on elsewhere, through a step: it was not what killed the worker. Whether there was anything to clear."""
        had_any = bool(self._deaths)
        self._deaths.clear()
        return had_any

    def learn(self, worker: WorkerDescription) -> None:
        """A worker is (still, or again) there: what became of its earlier life, if it is known."""
        for death in self._deaths:
            if death.worker_id == worker.worker_id and death.verdict is Verdict.UNCLEAR:
                if death.incarnation == worker.incarnation or worker.previous_end in OUTSIDE_SIGNALS:
                    death.verdict = Verdict.OUTSIDE
                elif worker.previous_end:
                    death.verdict = Verdict.CRASH

    def is_suspect(self, now: float) -> bool:
        return any(death.counts(now) for death in self._deaths)

    def is_guilty(self, now: float) -> bool:
        counting = [death for death in self._deaths if death.counts(now)]
        return len(counting) >= MAX_CRASHES or any(death.was_alone for death in counting)

    def waits_for_verdict(self, now: float) -> bool:
        unclear = [d for d in self._deaths if d.verdict is Verdict.UNCLEAR and not d.counts(now)]
        return len(unclear) > MAX_UNCLEAR or any(death.was_alone for death in unclear)

    @property
    def last(self) -> str:
        return self._deaths[-1].worker_id if self._deaths else ""


def fingerprint(request: GenerationRequest) -> bytes:
    """Of what may crash a worker: the prompt, and how tokens are chosen, but for the seed."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr(request.prompt_tokens).encode())
    fields = {name: getattr(request.sampling, name) for name in request.sampling.__slots__ if name != "seed"}
    digest.update(repr(sorted(fields.items())).encode())
    return digest.digest()


class Refused:
    """Fingerprints of requests that killed a worker by themselves."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, request: GenerationRequest, now: float) -> None:
        self._until[fingerprint(request)] = now + REFUSED_S
        while len(self._until) > MAX_REFUSED:
            self._until.popitem(last=False)

    def left_s(self, request: GenerationRequest, now: float) -> float:
        """For how long it is still refused; 0: it is not."""
        if not self._until:
            return 0.0
        return max(self._until.get(fingerprint(request), 0.0) - now, 0.0)
