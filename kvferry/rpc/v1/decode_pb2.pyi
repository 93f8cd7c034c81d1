from kvferry.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChoiceEndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHOICE_END_REASON_UNSPECIFIED: _ClassVar[ChoiceEndReason]
    CHOICE_END_REASON_STOP: _ClassVar[ChoiceEndReason]
    CHOICE_END_REASON_LENGTH: _ClassVar[ChoiceEndReason]
    CHOICE_END_REASON_CANCELLED: _ClassVar[ChoiceEndReason]
    CHOICE_END_REASON_DEADLINE: _ClassVar[ChoiceEndReason]
    CHOICE_END_REASON_UNPLACED: _ClassVar[ChoiceEndReason]
    CHOICE_END_REASON_TOO_LARGE: _ClassVar[ChoiceEndReason]
    CHOICE_END_REASON_INVALID: _ClassVar[ChoiceEndReason]
    CHOICE_END_REASON_ENGINE_ERROR: _ClassVar[ChoiceEndReason]
CHOICE_END_REASON_UNSPECIFIED: ChoiceEndReason
CHOICE_END_REASON_STOP: ChoiceEndReason
CHOICE_END_REASON_LENGTH: ChoiceEndReason
CHOICE_END_REASON_CANCELLED: ChoiceEndReason
CHOICE_END_REASON_DEADLINE: ChoiceEndReason
CHOICE_END_REASON_UNPLACED: ChoiceEndReason
CHOICE_END_REASON_TOO_LARGE: ChoiceEndReason
CHOICE_END_REASON_INVALID: ChoiceEndReason
CHOICE_END_REASON_ENGINE_ERROR: ChoiceEndReason

class AttachRequest(_message.Message):
    __slots__ = ("open", "cancel", "beat")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    open: RequestOpen
    cancel: RequestCancel
    beat: RouterBeat
    def __init__(self, open: _Optional[_Union[RequestOpen, _Mapping]] = ..., cancel: _Optional[_Union[RequestCancel, _Mapping]] = ..., beat: _Optional[_Union[RouterBeat, _Mapping]] = ...) -> None: ...

class ChoiceStart(_message.Message):
    __slots__ = ("choice", "emitted_tokens")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    emitted_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, choice: _Optional[int] = ..., emitted_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestOpen(_message.Message):
    __slots__ = ("request_number", "attempt", "prompt_tokens", "choices", "sampling", "salt", "sources", "holders", "priority", "time_left_ms", "local_tokens")
    REQUEST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_number: int
    attempt: int
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceStart]
    sampling: _common_pb2.Sampling
    salt: bytes
    sources: _containers.RepeatedCompositeFieldContainer[_common_pb2.Source]
    holders: _containers.RepeatedCompositeFieldContainer[_common_pb2.Source]
    priority: int
    time_left_ms: int
    local_tokens: int
    def __init__(self, request_number: _Optional[int] = ..., attempt: _Optional[int] = ..., prompt_tokens: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[_Union[ChoiceStart, _Mapping]]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., salt: _Optional[bytes] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.Source, _Mapping]]] = ..., holders: _Optional[_Iterable[_Union[_common_pb2.Source, _Mapping]]] = ..., priority: _Optional[int] = ..., time_left_ms: _Optional[int] = ..., local_tokens: _Optional[int] = ...) -> None: ...

class RequestCancel(_message.Message):
    __slots__ = ("request_number", "attempt", "choices")
    REQUEST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    request_number: int
    attempt: int
    choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_number: _Optional[int] = ..., attempt: _Optional[int] = ..., choices: _Optional[_Iterable[int]] = ...) -> None: ...

class RouterBeat(_message.Message):
    __slots__ = ("protocol_version", "router_life")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_LIFE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    router_life: str
    def __init__(self, protocol_version: _Optional[int] = ..., router_life: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("step", "beat")
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    step: StepOutput
    beat: WorkerBeat
    def __init__(self, step: _Optional[_Union[StepOutput, _Mapping]] = ..., beat: _Optional[_Union[WorkerBeat, _Mapping]] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("step", "tokens", "starts", "ends", "prompt_logprobs", "begun", "paused")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    step: int
    tokens: _containers.RepeatedCompositeFieldContainer[NewTokens]
    starts: _containers.RepeatedCompositeFieldContainer[StartReport]
    ends: _containers.RepeatedCompositeFieldContainer[ChoiceEnd]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    begun: _containers.RepeatedScalarFieldContainer[int]
    paused: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[NewTokens, _Mapping]]] = ..., starts: _Optional[_Iterable[_Union[StartReport, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[ChoiceEnd, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., begun: _Optional[_Iterable[int]] = ..., paused: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("request_number", "attempt", "position", "logprobs")
    REQUEST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_number: int
    attempt: int
    position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PlaceLogprobs]
    def __init__(self, request_number: _Optional[int] = ..., attempt: _Optional[int] = ..., position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PlaceLogprobs, _Mapping]]] = ...) -> None: ...

class NewTokens(_message.Message):
    __slots__ = ("request_number", "attempt", "choice", "index", "token_ids", "logprobs")
    REQUEST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_number: int
    attempt: int
    choice: int
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PlaceLogprobs]
    def __init__(self, request_number: _Optional[int] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PlaceLogprobs, _Mapping]]] = ...) -> None: ...

class StartReport(_message.Message):
    __slots__ = ("request_number", "attempt", "fetch_opened_us", "first_block_us", "last_block_us", "tail_planned_us", "first_token_us", "num_local_tokens", "num_fetched_tokens", "num_source_cached_tokens", "num_computed_tokens", "num_fetched_blocks", "fetched_bytes", "source_worker_id", "road")
    REQUEST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FETCH_OPENED_US_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_US_FIELD_NUMBER: _ClassVar[int]
    LAST_BLOCK_US_FIELD_NUMBER: _ClassVar[int]
    TAIL_PLANNED_US_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    NUM_LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SOURCE_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FETCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROAD_FIELD_NUMBER: _ClassVar[int]
    request_number: int
    attempt: int
    fetch_opened_us: int
    first_block_us: int
    last_block_us: int
    tail_planned_us: int
    first_token_us: int
    num_local_tokens: int
    num_fetched_tokens: int
    num_source_cached_tokens: int
    num_computed_tokens: int
    num_fetched_blocks: int
    fetched_bytes: int
    source_worker_id: str
    road: str
    def __init__(self, request_number: _Optional[int] = ..., attempt: _Optional[int] = ..., fetch_opened_us: _Optional[int] = ..., first_block_us: _Optional[int] = ..., last_block_us: _Optional[int] = ..., tail_planned_us: _Optional[int] = ..., first_token_us: _Optional[int] = ..., num_local_tokens: _Optional[int] = ..., num_fetched_tokens: _Optional[int] = ..., num_source_cached_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_fetched_blocks: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., source_worker_id: _Optional[str] = ..., road: _Optional[str] = ...) -> None: ...

class ChoiceEnd(_message.Message):
    __slots__ = ("request_number", "attempt", "choice", "reason", "detail", "failed_source_ids")
    REQUEST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    FAILED_SOURCE_IDS_FIELD_NUMBER: _ClassVar[int]
    request_number: int
    attempt: int
    choice: int
    reason: ChoiceEndReason
    detail: str
    failed_source_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_number: _Optional[int] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ..., reason: _Optional[_Union[ChoiceEndReason, str]] = ..., detail: _Optional[str] = ..., failed_source_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerBeat(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...
