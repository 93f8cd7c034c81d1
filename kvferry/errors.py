"""The one tree of exceptions, grouped by what the caller may do, and its table to HTTP and gRPC codes.

KvferryError
├── RequestError        mend it: the request or the configuration is wrong
│   ├── InvalidRequest      a field has a wrong value (names it)
│   ├── NotFound            unknown model or path
│   ├── Conflict            another request has the same idempotency key
│   ├── MethodNotAllowed    known path, wrong method
│   ├── UnsupportedMedia    the body is not JSON by its header
│   ├── BodyTooLarge        more bytes than a request may have
│   └── ConfigurationError  at start: model, file, flag or pool
├── ElsewhereError      try elsewhere: this worker, source or block is no good
│   ├── FetchFailed         a source did not deliver (has a kind)
│   ├── RoadFailed          blocks cannot come over a road, or no longer
│   ├── BadFrame            a frame was damaged or not what was asked for (has a kind)
│   └── EngineLost          no step can be run any more in this process, which is to end
├── LaterError          try later: there is no room or no worker now
│   ├── Overloaded          a queue is full
│   ├── NoWorker            a pool is empty
│   └── PoolExhausted       a block pool has not that many slots now
└── FinalError          give up
    ├── DeadlineExceeded    its time ran out
    ├── EngineFailure       a step failed
    ├── JoinRefused         a router does not take this worker (names the field)
    └── Cancelled           nobody wants it any more

Errors are translated to a wire's codes once, at the edge, with `http_status` and `grpc_code`. Standard library only.
"""


class KvferryError(Exception):
    """The root. `message` says what happened, which value, and what to do."""

    http_status = 500
    grpc_code = "INTERNAL"
    openai_type = "server_error"
    code: str | None = None

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class RequestError(KvferryError):
    http_status, grpc_code, openai_type = 400, "INVALID_ARGUMENT", "invalid_request_error"
    param: str | None = None


class InvalidRequest(RequestError):
    """`param` is the offending field's name as the client wrote it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param, self.code = param, code


class Conflict(RequestError):
    http_status, grpc_code, code = 409, "ABORTED", "idempotency_key_in_use"


class NotFound(RequestError):
    http_status, grpc_code = 404, "NOT_FOUND"

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param, self.code = param, code


class MethodNotAllowed(RequestError):
    http_status, grpc_code = 405, "UNIMPLEMENTED"


class UnsupportedMedia(RequestError):
    http_status = 415


class BodyTooLarge(RequestError):
    http_status = 413


class ConfigurationError(RequestError):
    """Raised at start, before anything is served."""


class ElsewhereError(KvferryError):
    http_status, grpc_code = 502, "UNAVAILABLE"


class FetchFailed(ElsewhereError):
    """`kind` is one of kvferry.messages.FetchFailureKind's values."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class RoadFailed(ElsewhereError):
    """A road between two workers cannot be taken, or broke: another one may work."""


class BadFrame(ElsewhereError):
    """`kind` says which check failed: truncated, header, version, layout, shape, identity, order, place, digest."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class EngineLost(ElsewhereError):
    """Of a worker: its requests go on elsewhere, and no client hears of it."""


class LaterError(KvferryError):
    """`retry_after_s` is a guess at when it is worth another try."""

    http_status, grpc_code, openai_type = 503, "UNAVAILABLE", "service_unavailable"

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def retry_after(self) -> str:
        """As both doors say it: whole seconds."""
        return str(max(round(self.retry_after_s), 1))


class Overloaded(LaterError):
    http_status, grpc_code, openai_type, code = 429, "RESOURCE_EXHAUSTED", "rate_limit_error", "overloaded"


class NoWorker(LaterError):
    code = "no_worker"


class PoolExhausted(LaterError):
    """`num_wanted` slots were asked for, `num_available` could be had."""

    def __init__(self, num_wanted: int, num_available: int):
        super().__init__(f"{num_wanted} slots wanted, {num_available} available")
        self.num_wanted, self.num_available = num_wanted, num_available


class FinalError(KvferryError):
    pass


class DeadlineExceeded(FinalError):
    http_status, grpc_code, openai_type, code = 504, "DEADLINE_EXCEEDED", "timeout_error", "deadline_exceeded"


class EngineFailure(FinalError):
    code = "engine_failure"


class JoinRefused(FinalError):
    """`field` is the field of the worker's description that does not fit."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class Cancelled(FinalError):
    http_status, grpc_code, code = 499, "CANCELLED", "cancelled"
