"""The workers that have joined: who they are, how they are doing, and whether they show life.

Serves the registry streams. A worker is a member from its welcome to the end of its stream, to its silence, or until another of the
same name replaces it. What two workers must share to be paired is checked here, once, before it is ready.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.kv.block_id import chain_root
from kvferry.messages import (
    PROTOCOL_VERSION,
    Beat,
    JoinDown,
    JoinUp,
    Refusal,
    Role,
    Welcome,
    WorkerDescription,
    WorkerProgress,
)
from kvferry.racing import until_first
from kvferry.streams import Stream, StreamEnded
from kvferry.text.model_text import TextSizes
from router.index import PrefixIndex

logger = logging.getLogger(__name__)

MUST_MATCH = ("block_size", "fidelity", "block_bytes", "vocabulary_size", "context_tokens", "model_id")
"""Fields that all members share; the first member fixes them, the last to leave frees them."""
POSITIVE = ("block_size", "block_bytes", "pool_tokens", "context_tokens", "max_sequences")
SILENCE_S = 3.0
BEAT_INTERVAL_S = 1.0


@dataclass(slots=True)
class Member:
    description: WorkerDescription
    progress: WorkerProgress = field(default_factory=WorkerProgress)
    is_attached: bool = False
    """Decode workers: the router's stream to it is open and has shown life."""
    num_active: int = 0
    active_tokens: int = 0
    num_placed: int = 0

    @property
    def worker_id(self) -> str:
        return self.description.worker_id

    @property
    def role(self) -> Role:
        return self.description.role


class Members:
    """`on_change` is called after each joining, leaving and progress; `on_lost` with a member that has left."""

    def __init__(self, router_id: str, sizes: TextSizes, index: PrefixIndex, silence_s: float = SILENCE_S):
        self._router_id, self._sizes, self._index, self._silence_s = router_id, sizes, index, silence_s
        self._members: dict[str, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.on_joined: Callable[[Member], None] = lambda member: None
        self.on_lost: Callable[[Member], None] = lambda member: None
        self.on_change: Callable[[], None] = lambda: None
        self.num_refused = 0

    def __iter__(self):
        return iter(self._members.values())

    def of(self, role: Role) -> list[Member]:
        return [member for member in self._members.values() if member.role is role]

    def get(self, worker_id: str) -> Member | None:
        return self._members.get(worker_id)

    @property
    def any_description(self) -> WorkerDescription | None:
        """All members agree on MUST_MATCH."""
        return next((member.description for member in self._members.values()), None)

    def root(self, salt: bytes) -> bytes | None:
        description = self.any_description
        return None if description is None else chain_root(description.model_id, description.fidelity, salt)

    def refusal(self, worker: WorkerDescription) -> Refusal | None:
        """Why this worker cannot be a member, naming the field."""
        if worker.protocol_version != PROTOCOL_VERSION:
            return _differs("protocol_version", worker.protocol_version, PROTOCOL_VERSION, "this router")
        if worker.vocabulary_size != self._sizes.vocabulary_size:
            return _differs(
                "vocabulary_size", worker.vocabulary_size, self._sizes.vocabulary_size, "this router's model"
            )
        for name in POSITIVE:
            if getattr(worker, name) < 1:
                return Refusal(name, f"{name} is {getattr(worker, name)}: it must be at least 1")
        if not worker.worker_id or not worker.address:
            return Refusal("worker_id", "a worker needs a name and an address")
        other = next((m.description for m in self if m.worker_id != worker.worker_id), None)
        for name in MUST_MATCH:
            if other is not None and getattr(worker, name) != getattr(other, name):
                return _differs(name, getattr(worker, name), getattr(other, name), other.worker_id)
        return None

    async def serve_join(self, stream: Stream[JoinDown, JoinUp]) -> None:
        async with asyncio.timeout(self._silence_s):
            worker = await stream.receive()
        if not isinstance(worker, WorkerDescription):
            await stream.send(Refusal("worker", "the first message must describe the worker"))
            return
        await self._replace(worker.worker_id)
        refusal = self.refusal(worker)
        if refusal is not None:
            self.num_refused += 1
            logger.warning("refused %s: %s", worker.worker_id, refusal.detail)
            await stream.send(refusal)
            return
        member = Member(worker)
        self._members[worker.worker_id] = member
        task = asyncio.current_task()
        assert task is not None
        self._tasks[worker.worker_id] = task
        try:
            await stream.send(Welcome(self._router_id))
            logger.info("%s joined as %s", worker.worker_id, worker.role.value)
            self.on_joined(member)
            await self._stay(member, stream)
        finally:
            self._leave(member)

    async def _replace(self, worker_id: str) -> None:
        """A new worker of that name: the old one has lost its connection, or its life."""
        while (task := self._tasks.get(worker_id)) is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def _stay(self, member: Member, stream: Stream[JoinDown, JoinUp]) -> None:
        try:
            await until_first(self._listen(member, stream), self._beat(stream))
        except StreamEnded:
            logger.warning("%s has left", member.worker_id)
        except TimeoutError:
            logger.warning("%s was silent for %g s: taken for dead", member.worker_id, self._silence_s)

    async def _listen(self, member: Member, stream: Stream[JoinDown, JoinUp]) -> None:
        while True:
            async with asyncio.timeout(self._silence_s):
                progress = await stream.receive()
            if isinstance(progress, WorkerProgress):
                member.progress = progress
                self._index.update(member.worker_id, progress.sealed_block_ids, progress.evicted_block_ids)
                self.on_change()

    async def _beat(self, stream: Stream[JoinDown, JoinUp]) -> None:
        while True:
            await stream.send(Beat())
            await asyncio.sleep(BEAT_INTERVAL_S)

    def _leave(self, member: Member) -> None:
        if self._members.get(member.worker_id) is member:
            del self._members[member.worker_id]
            del self._tasks[member.worker_id]
            self._index.forget(member.worker_id)
            self.on_lost(member)
            self.on_change()


def _differs(field_name: str, theirs: object, ours: object, whose: str) -> Refusal:
    detail = (
        f"{field_name} is {theirs!r}, but {whose} has {ours!r}: start all workers of a deployment with the same model, "
        "weights, block size and version"
    )
    return Refusal(field_name, detail)
