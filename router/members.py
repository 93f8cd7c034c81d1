"""The workers that have joined: who they are, and whether they show life. What they say of themselves goes to view and index.

Serves the registry streams. A worker is a member from its welcome to the end of its stream, to its silence, or until another of the
same name replaces it. What two workers must share to be paired is checked here, once, before it is ready.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable

from kvferry.kv.block_id import chain_root
from kvferry.messages import (
    PROTOCOL_VERSION,
    Beat,
    JoinDown,
    JoinUp,
    Refusal,
    Role,
    SnapshotWanted,
    Welcome,
    WorkerDescription,
    WorkerProgress,
)
from kvferry.racing import until_first
from kvferry.streams import Stream, StreamEnded
from kvferry.text.model_text import TextSizes
from router.expected import ExpectedBlocks
from router.index import Held, PrefixIndex, keys_of
from router.outliers import Outliers
from router.view import WorkerView, sane

logger = logging.getLogger(__name__)

MUST_MATCH = ("block_size", "fidelity", "block_bytes", "vocabulary_size", "context_tokens", "model_id")
"""Fields that all members share; the first member fixes them, the last to leave frees them."""
MOST = 2**48
"""No count of a description is larger."""
POSITIVE = ("block_size", "block_bytes", "pool_tokens", "context_tokens", "max_sequences")
SILENCE_S = 3.0
BEAT_INTERVAL_S = 1.0
SWEEP_INTERVAL_S = 0.005
JUDGE_INTERVAL_S = 1.0
MAX_ROOTS = 1024


class Member:
    """One worker, with its row of the view. The three numbers are of this router alone."""

    def __init__(self, description: WorkerDescription, view: WorkerView):
        self.description = description
        self.progress = WorkerProgress()
        self.row = view.open_row(description)
        self.next_event: int | None = None
        """The number of the block event that must come next; None until a snapshot has come."""
        self.has_told_all = False
        self.judged_step = 0
        self.fell_silent = False
        """It is no member any more, because it showed no life; its process may be there."""
        self._view = view
        self._has_left = False

    def leave(self) -> None:
        """The row may be another's from now on: what is still released here changes nothing."""
        self._has_left = True

    def _set(self, **values: int) -> None:
        if not self._has_left:
            self._view.set(self.row, **values)

    @property
    def is_attached(self) -> bool:
        """It has shown life: on the router's own stream to it, or, of a prefill worker, by its first progress since it joined."""
        return bool(self._view.bools["is_attached"][self.row])

    @is_attached.setter
    def is_attached(self, value: bool) -> None:
        self._set(is_attached=value)

    @property
    def num_active(self) -> int:
        return int(self._view.ints["num_active"][self.row])

    @num_active.setter
    def num_active(self, value: int) -> None:
        self._set(num_active=value)

    @property
    def active_tokens(self) -> int:
        return int(self._view.ints["active_tokens"][self.row])

    @active_tokens.setter
    def active_tokens(self, value: int) -> None:
        self._set(active_tokens=value)

    @property
    def num_placed(self) -> int:
        return int(self._view.ints["num_placed"][self.row])

    @num_placed.setter
    def num_placed(self, value: int) -> None:
        self._set(num_placed=value)

    @property
    def is_alone(self) -> bool:
        """Nobody else may be placed there."""
        return bool(self._view.bools["is_reserved"][self.row])

    @is_alone.setter
    def is_alone(self, value: bool) -> None:
        self._set(is_reserved=value)

    @property
    def state(self) -> str:
        """For people."""
        if self.progress.is_draining:
            return "draining"
        return "set aside" if self.is_aside else "ready" if self.is_attached else "attaching"

    @property
    def is_aside(self) -> bool:
        return bool(self._view.bools["is_aside"][self.row])

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
        self.life = secrets.token_hex(8)
        """By which workers tell this router from others, and from what it was before."""
        self.view = WorkerView()
        self.expected = ExpectedBlocks()
        self.counters: Counter[str] = Counter()
        self._outliers = {role: Outliers() for role in Role}
        self._members: dict[str, Member] = {}
        self._any_description: WorkerDescription | None = None
        self._max_kv_tokens: int | None = None
        self._roots: dict[bytes, bytes] = {}
        self._rows: dict[str, int] = {}
        self._by_row: dict[int, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.on_joined: Callable[[Member], None] = lambda member: None
        self.on_lost: Callable[[Member], None] = lambda member: None
        self.on_change: Callable[[], None] = lambda: None
        self.num_refused = 0

    def __iter__(self):
        return iter(self._members.values())

    def of(self, role: Role) -> list[Member]:
        return [member for member in self._members.values() if member.role is role]

    async def tidy(self) -> None:
        """Sweeps the index of workers that have left, and sets slow ones aside; until cancelled."""
        next_judging_s = 0.0
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S if self._index.is_sweeping else JUDGE_INTERVAL_S)
            row = self._index.sweep()
            if row is not None:
                self.expected.forget(row)
                self.view.free_row(row)
            now = asyncio.get_running_loop().time()
            if now >= next_judging_s:
                next_judging_s = now + JUDGE_INTERVAL_S
                self.judge(now)

    def judge(self, now: float) -> None:
        """Sets aside the slow ones of each pool."""
        for role, outliers in self._outliers.items():
            members = self.of(role)
            fresh = {member.worker_id for member in members if member.progress.step != member.judged_step}
            aside = outliers.judge(_same_work(members), fresh, now)
            for member in members:
                member.judged_step = member.progress.step
                is_aside = member.worker_id in aside
                if is_aside != member.is_aside:
                    word = "is much slower than its pool: set aside" if is_aside else "is tried again"
                    logger.warning("%s %s", member.worker_id, word)
                    self.counters["set_aside"] += is_aside
                    self.view.set(member.row, is_aside=is_aside)
                    self.on_change()

    @property
    def num_indexed(self) -> int:
        return len(self._index)

    def at_row(self, row: int) -> Member:
        return self._by_row[row]

    def held(self, keys: list[int], now: float) -> list[Held]:
        """Who holds how much of a chain, what was placed a moment ago included."""
        return [*self._index.held(keys), *self.expected.held(keys, now)]

    def get(self, worker_id: str) -> Member | None:
        return self._members.get(worker_id)

    @property
    def max_kv_tokens(self) -> int | None:
        """Tokens of one choice that some decode worker can hold; None without any."""
        return self._max_kv_tokens

    @property
    def any_description(self) -> WorkerDescription | None:
        """All members agree on MUST_MATCH."""
        return self._any_description

    def _count(self) -> None:
        """After each joining and leaving: both are asked for several times for each request."""
        description = self._any_description = next((member.description for member in self), None)
        self._roots.clear()
        most = self.view.most_pool_tokens(usable=False)
        self._max_kv_tokens = min(most, description.context_tokens) if description is not None and most else None

    def root(self, salt: bytes) -> bytes | None:
        """Of the chains of that salt; made once, for it is asked for several times for each request."""
        description, root = self._any_description, self._roots.get(salt)
        if root is None and description is not None:
            if len(self._roots) >= MAX_ROOTS:
                self._roots.clear()
            root = self._roots[salt] = chain_root(description.model_id, description.fidelity, salt)
        return root

    def refusal(self, worker: WorkerDescription) -> Refusal | None:
        """Why this worker cannot be a member, naming the field."""
        if worker.protocol_version != PROTOCOL_VERSION:
            return _differs("protocol_version", worker.protocol_version, PROTOCOL_VERSION, "this router")
        if worker.vocabulary_size != self._sizes.vocabulary_size:
            return _differs(
                "vocabulary_size", worker.vocabulary_size, self._sizes.vocabulary_size, "this router's model"
            )
        for name in POSITIVE:
            if not 1 <= getattr(worker, name) <= MOST:
                return Refusal(name, f"{name} is {getattr(worker, name)}: it must be between 1 and {MOST}")
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
        refusal = self.refusal(worker)
        if refusal is None:
            await self._replace(worker.worker_id)
            refusal = self.refusal(worker)  # others may have joined meanwhile
        if refusal is not None:
            self.num_refused += 1
            logger.warning("refused %s: %s", worker.worker_id, refusal.detail)
            await stream.send(refusal)
            return
        member = Member(worker, self.view)
        self._members[worker.worker_id] = member
        self._rows[worker.worker_id] = member.row
        self._by_row[member.row] = member
        self._count()
        task = asyncio.current_task()
        assert task is not None
        self._tasks[worker.worker_id] = task
        try:
            await stream.send(Welcome(self._router_id, self.life))
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
            member.fell_silent = True
            logger.warning("%s was silent for %g s: taken for dead", member.worker_id, self._silence_s)

    async def _listen(self, member: Member, stream: Stream[JoinDown, JoinUp]) -> None:
        while True:
            async with asyncio.timeout(self._silence_s):
                progress = await stream.receive()
            if isinstance(progress, WorkerProgress):
                member.progress = progress
                self.view.progressed(member.row, progress, self._rows, asyncio.get_running_loop().time())
                if not self._take_events(member, progress):
                    logger.warning("%s: block events are missing; asking for all of them", member.worker_id)
                    self.counters["snapshots_asked"] += 1
                    await stream.send(SnapshotWanted())
                self.on_change()

    def _take_events(self, member: Member, progress: WorkerProgress) -> bool:
        """False: some are missing. What came since the last whole picture stays: it is a hint."""
        num_events = len(progress.sealed_block_ids) + len(progress.evicted_block_ids)
        if progress.is_snapshot:
            if member.has_told_all:
                self._index.remove_all(member.row)
            member.has_told_all, member.next_event = True, progress.first_event
        elif member.next_event is None:
            return True  # the snapshot is on its way
        elif progress.first_event != member.next_event:
            member.next_event = None
            return False
        member.next_event = progress.first_event + num_events
        evicted = keys_of(progress.evicted_block_ids)
        self._index.add(member.row, keys_of(progress.sealed_block_ids))
        self._index.remove(member.row, evicted)
        self.expected.remove(member.row, evicted)
        self.counters["block_events"] += num_events
        return True

    async def _beat(self, stream: Stream[JoinDown, JoinUp]) -> None:
        while True:
            await stream.send(Beat())
            await asyncio.sleep(BEAT_INTERVAL_S)

    def _leave(self, member: Member) -> None:
        if self._members.get(member.worker_id) is member:
            del self._members[member.worker_id]
            del self._tasks[member.worker_id]
            del self._rows[member.worker_id]
            self.view.close_row(member.row)
            self._count()
            self._index.retire(member.row)
            self.on_lost(member)
            member.leave()
            del self._by_row[member.row]
            if any(other.is_aside for other in self.of(member.role)):
                self.judge(asyncio.get_running_loop().time())  # fewer may be aside, now
            self.on_change()


def _differs(field_name: str, theirs: object, ours: object, whose: str) -> Refusal:
    detail = (
        f"{field_name} is {theirs!r}, but {whose} has {ours!r}: start all workers of a deployment with the same model, "
        "weights, block size and version"
    )
    return Refusal(field_name, detail)


def _same_work(members: list[Member]) -> dict[str, float]:
    """Seconds for the same work, by worker: what most of the pool have been measured at."""
    of_each = {
        member.worker_id: dict(sane(member.progress.step_s))
        if member.role is Role.DECODE
        else {size: 1 / rate for size, rate in sane(member.progress.tokens_per_s)}
        for member in members
    }
    counts = Counter(size for known in of_each.values() for size in known)
    if not counts:
        return {}
    size = max(counts, key=lambda size: (counts[size], -size))
    return {name: known[size] for name, known in of_each.items() if size in known}
