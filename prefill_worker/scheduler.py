"""The prefill policy: fills a step with large chunks of few chains, up to a budget of time, and wants no logits.

Pure: no I/O, no clock. A chain starts when all of it fits into the pool; short chains may pass long ones, which cannot starve.
Computing has no owner: at each plan a chain goes on over what is sealed and claims what it computes in this step; whoever wants a
claimed block too simply finds it sealed at a later plan. So shared work passes on when one waiter leaves, and ends with the last.
"""

from collections import Counter
from enum import Enum
from itertools import groupby

from kvferry.engine.budget import StepBudget
from kvferry.engine.plan import Chunk, Plan, StepResult
from kvferry.engine.sequence import Sequence
from kvferry.errors import InvalidRequest, PoolExhausted
from kvferry.kv.pool import BlockPool
from kvferry.messages import Source
from kvferry.turns import bucket, start_in_order, turns


class ChainState(Enum):
    WAITING = "waiting"
    READING = "reading"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


TRANSITIONS = frozenset(
    {
        (ChainState.WAITING, ChainState.READING),  # its beginning comes from a holder
        (ChainState.WAITING, ChainState.RUNNING),
        (ChainState.READING, ChainState.RUNNING),
        (ChainState.RUNNING, ChainState.DONE),
        (ChainState.RUNNING, ChainState.FAILED),
    }
)


class Chain:
    """Whole blocks that somebody waits for. `sequence` has a multiple of the block size of tokens."""

    def __init__(self, sequence: Sequence, priority: int, arrival: int, holders: tuple[Source, ...], salt: bytes):
        self.sequence = sequence
        self.holders = list(holders)
        self.salt = salt
        self.priority, self.order = priority, (-priority, arrival)
        self.deadline_s: float | None = None
        """On the loop's clock; whoever wants the chain gives it up then. For those that it is read from."""
        self.num_passed = 0
        self.state = ChainState.WAITING
        self.num_done_blocks = 0
        self.num_cached_blocks = 0
        self.failure = ""

    @property
    def size(self) -> int:
        return len(self.sequence.tokens)

    @property
    def num_missing_tokens(self) -> int:
        return len(self.sequence.tokens) - self.sequence.num_computed

    def move(self, state: ChainState) -> None:
        if (self.state, state) not in TRANSITIONS:
            raise AssertionError(f"a chain cannot go from {self.state.value} to {state.value}")
        self.state = state


class PrefillScheduler:
    def __init__(self, pool: BlockPool, block_size: int, budget: StepBudget):
        self._pool, self._block_size, self._budget = pool, block_size, budget
        self._chains: dict[int, Chain] = {}
        self._num_admitted = 0
        self._reads: list[tuple[Chain, Source]] = []

    @property
    def num_tokens(self) -> int:
        return sum(chain.size for chain in self._chains.values())

    @property
    def num_missing_tokens(self) -> int:
        """Yet to be computed or read; what is sealed but not yet adopted counts, too."""
        return sum(chain.num_missing_tokens for chain in self._chains.values())

    @property
    def missing_by_size(self) -> dict[int, int]:
        """The same by what each chain still lacks, as a power of two: `turns` lets those that lack less pass."""
        missing: Counter[int] = Counter()
        for chain in self._chains.values():
            if chain.num_missing_tokens:
                missing[bucket(chain.num_missing_tokens)] += chain.num_missing_tokens
        return dict(missing)

    @property
    def num_waiting(self) -> int:
        return sum(chain.state is ChainState.WAITING for chain in self._chains.values())

    @property
    def num_reading(self) -> int:
        return sum(chain.state is ChainState.READING for chain in self._chains.values())

    @property
    def num_running(self) -> int:
        return sum(chain.state is ChainState.RUNNING for chain in self._chains.values())

    def admit(
        self, tokens: tuple[int, ...], root: bytes, priority: int, holders: tuple[Source, ...] = (), salt: bytes = b""
    ) -> Chain:
        """Raises InvalidRequest for a chain that can never fit."""
        if len(tokens) > self._pool.num_slots * self._block_size:
            limit = self._pool.num_slots * self._block_size
            raise InvalidRequest(f"a chain of {len(tokens)} tokens does not fit into a pool of {limit}", "tokens")
        self._num_admitted += 1
        sequence = Sequence(self._num_admitted, list(tokens), root, self._block_size, self._pool)
        chain = Chain(sequence, priority, self._num_admitted, holders, salt)
        self._chains[sequence.sequence_id] = chain
        return chain

    def abort(self, chain: Chain) -> None:
        """Idempotent; also for chains that have ended."""
        self._end(chain)

    def take_reads(self) -> list[tuple[Chain, Source]]:
        """Chains whose next blocks shall be read from a holder, since the last call."""
        reads, self._reads = self._reads, []
        return reads

    def read_ended(self, chain: Chain) -> None:
        """The holder has delivered what it had: ask the next one, or compute. Ignored for chains that have ended."""
        if chain.state is ChainState.READING and chain.sequence.sequence_id in self._chains:
            self._read_or_run(chain)

    def plan(self, step: int, now: float) -> Plan | None:
        del now
        while True:
            num_chains = len(self._chains)
            plan = self._plan(step)
            if plan is not None or len(self._chains) == num_chains:
                return plan  # else a chain ended by adopting alone, and its slots may let another one start

    def _plan(self, step: int) -> Plan | None:
        ordered = sorted(self._chains.values(), key=lambda chain: chain.order)
        start_in_order((chain for chain in ordered if chain.state is ChainState.WAITING), self._start)
        for chain in ordered:
            if chain.state is ChainState.RUNNING:
                self._adopt(chain)
        left, claimed, chunks = self._budget.num_tokens(), set[bytes](), list[Chunk]()
        running = [chain for chain in ordered if chain.state is ChainState.RUNNING]
        for _, group in groupby(running, key=lambda chain: chain.priority):
            chains = list(group)
            for turn in turns([chain.num_missing_tokens for chain in chains], left, self._block_size, step):
                if left < self._block_size:
                    break
                chunk = self._chunk(chains[turn.place].sequence, min(left, turn.max_tokens), claimed)
                if chunk is not None:
                    chunks.append(chunk)
                    left -= len(chunk.tokens)
        return Plan(step, tuple(chunks)) if chunks else None

    def commit(self, plan: Plan, result: StepResult, now: float) -> None:
        del now
        for chunk in plan.chunks:
            chain = self._chains.get(chunk.sequence_id)
            assert chain is not None, "chains are aborted between steps only"
            if chunk.sequence_id in result.failures:
                chain.failure = result.failures[chunk.sequence_id]
                chain.move(ChainState.FAILED)
                self._end(chain)
                continue
            chain.sequence.computed(chunk.start + len(chunk.tokens))
            self._progressed(chain)
        if not result.failures:
            self._budget.measured(plan.num_tokens, result.duration_s)

    @property
    def is_idle(self) -> bool:
        return not self._chains

    def next_deadline(self) -> float | None:
        return None

    def _start(self, chain: Chain) -> bool:
        sequence = chain.sequence
        missing = len(sequence.block_ids) - self._pool.num_sealed_prefix(sequence.block_ids)
        if missing > self._pool.num_available:
            return False
        try:
            chain.num_cached_blocks = sequence.start(len(sequence.tokens), len(sequence.block_ids))
        except PoolExhausted:  # adopting made evictable blocks live
            return False
        self._read_or_run(chain)
        return True

    def _read_or_run(self, chain: Chain) -> None:
        chain.num_done_blocks = chain.sequence.num_sealed_blocks
        is_whole = chain.num_done_blocks == len(chain.sequence.block_ids)
        if chain.holders and not is_whole:
            if chain.state is ChainState.WAITING:
                chain.move(ChainState.READING)
            self._reads.append((chain, chain.holders.pop(0)))
            return
        chain.move(ChainState.RUNNING)
        self._progressed(chain)

    def _adopt(self, chain: Chain) -> None:
        adopted = chain.sequence.adopt_sealed(len(chain.sequence.block_ids))
        if adopted:
            chain.sequence.give_back_excess(len(chain.sequence.tokens))
            self._progressed(chain)

    def _chunk(self, sequence: Sequence, max_tokens: int, claimed: set[bytes]) -> Chunk | None:
        """Whole blocks from where the sequence is, up to the budget, a claimed block or one that is sealed already."""
        first = last = sequence.num_sealed_blocks
        limit = min(len(sequence.block_ids), first + max_tokens // self._block_size)
        while last < limit and sequence.block_ids[last] not in claimed and sequence.block_ids[last] not in self._pool:
            claimed.add(sequence.block_ids[last])
            last += 1
        if last == first:
            return None
        start, target = first * self._block_size, last * self._block_size
        return Chunk(sequence.sequence_id, tuple(sequence.tokens[start:target]), start, sequence.cover(target))

    def _progressed(self, chain: Chain) -> None:
        chain.num_done_blocks = chain.sequence.num_sealed_blocks
        if chain.num_done_blocks == len(chain.sequence.block_ids):
            chain.move(ChainState.DONE)
            self._end(chain)

    def _end(self, chain: Chain) -> None:
        self._reads = [(other, holder) for other, holder in self._reads if other is not chain]
        chain.sequence.stop()
        self._chains.pop(chain.sequence.sequence_id, None)
