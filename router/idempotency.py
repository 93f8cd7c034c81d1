"""`Idempotency-Key`: a request that comes again joins its live stream; at another router, or later, its key fixes the seed.

So a client whose connection broke gets the same tokens, without a second computation where the first still runs. Pure.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import Conflict, InvalidRequest
from router.live import Live
from router.request import GenerationRequest

MAX_KEY_CHARACTERS = 255


def checked_key(key: str | None) -> str | None:
    """Raises InvalidRequest."""
    if key is None:
        return None
    if not 0 < len(key) <= MAX_KEY_CHARACTERS or not key.isprintable():
        raise InvalidRequest(f"Idempotency-Key: 1 to {MAX_KEY_CHARACTERS} printable characters", "Idempotency-Key")
    return key


def seed_of(key: str, salt: bytes) -> int:
    """The same at every router, and different for each tenant."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), key=salt[:64], digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class _Entry:
    requests: tuple[GenerationRequest, ...]
    lives: tuple[Live, ...]


class LiveKeys:
    """The live requests of one router by (salt, key)."""

    def __init__(self) -> None:
        self._entries: dict[tuple[bytes, str], _Entry] = {}
        self._names: dict[int, tuple[bytes, str]] = {}

    def find(self, key: str, requests: Sequence[GenerationRequest]) -> tuple[Live, ...] | None:
        """None if nothing lives under it. Raises Conflict if another request does."""
        entry = self._entries.get((requests[0].salt, key))
        if entry is None:
            return None
        if entry.requests != tuple(requests):
            raise Conflict(
                "Idempotency-Key: another request with this key is running; use a key of its own for each request"
            )
        return entry.lives

    def remember(self, key: str, requests: Sequence[GenerationRequest], lives: Sequence[Live]) -> None:
        name = (requests[0].salt, key)
        if not all(live.has_ended for live in lives):
            self._entries[name] = _Entry(tuple(requests), tuple(lives))
            self._names.update((live.number, name) for live in lives)

    def ended(self, live: Live) -> None:
        """With the last of its requests a key is forgotten. Called while `live` does not yet say that it has ended."""
        name = self._names.pop(live.number, None)
        if name is None:
            return
        entry = self._entries[name]
        if all(other.has_ended or other is live for other in entry.lives):
            del self._entries[name]
