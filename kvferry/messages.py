"""The values that cross a boundary: between roles, between a role's parts, between processes.

Plain frozen values of the standard library; what they look like on a wire is known to kvferry/rpc/converter.py alone.
Units are in the names; token ids are ints within the vocabulary, block ids 16 bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

PROTOCOL_VERSION = 4


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


# ---------------------------------------------------------------------------------------------- requests and choices


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a choice's tokens are chosen and when it ends. Applied in the order of kvferry/engine/sampling.py."""

    seed: int
    """The random number of a token is a pure function of (seed, choice, index)."""
    max_tokens: int
    """Counted from index 0, over all attempts. 0: nothing is sampled, the prompt is only computed."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one's probability are left out."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both over the tokens that the choice has yielded."""
    repetition_penalty: float = 1.0
    """Over the tokens of the prompt, too."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    """Before, stop tokens cannot be drawn, and stop texts do not count."""
    stop_token_ids: tuple[int, ...] = ()
    """A choice ends with the first of these that it yields."""
    num_logprobs: int | None = None
    """None: no log-probabilities; else those of the yielded tokens and of so many of the likeliest."""
    num_prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one place, of the model's own distribution: before bias, penalties and temperature."""

    logprob: float
    """Of the token that stands there; always finite."""
    rank: int
    """Its place among all tokens; 1 is the likeliest."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens, best first."""


@dataclass(frozen=True, slots=True)
class Source:
    """A worker that blocks may be fetched from."""

    worker_id: str
    address: str


@dataclass(frozen=True, slots=True)
class ChoiceStart:
    choice: int
    emitted_tokens: tuple[int, ...] = ()
    """Of earlier attempts: part of the prompt now; their count is the next token's index."""


@dataclass(frozen=True, slots=True)
class RequestOpen:
    """Router to decode worker: everything a worker must know of a request."""

    number: int
    attempt: int
    prompt_tokens: tuple[int, ...]
    choices: tuple[ChoiceStart, ...]
    sampling: Sampling
    salt: bytes = b""
    sources: tuple[Source, ...] = ()
    """To fetch from, in order; none: compute here."""
    holders: tuple[Source, ...] = ()
    """May hold the beginning of the chain; handed on to the source."""
    priority: int = 0
    time_left_s: float | None = None
    local_tokens: int = 0
    """Up to so many missing tokens are computed here, without asking a source."""


@dataclass(frozen=True, slots=True)
class RequestCancel:
    number: int
    attempt: int
    choices: tuple[int, ...] = ()
    """Empty: all of them."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Proof of life. `step` is a worker's step counter; 0 from a router."""

    step: int = 0
    protocol_version: int = PROTOCOL_VERSION
    """Told by a router in its beats, the first of which opens the stream."""
    router_life: str = ""
    """As in the router's welcome."""


RouterMessage = RequestOpen | RequestCancel | Beat


class ChoiceEndReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    UNPLACED = "unplaced"
    TOO_LARGE = "too_large"
    INVALID = "invalid"
    ENGINE_ERROR = "engine_error"


@dataclass(frozen=True, slots=True)
class NewTokens:
    number: int
    attempt: int
    choice: int
    index: int
    """Of the first of the tokens, within the choice."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, if asked for."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the prompt's tokens from `position` on. The first token of a prompt (position 0) has none."""

    number: int
    attempt: int
    position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class StartReport:
    """How a request's first choice came to its first token of this attempt; seconds since the opening arrived."""

    number: int
    attempt: int
    fetch_opened_s: float | None = None
    first_block_s: float | None = None
    last_block_s: float | None = None
    tail_planned_s: float | None = None
    first_token_s: float | None = None
    num_local_tokens: int = 0
    num_fetched_tokens: int = 0
    num_source_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_fetched_blocks: int = 0
    fetched_bytes: int = 0
    source_worker_id: str = ""
    road: str = ""
    """The last one that blocks came over."""


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    number: int
    attempt: int
    choice: int
    reason: ChoiceEndReason
    detail: str = ""
    failed_source_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Decode worker to router: all that is new for this router since the last one."""

    step: int
    tokens: tuple[NewTokens, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    starts: tuple[StartReport, ...] = ()
    ends: tuple[ChoiceEnd, ...] = ()
    begun: tuple[int, ...] = ()
    """Numbers of requests that take part in the next step, and did not in the one before it: said before it runs."""
    paused: tuple[int, ...] = ()
    """Numbers of requests that did, and do not any more, until they begin again."""


DecodeMessage = StepOutput | Beat


# ------------------------------------------------------------------------------------------------------------- fetch


@dataclass(frozen=True, slots=True)
class FetchOpen:
    """Reader to source: `tokens` (a multiple of the block size) name the chain; blocks from `first_block` are wanted."""

    model_id: str
    fidelity: str
    tokens: tuple[int, ...]
    first_block: int = 0
    salt: bytes = b""
    hold_only: bool = False
    priority: int = 0
    time_left_s: float | None = None
    holders: tuple[Source, ...] = ()
    road: str = ""
    """One of those that the source offered when the two met."""
    ticket: bytes = b""
    """Names the fetch on a road that leaves the stream: random bytes of the reader."""
    incarnation: str = ""
    """The life of the source that the reader has met."""
    warm: bool = False
    """No frames: the source computes what is missing, for a reader that has no room yet."""
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class FetchAck:
    """The reader has copied and checked a frame: the source may give up its references."""

    frame_number: int


@dataclass(frozen=True, slots=True)
class FetchMeet:
    """The first message of a meeting: which roads does the source offer?"""

    model_id: str
    fidelity: str
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class FetchProbe:
    """Within a meeting: one frame of the first slots, whatever they hold, over this road."""

    road: str
    ticket: bytes
    num_blocks: int


FetchUp = FetchOpen | FetchAck | FetchMeet | FetchProbe


class FetchState(Enum):
    QUEUED = "queued"
    COMPUTING = "computing"
    SENDING = "sending"


@dataclass(frozen=True, slots=True)
class FetchProgress:
    step: int
    state: FetchState
    num_sealed_blocks: int
    is_reading: bool = False
    """Of COMPUTING: from a holder, and nothing is computed yet."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Some consecutive whole blocks; see kvferry/kv/frame.py for the header.

    Their bytes are the payload (in pieces at the source), or, where the road leaves the stream, at a place it understands.
    """

    frame_number: int
    header: bytes
    payload: bytes | memoryview | tuple[memoryview, ...] = b""
    place: bytes = b""


class FetchEndReason(Enum):
    COMPLETE = "complete"
    MISSING = "missing"
    TOO_LARGE = "too_large"
    REFUSED = "refused"
    DEADLINE = "deadline"
    ENGINE_ERROR = "engine_error"
    SHUTDOWN = "shutdown"
    STRANGER = "stranger"


@dataclass(frozen=True, slots=True)
class FetchEnd:
    reason: FetchEndReason
    first_missing_block: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RoadOffer:
    road: str
    detail: bytes
    """What a reader must know to take it; the road's own encoding."""


@dataclass(frozen=True, slots=True)
class FetchOffers:
    """The answer to a meeting: best first."""

    incarnation: str
    offers: tuple[RoadOffer, ...]


FetchDown = FetchProgress | Frame | FetchEnd | FetchOffers


class FetchFailureKind(Enum):
    """Why a reader gave up on a source: names of metrics."""

    UNREACHABLE = "unreachable"
    SILENT = "silent"
    STREAM_ENDED = "stream_ended"
    BAD_FRAME = "bad_frame"
    MISSING = "missing"
    REFUSED = "refused"
    SOURCE_ERROR = "source_error"
    ROAD = "road"
    """No road between the two works."""
    QUEUED = "queued"
    """It waited at the source for longer than its budget."""
    COMPUTING = "computing"
    """The source computed without getting anywhere."""
    SENDING = "sending"
    """The source had the blocks and did not send them."""


# ---------------------------------------------------------------------------------------------------------- registry


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What a worker is. All of `router.members.MUST_MATCH` two workers must share to be paired."""

    worker_id: str
    incarnation: str
    role: Role
    address: str
    model_id: str
    fidelity: str
    numerics_id: str
    block_size: int
    block_bytes: int
    pool_tokens: int
    context_tokens: int
    vocabulary_size: int
    max_sequences: int
    pid: int = 0
    num_threads: int = 1
    ceiling_flops_per_s: float = 0.0
    ceiling_bytes_per_s: float = 0.0
    previous_end: str = ""
    """How the last process of this name ended ("signal 9", "code 1"), where whoever started this one knows."""
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class SlotCounts:
    num_free: int = 0
    num_filling: int = 0
    num_live: int = 0
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    step: int = 0
    num_waiting: int = 0
    num_fetching: int = 0
    num_running: int = 0
    num_serving: int = 0
    slots: SlotCounts = field(default_factory=SlotCounts)
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    sealed_block_ids: tuple[bytes, ...] = ()
    """Blocks announced since the last message: every eighth of a chain, and its end."""
    evicted_block_ids: tuple[bytes, ...] = ()
    """Announced ones that are gone."""
    first_event: int = 0
    """The number, in this membership, of the first of these ids; they count one each. A gap asks for a snapshot."""
    is_snapshot: bool = False
    """`sealed_block_ids` are all that are announced."""
    flops_per_s: float = 0.0
    bytes_per_s: float = 0.0
    kv_tokens: int = 0
    """That its sequences have, of whatever router."""
    waiting_tokens: int = 0
    """Yet to be computed, those that yield a token apart."""
    waiting_by_size: Mapping[int, int] = field(default_factory=dict[int, int])
    """The same by the size (a power of two) of what they belong to: short work passes long work."""
    your_sequences: int = 0
    """Of its sequences, those that the reader of this opened; decode workers only."""
    your_kv_tokens: int = 0
    step_s: Mapping[int, float] = field(default_factory=dict[int, float])
    """Measured (kvferry/worker/rates.py), as the next two."""
    tokens_per_s: Mapping[int, float] = field(default_factory=dict[int, float])
    link_bytes_per_s: Mapping[str, float] = field(default_factory=dict[str, float])
    is_draining: bool = False
    """It ends what it has and wants nothing new."""

    @property
    def num_sequences(self) -> int:
        return self.num_waiting + self.num_fetching + self.num_running


JoinUp = WorkerDescription | WorkerProgress


@dataclass(frozen=True, slots=True)
class Welcome:
    router_id: str
    router_life: str = ""
    """Random, new at every start of the router."""


@dataclass(frozen=True, slots=True)
class Refusal:
    field: str
    detail: str


@dataclass(frozen=True, slots=True)
class SnapshotWanted:
    """The router has lost count of the worker's blocks."""


JoinDown = Welcome | Refusal | Beat | SnapshotWanted
