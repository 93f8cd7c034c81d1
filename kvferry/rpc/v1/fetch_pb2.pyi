from kvferry.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FETCH_STATE_UNSPECIFIED: _ClassVar[FetchState]
    FETCH_STATE_QUEUED: _ClassVar[FetchState]
    FETCH_STATE_COMPUTING: _ClassVar[FetchState]
    FETCH_STATE_SENDING: _ClassVar[FetchState]

class FetchEndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FETCH_END_REASON_UNSPECIFIED: _ClassVar[FetchEndReason]
    FETCH_END_REASON_COMPLETE: _ClassVar[FetchEndReason]
    FETCH_END_REASON_MISSING: _ClassVar[FetchEndReason]
    FETCH_END_REASON_TOO_LARGE: _ClassVar[FetchEndReason]
    FETCH_END_REASON_REFUSED: _ClassVar[FetchEndReason]
    FETCH_END_REASON_DEADLINE: _ClassVar[FetchEndReason]
    FETCH_END_REASON_ENGINE_ERROR: _ClassVar[FetchEndReason]
    FETCH_END_REASON_SHUTDOWN: _ClassVar[FetchEndReason]
    FETCH_END_REASON_STRANGER: _ClassVar[FetchEndReason]
FETCH_STATE_UNSPECIFIED: FetchState
FETCH_STATE_QUEUED: FetchState
FETCH_STATE_COMPUTING: FetchState
FETCH_STATE_SENDING: FetchState
FETCH_END_REASON_UNSPECIFIED: FetchEndReason
FETCH_END_REASON_COMPLETE: FetchEndReason
FETCH_END_REASON_MISSING: FetchEndReason
FETCH_END_REASON_TOO_LARGE: FetchEndReason
FETCH_END_REASON_REFUSED: FetchEndReason
FETCH_END_REASON_DEADLINE: FetchEndReason
FETCH_END_REASON_ENGINE_ERROR: FetchEndReason
FETCH_END_REASON_SHUTDOWN: FetchEndReason
FETCH_END_REASON_STRANGER: FetchEndReason

class FetchRequest(_message.Message):
    __slots__ = ("open", "ack", "meet", "probe", "done")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    MEET_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    open: FetchOpen
    ack: FetchAck
    meet: FetchMeet
    probe: FetchProbe
    done: FetchDone
    def __init__(self, open: _Optional[_Union[FetchOpen, _Mapping]] = ..., ack: _Optional[_Union[FetchAck, _Mapping]] = ..., meet: _Optional[_Union[FetchMeet, _Mapping]] = ..., probe: _Optional[_Union[FetchProbe, _Mapping]] = ..., done: _Optional[_Union[FetchDone, _Mapping]] = ...) -> None: ...

class FetchMeet(_message.Message):
    __slots__ = ("protocol_version", "model_id", "fidelity")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FIDELITY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model_id: str
    fidelity: str
    def __init__(self, protocol_version: _Optional[int] = ..., model_id: _Optional[str] = ..., fidelity: _Optional[str] = ...) -> None: ...

class FetchProbe(_message.Message):
    __slots__ = ("road", "ticket", "num_blocks")
    ROAD_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    road: str
    ticket: bytes
    num_blocks: int
    def __init__(self, road: _Optional[str] = ..., ticket: _Optional[bytes] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class FetchOpen(_message.Message):
    __slots__ = ("protocol_version", "model_id", "fidelity", "salt", "tokens", "first_block", "hold_only", "priority", "time_left_ms", "holders", "road", "ticket", "incarnation", "warm")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FIDELITY_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    HOLD_ONLY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    ROAD_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model_id: str
    fidelity: str
    salt: bytes
    tokens: _containers.RepeatedScalarFieldContainer[int]
    first_block: int
    hold_only: bool
    priority: int
    time_left_ms: int
    holders: _containers.RepeatedCompositeFieldContainer[_common_pb2.Source]
    road: str
    ticket: bytes
    incarnation: str
    warm: bool
    def __init__(self, protocol_version: _Optional[int] = ..., model_id: _Optional[str] = ..., fidelity: _Optional[str] = ..., salt: _Optional[bytes] = ..., tokens: _Optional[_Iterable[int]] = ..., first_block: _Optional[int] = ..., hold_only: _Optional[bool] = ..., priority: _Optional[int] = ..., time_left_ms: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[_common_pb2.Source, _Mapping]]] = ..., road: _Optional[str] = ..., ticket: _Optional[bytes] = ..., incarnation: _Optional[str] = ..., warm: _Optional[bool] = ...) -> None: ...

class FetchAck(_message.Message):
    __slots__ = ("frame_number",)
    FRAME_NUMBER_FIELD_NUMBER: _ClassVar[int]
    frame_number: int
    def __init__(self, frame_number: _Optional[int] = ...) -> None: ...

class FetchDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("progress", "frame", "end", "offers", "done")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    progress: FetchProgress
    frame: Frame
    end: FetchEnd
    offers: FetchOffers
    done: FetchDone
    def __init__(self, progress: _Optional[_Union[FetchProgress, _Mapping]] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ..., end: _Optional[_Union[FetchEnd, _Mapping]] = ..., offers: _Optional[_Union[FetchOffers, _Mapping]] = ..., done: _Optional[_Union[FetchDone, _Mapping]] = ...) -> None: ...

class FetchOffers(_message.Message):
    __slots__ = ("incarnation", "offers")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    offers: _containers.RepeatedCompositeFieldContainer[RoadOffer]
    def __init__(self, incarnation: _Optional[str] = ..., offers: _Optional[_Iterable[_Union[RoadOffer, _Mapping]]] = ...) -> None: ...

class RoadOffer(_message.Message):
    __slots__ = ("road", "detail")
    ROAD_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    road: str
    detail: bytes
    def __init__(self, road: _Optional[str] = ..., detail: _Optional[bytes] = ...) -> None: ...

class FetchProgress(_message.Message):
    __slots__ = ("step", "state", "num_sealed_blocks", "is_reading")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_SEALED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_READING_FIELD_NUMBER: _ClassVar[int]
    step: int
    state: FetchState
    num_sealed_blocks: int
    is_reading: bool
    def __init__(self, step: _Optional[int] = ..., state: _Optional[_Union[FetchState, str]] = ..., num_sealed_blocks: _Optional[int] = ..., is_reading: _Optional[bool] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("frame_number", "header", "payload", "place")
    FRAME_NUMBER_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    frame_number: int
    header: bytes
    payload: bytes
    place: bytes
    def __init__(self, frame_number: _Optional[int] = ..., header: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., place: _Optional[bytes] = ...) -> None: ...

class FetchEnd(_message.Message):
    __slots__ = ("reason", "first_missing_block", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIRST_MISSING_BLOCK_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: FetchEndReason
    first_missing_block: int
    detail: str
    def __init__(self, reason: _Optional[_Union[FetchEndReason, str]] = ..., first_missing_block: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...
