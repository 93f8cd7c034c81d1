from kvferry.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("worker", "progress")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerDescription
    progress: WorkerProgress
    def __init__(self, worker: _Optional[_Union[WorkerDescription, _Mapping]] = ..., progress: _Optional[_Union[WorkerProgress, _Mapping]] = ...) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "incarnation", "role", "address", "model_id", "fidelity", "numerics_id", "block_size", "block_bytes", "pool_tokens", "context_tokens", "max_sequences", "pid", "num_threads", "vocabulary_size", "ceiling_flops_per_s", "ceiling_bytes_per_s", "previous_end")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FIDELITY_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    CEILING_FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CEILING_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_END_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    incarnation: str
    role: _common_pb2.WorkerRole
    address: str
    model_id: str
    fidelity: str
    numerics_id: str
    block_size: int
    block_bytes: int
    pool_tokens: int
    context_tokens: int
    max_sequences: int
    pid: int
    num_threads: int
    vocabulary_size: int
    ceiling_flops_per_s: float
    ceiling_bytes_per_s: float
    previous_end: str
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.WorkerRole, str]] = ..., address: _Optional[str] = ..., model_id: _Optional[str] = ..., fidelity: _Optional[str] = ..., numerics_id: _Optional[str] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., pool_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., max_sequences: _Optional[int] = ..., pid: _Optional[int] = ..., num_threads: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., ceiling_flops_per_s: _Optional[float] = ..., ceiling_bytes_per_s: _Optional[float] = ..., previous_end: _Optional[str] = ...) -> None: ...

class WorkerProgress(_message.Message):
    __slots__ = ("step", "num_waiting", "num_fetching", "num_running", "num_serving", "slots", "counters", "sealed_block_ids", "evicted_block_ids", "flops_per_s", "bytes_per_s", "first_event", "is_snapshot", "kv_tokens", "waiting_tokens", "your_sequences", "your_kv_tokens", "step_s", "tokens_per_s", "link_bytes_per_s", "is_draining", "waiting_by_size")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class StepSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    class TokensPerSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    class LinkBytesPerSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class WaitingBySizeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FETCHING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_SERVING_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SEALED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_EVENT_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    YOUR_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    YOUR_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    WAITING_BY_SIZE_FIELD_NUMBER: _ClassVar[int]
    step: int
    num_waiting: int
    num_fetching: int
    num_running: int
    num_serving: int
    slots: SlotCounts
    counters: _containers.ScalarMap[str, int]
    sealed_block_ids: bytes
    evicted_block_ids: bytes
    flops_per_s: float
    bytes_per_s: float
    first_event: int
    is_snapshot: bool
    kv_tokens: int
    waiting_tokens: int
    your_sequences: int
    your_kv_tokens: int
    step_s: _containers.ScalarMap[int, float]
    tokens_per_s: _containers.ScalarMap[int, float]
    link_bytes_per_s: _containers.ScalarMap[str, float]
    is_draining: bool
    waiting_by_size: _containers.ScalarMap[int, int]
    def __init__(self, step: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_fetching: _Optional[int] = ..., num_running: _Optional[int] = ..., num_serving: _Optional[int] = ..., slots: _Optional[_Union[SlotCounts, _Mapping]] = ..., counters: _Optional[_Mapping[str, int]] = ..., sealed_block_ids: _Optional[bytes] = ..., evicted_block_ids: _Optional[bytes] = ..., flops_per_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ..., first_event: _Optional[int] = ..., is_snapshot: _Optional[bool] = ..., kv_tokens: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., your_sequences: _Optional[int] = ..., your_kv_tokens: _Optional[int] = ..., step_s: _Optional[_Mapping[int, float]] = ..., tokens_per_s: _Optional[_Mapping[int, float]] = ..., link_bytes_per_s: _Optional[_Mapping[str, float]] = ..., is_draining: _Optional[bool] = ..., waiting_by_size: _Optional[_Mapping[int, int]] = ...) -> None: ...

class SlotCounts(_message.Message):
    __slots__ = ("num_free", "num_filling", "num_live", "num_cached")
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_FILLING_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    num_free: int
    num_filling: int
    num_live: int
    num_cached: int
    def __init__(self, num_free: _Optional[int] = ..., num_filling: _Optional[int] = ..., num_live: _Optional[int] = ..., num_cached: _Optional[int] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("welcome", "refusal", "beat", "snapshot_wanted")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_WANTED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refusal: Refusal
    beat: RegistryBeat
    snapshot_wanted: SnapshotWanted
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., beat: _Optional[_Union[RegistryBeat, _Mapping]] = ..., snapshot_wanted: _Optional[_Union[SnapshotWanted, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("router_id", "router_life")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_LIFE_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    router_life: str
    def __init__(self, router_id: _Optional[str] = ..., router_life: _Optional[str] = ...) -> None: ...

class SnapshotWanted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("field", "detail")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    field: str
    detail: str
    def __init__(self, field: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class RegistryBeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
