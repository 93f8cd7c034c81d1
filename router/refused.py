"""Requests that killed or hung a worker by themselves: refused for ten minutes, by a fingerprint of what may do so. Pure."""

import hashlib
from array import array
from collections import OrderedDict

from router.request import GenerationRequest

REFUSED_S = 600.0
MAX_REFUSED = 10_000


def fingerprint(request: GenerationRequest) -> bytes:
    """Of what may crash a worker: the prompt, and how tokens are chosen, but for the seed."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(array("I", request.prompt_tokens).tobytes())
    fields = {name: getattr(request.sampling, name) for name in request.sampling.__slots__ if name != "seed"}
    digest.update(repr(sorted(fields.items())).encode())
    return digest.digest()


class Refused:
    """By fingerprint."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, request: GenerationRequest, now: float) -> None:
        name = fingerprint(request)
        self._until[name] = now + REFUSED_S
        self._until.move_to_end(name)
        while len(self._until) > MAX_REFUSED:
            self._until.popitem(last=False)

    def left_s(self, request: GenerationRequest, now: float) -> float:
        """For how long it is still refused; 0: it is not."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        if not self._until:
            return 0.0
        return max(self._until.get(fingerprint(request), 0.0) - now, 0.0)
