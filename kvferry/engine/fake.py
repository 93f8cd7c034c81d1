"""A model without weights whose next token derives from the KV bytes that it holds.

A token's KV is 64 bytes, a hash of the token and of the previous token's KV as read from the pool; the next token is a hash of
all KV bytes of the context as read through the block table. So a lost, stale, swapped or doubled block changes the output,
and equal tokens give equal output wherever and however they were computed. A sampled token derives from its seed, its choice and its
index as well, and any token from what its penalties look at, so that choices that are swapped show, and so does a continuation that
carries one of these over wrongly. Used by the tests, and by simulated workers (kvferry/engine/sim.py), where time, not text, is of
interest.
"""

import ctypes
from array import array
from collections.abc import Sequence
from hashlib import blake2b

import xxhash

from kvferry.engine.history import History
from kvferry.engine.plan import Chunk, Draw, Plan, StepResult
from kvferry.kv.memory import BlockFormat
from kvferry.messages import Sampling, TokenLogprobs

KV_BYTES = 64


class BytesMemory:
    """A block memory over plain bytes. `fill` is what unwritten memory holds."""

    def __init__(self, num_slots: int, block_size: int, fill: int = 0xAB):
        size, total = KV_BYTES * block_size, KV_BYTES * block_size * (num_slots + 1)
        self.format = BlockFormat("uint8", (1, 1, 1, block_size, KV_BYTES), block_size, size)
        self.num_slots = num_slots
        self._bytes = memoryview(bytearray([fill]) * total if fill else bytearray(total))  # zeros are not touched yet
        self.address: int | None = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))

    def view(self, slot: int) -> memoryview:
        size = self.format.block_bytes
        return self._bytes[slot * size : (slot + 1) * size]

    def to_host(self, slots: Sequence[int]) -> None:
        """Steps run over these very bytes."""

    def filled(self, slots: Sequence[int]) -> None:
        """Steps run over these very bytes."""


class FakeRunner:
    """A runner over `BytesMemory`."""

    def __init__(self, memory: BytesMemory, vocabulary_size: int = 1000, window: int = 0):
        """`window`: only so many positions are looked at for the next token; 0: all."""
        self._memory, self._vocabulary_size, self._window = memory, vocabulary_size, window

    def run(self, plan: Plan) -> StepResult:
        tokens, logprobs, scores = dict[int, int](), dict[int, TokenLogprobs](), dict[int, tuple[TokenLogprobs, ...]]()
        for chunk in plan.chunks:
            token = self._run(chunk)
            if token is not None:
                tokens[chunk.sequence_id] = token
                if chunk.draw is not None and chunk.draw.sampling.num_logprobs is not None:
                    logprobs[chunk.sequence_id] = fake_logprobs(token, chunk.draw.sampling.num_logprobs)
            if chunk.scoring is not None:
                scores[chunk.sequence_id] = tuple(
                    fake_logprobs(target, chunk.scoring.num_top) for target in chunk.scoring.targets
                )
        return StepResult(tokens, logprobs=logprobs, scores=scores)

    def _run(self, chunk: Chunk) -> int | None:
        previous = bytes(self._kv(chunk, chunk.start - 1)) if chunk.start else b""
        for position, token in enumerate(chunk.tokens, start=chunk.start):
            previous = kv_of(previous, token)
            self._kv(chunk, position)[:] = previous
        if chunk.draw is None:
            return None
        end = chunk.start + len(chunk.tokens)
        begin = max(end - self._window, 0) if self._window else 0
        return drawn_token(self._context(chunk, begin, end), self._vocabulary_size, chunk.draw)

    def _context(self, chunk: Chunk, begin: int, end: int) -> bytes:
        """The KV of positions [begin, end), read through the block table."""
        size = self._memory.format.block_size
        first, last = begin // size, -(-end // size)
        blocks = b"".join([self._memory.view(slot) for slot in chunk.slots[first:last]])
        return blocks[(begin - first * size) * KV_BYTES : (end - first * size) * KV_BYTES]

    def _kv(self, chunk: Chunk, position: int) -> memoryview:
        block, offset = divmod(position, self._memory.format.block_size)
        return self._memory.view(chunk.slots[block])[offset * KV_BYTES : (offset + 1) * KV_BYTES]


def fake_logprobs(token: int, num_top: int) -> TokenLogprobs:
    """A function of the token alone, which is its own likeliest."""
    return TokenLogprobs(-float(token), 1, tuple((token + k, -float(token + k)) for k in range(num_top)))


def kv_of(previous: bytes, token: int) -> bytes:
    return blake2b(previous + token.to_bytes(4, "little"), digest_size=KV_BYTES).digest()


def drawn_token(context: bytes, vocabulary_size: int, draw: Draw) -> int:
    """Greedy choices of one prompt are equal, sampled ones are not, as with a real model."""
    sampling = draw.sampling
    seed = sampling.seed if sampling.temperature else 0
    token = xxhash.xxh3_64_intdigest(context, seed) % vocabulary_size
    if not (sampling.temperature or sampling.has_penalties):
        return token
    place = (draw.choice, draw.index) if sampling.temperature else ()
    history = draw.history
    seen = () if history is None else (-1, *history.prompt_tokens, -1, *history.answer_tokens)
    return xxhash.xxh3_64_intdigest(array("q", (token, *place, *seen)).tobytes(), seed) % vocabulary_size


def fake_answer(
    prompt: Sequence[int], sampling: Sampling, vocabulary_size: int = 1000, window: int = 0, choice: int = 0
) -> list[int]:
    """What any undisturbed service must answer: the reference, computed without pool or plan."""
    context, previous, answer = b"", b"", list[int]()
    pending = list(prompt)
    while len(answer) < sampling.max_tokens:
        for token in pending:
            previous = kv_of(previous, token)
            context += previous
        history = History([*prompt, *answer], len(prompt)) if sampling.has_penalties else None
        seen = context[-window * KV_BYTES :] if window else context
        token = drawn_token(seen, vocabulary_size, Draw(sampling, choice, len(answer), history))
        answer.append(token)
        if token in sampling.stop_token_ids:
            break
        pending = [token]
    return answer
