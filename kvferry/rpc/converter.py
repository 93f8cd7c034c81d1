"""The one place where values (kvferry/messages.py) and protobuf messages meet.

Each `*_to_wire` takes a value and returns the message of its stream's direction; each `*_from_wire` the other way. A message
that is not whole raises `InvalidRequest` naming the field. Seconds are microseconds or milliseconds on the wire.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Any, TypeVar

from kvferry import messages as m
from kvferry.errors import InvalidRequest
from kvferry.kv.block_id import BLOCK_ID_BYTES
from kvferry.rpc.v1 import common_pb2, decode_pb2, fetch_pb2, registry_pb2

E = TypeVar("E", bound=Enum)


def _enum_to_wire(prefix: str, value: Enum) -> str:
    return f"{prefix}_{value.name}"


def _enum_from_wire(kind: type[E], prefix: str, descriptor: Any, number: int) -> E:
    name = descriptor.Name(number) if number in descriptor.values() else str(number)
    try:
        return kind[name.removeprefix(f"{prefix}_")]
    except KeyError:
        raise InvalidRequest(f"unknown {kind.__name__} {name}", kind.__name__) from None


def _one_of(message: Any) -> str:
    name = message.WhichOneof("message")
    if name is None:
        raise InvalidRequest(f"empty {type(message).__name__}", "message")
    return name


def _ms(seconds: float | None) -> int:
    return 0 if seconds is None else max(round(seconds * 1000), 1)


def _seconds(ms: int) -> float | None:
    return ms / 1000 if ms else None


def _sources_to_wire(sources: Iterable[m.Source]) -> list[common_pb2.Source]:
    return [common_pb2.Source(worker_id=source.worker_id, address=source.address) for source in sources]


def _sources_from_wire(sources: Iterable[common_pb2.Source]) -> tuple[m.Source, ...]:
    return tuple(m.Source(source.worker_id, source.address) for source in sources)


# ------------------------------------------------------------------------------------------------------------- fetch


def fetch_up_to_wire(value: m.FetchUp) -> fetch_pb2.FetchRequest:
    if isinstance(value, m.FetchAck):
        return fetch_pb2.FetchRequest(ack=fetch_pb2.FetchAck(frame_number=value.frame_number))
    if isinstance(value, m.FetchMeet):
        meet = fetch_pb2.FetchMeet(
            protocol_version=value.protocol_version, model_id=value.model_id, fidelity=value.fidelity
        )
        return fetch_pb2.FetchRequest(meet=meet)
    if isinstance(value, m.FetchProbe):
        probe = fetch_pb2.FetchProbe(road=value.road, ticket=value.ticket, num_blocks=value.num_blocks)
        return fetch_pb2.FetchRequest(probe=probe)
    opening = fetch_pb2.FetchOpen(
        protocol_version=value.protocol_version,
        model_id=value.model_id,
        fidelity=value.fidelity,
        salt=value.salt,
        tokens=value.tokens,
        first_block=value.first_block,
        hold_only=value.hold_only,
        priority=value.priority,
        time_left_ms=_ms(value.time_left_s),
        holders=_sources_to_wire(value.holders),
        road=value.road,
        ticket=value.ticket,
        incarnation=value.incarnation,
        warm=value.warm,
    )
    return fetch_pb2.FetchRequest(open=opening)


def fetch_up_from_wire(wire: fetch_pb2.FetchRequest) -> m.FetchUp:
    name = _one_of(wire)
    if name == "ack":
        return m.FetchAck(wire.ack.frame_number)
    if name == "meet":
        return m.FetchMeet(wire.meet.model_id, wire.meet.fidelity, wire.meet.protocol_version)
    if name == "probe":
        return m.FetchProbe(wire.probe.road, wire.probe.ticket, wire.probe.num_blocks)
    if name != "open":
        raise InvalidRequest(f"{name} within a fetch", "message")
    opening = wire.open
    return m.FetchOpen(
        model_id=opening.model_id,
        fidelity=opening.fidelity,
        tokens=tuple(opening.tokens),
        first_block=opening.first_block,
        salt=opening.salt,
        hold_only=opening.hold_only,
        priority=opening.priority,
        time_left_s=_seconds(opening.time_left_ms),
        holders=_sources_from_wire(opening.holders),
        road=opening.road,
        ticket=opening.ticket,
        incarnation=opening.incarnation,
        warm=opening.warm,
        protocol_version=opening.protocol_version,
    )


def fetch_down_to_wire(value: m.FetchDown) -> fetch_pb2.FetchResponse:
    """A frame with a payload goes through kvferry/rpc/frame_wire.py, which copies its blocks once."""
    if isinstance(value, m.Frame):
        payload = value.payload if isinstance(value.payload, tuple) else (value.payload,)
        frame = fetch_pb2.Frame(
            frame_number=value.frame_number, header=value.header, payload=b"".join(payload), place=value.place
        )
        return fetch_pb2.FetchResponse(frame=frame)
    if isinstance(value, m.FetchEnd):
        reason: Any = _enum_to_wire("FETCH_END_REASON", value.reason)
        end = fetch_pb2.FetchEnd(reason=reason, first_missing_block=value.first_missing_block, detail=value.detail)
        return fetch_pb2.FetchResponse(end=end)
    if isinstance(value, m.FetchOffers):
        offers = [fetch_pb2.RoadOffer(road=offer.road, detail=offer.detail) for offer in value.offers]
        return fetch_pb2.FetchResponse(offers=fetch_pb2.FetchOffers(incarnation=value.incarnation, offers=offers))
    state: Any = _enum_to_wire("FETCH_STATE", value.state)
    progress = fetch_pb2.FetchProgress(
        step=value.step, state=state, num_sealed_blocks=value.num_sealed_blocks, is_reading=value.is_reading
    )
    return fetch_pb2.FetchResponse(progress=progress)


def fetch_down_from_wire(wire: fetch_pb2.FetchResponse) -> m.FetchDown:
    name = _one_of(wire)
    if name == "frame":
        return m.Frame(wire.frame.frame_number, wire.frame.header, wire.frame.payload, wire.frame.place)
    if name == "end":
        reason = _enum_from_wire(m.FetchEndReason, "FETCH_END_REASON", fetch_pb2.FetchEndReason, wire.end.reason)
        return m.FetchEnd(reason, wire.end.first_missing_block, wire.end.detail)
    if name == "offers":
        offers = tuple(m.RoadOffer(offer.road, offer.detail) for offer in wire.offers.offers)
        return m.FetchOffers(wire.offers.incarnation, offers)
    if name != "progress":
        raise InvalidRequest(f"{name} within a fetch", "message")
    state = _enum_from_wire(m.FetchState, "FETCH_STATE", fetch_pb2.FetchState, wire.progress.state)
    return m.FetchProgress(wire.progress.step, state, wire.progress.num_sealed_blocks, wire.progress.is_reading)


# ------------------------------------------------------------------------------------------------------------ attach


def _sampling_to_wire(value: m.Sampling) -> common_pb2.Sampling:
    return common_pb2.Sampling(
        temperature=value.temperature,
        top_k=value.top_k,
        top_p=value.top_p,
        seed=value.seed,
        max_tokens=value.max_tokens,
        stop_token_ids=value.stop_token_ids,
        min_p=value.min_p,
        presence_penalty=value.presence_penalty,
        frequency_penalty=value.frequency_penalty,
        repetition_penalty=value.repetition_penalty,
        logit_bias=[common_pb2.LogitBias(token_id=token, bias=bias) for token, bias in value.logit_bias],
        min_tokens=value.min_tokens,
        num_logprobs=value.num_logprobs,
        num_prompt_logprobs=value.num_prompt_logprobs,
    )


def _sampling_from_wire(wire: common_pb2.Sampling) -> m.Sampling:
    return m.Sampling(
        seed=wire.seed,
        max_tokens=wire.max_tokens,
        temperature=wire.temperature,
        top_k=wire.top_k,
        top_p=wire.top_p,
        min_p=wire.min_p,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty,
        logit_bias=tuple((one.token_id, one.bias) for one in wire.logit_bias),
        min_tokens=wire.min_tokens,
        stop_token_ids=tuple(wire.stop_token_ids),
        num_logprobs=wire.num_logprobs if wire.HasField("num_logprobs") else None,
        num_prompt_logprobs=wire.num_prompt_logprobs if wire.HasField("num_prompt_logprobs") else None,
    )


def logprobs_to_wire(values: Iterable[m.TokenLogprobs]) -> list[common_pb2.PlaceLogprobs]:
    return [
        common_pb2.PlaceLogprobs(
            logprob=value.logprob,
            rank=value.rank,
            top=[common_pb2.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in value.top],
        )
        for value in values
    ]


def _logprobs_from_wire(wires: Iterable[common_pb2.PlaceLogprobs]) -> tuple[m.TokenLogprobs, ...]:
    return tuple(
        m.TokenLogprobs(wire.logprob, wire.rank, tuple((one.token_id, one.logprob) for one in wire.top))
        for wire in wires
    )


def router_message_to_wire(value: m.RouterMessage) -> decode_pb2.AttachRequest:
    if isinstance(value, m.Beat):
        return decode_pb2.AttachRequest(
            beat=decode_pb2.RouterBeat(protocol_version=value.protocol_version, router_life=value.router_life)
        )
    if isinstance(value, m.RequestCancel):
        cancel = decode_pb2.RequestCancel(request_number=value.number, attempt=value.attempt, choices=value.choices)
        return decode_pb2.AttachRequest(cancel=cancel)
    opening = decode_pb2.RequestOpen(
        request_number=value.number,
        attempt=value.attempt,
        prompt_tokens=value.prompt_tokens,
        choices=[decode_pb2.ChoiceStart(choice=c.choice, emitted_tokens=c.emitted_tokens) for c in value.choices],
        sampling=_sampling_to_wire(value.sampling),
        salt=value.salt,
        sources=_sources_to_wire(value.sources),
        holders=_sources_to_wire(value.holders),
        priority=value.priority,
        time_left_ms=_ms(value.time_left_s),
        local_tokens=value.local_tokens,
    )
    return decode_pb2.AttachRequest(open=opening)


def router_message_from_wire(wire: decode_pb2.AttachRequest) -> m.RouterMessage:
    name = _one_of(wire)
    if name == "beat":
        return m.Beat(protocol_version=wire.beat.protocol_version, router_life=wire.beat.router_life)
    if name == "cancel":
        return m.RequestCancel(wire.cancel.request_number, wire.cancel.attempt, tuple(wire.cancel.choices))
    opening = wire.open
    return m.RequestOpen(
        number=opening.request_number,
        attempt=opening.attempt,
        prompt_tokens=tuple(opening.prompt_tokens),
        choices=tuple(m.ChoiceStart(c.choice, tuple(c.emitted_tokens)) for c in opening.choices),
        sampling=_sampling_from_wire(opening.sampling),
        salt=opening.salt,
        sources=_sources_from_wire(opening.sources),
        holders=_sources_from_wire(opening.holders),
        priority=opening.priority,
        time_left_s=_seconds(opening.time_left_ms),
        local_tokens=opening.local_tokens,
    )


INSTANTS = ("fetch_opened", "first_block", "last_block", "tail_planned", "first_token")
COUNTS = (
    "num_local_tokens",
    "num_fetched_tokens",
    "num_source_cached_tokens",
    "num_computed_tokens",
    "num_fetched_blocks",
    "fetched_bytes",
)


def _start_to_wire(value: m.StartReport) -> decode_pb2.StartReport:
    wire = decode_pb2.StartReport(
        request_number=value.number,
        attempt=value.attempt,
        source_worker_id=value.source_worker_id,
        road=value.road,
    )
    for name in INSTANTS:
        seconds = getattr(value, f"{name}_s")
        if seconds is not None:
            setattr(wire, f"{name}_us", max(int(seconds * 1e6), 0))
    for name in COUNTS:
        setattr(wire, name, getattr(value, name))
    return wire


def _start_from_wire(wire: decode_pb2.StartReport) -> m.StartReport:
    instants: dict[str, Any] = {
        f"{name}_s": getattr(wire, f"{name}_us") / 1e6
        for name in INSTANTS
        if wire.HasField(f"{name}_us")  # type: ignore[arg-type]
    }
    counts: dict[str, Any] = {name: getattr(wire, name) for name in COUNTS}
    return m.StartReport(
        wire.request_number,
        wire.attempt,
        source_worker_id=wire.source_worker_id,
        road=wire.road,
        **instants,
        **counts,
    )


def _end_to_wire(value: m.ChoiceEnd) -> decode_pb2.ChoiceEnd:
    reason: Any = _enum_to_wire("CHOICE_END_REASON", value.reason)
    return decode_pb2.ChoiceEnd(
        request_number=value.number,
        attempt=value.attempt,
        choice=value.choice,
        reason=reason,
        detail=value.detail,
        failed_source_ids=value.failed_source_ids,
    )


def _end_from_wire(wire: decode_pb2.ChoiceEnd) -> m.ChoiceEnd:
    reason = _enum_from_wire(m.ChoiceEndReason, "CHOICE_END_REASON", decode_pb2.ChoiceEndReason, wire.reason)
    failed = tuple(wire.failed_source_ids)
    return m.ChoiceEnd(wire.request_number, wire.attempt, wire.choice, reason, wire.detail, failed)


def decode_message_to_wire(value: m.DecodeMessage) -> decode_pb2.AttachResponse:
    if isinstance(value, m.Beat):
        return decode_pb2.AttachResponse(beat=decode_pb2.WorkerBeat(step=value.step))
    tokens = [
        decode_pb2.NewTokens(
            request_number=t.number,
            attempt=t.attempt,
            choice=t.choice,
            index=t.index,
            token_ids=t.token_ids,
            logprobs=logprobs_to_wire(t.logprobs) if t.logprobs else None,
        )
        for t in value.tokens
    ]
    starts, ends = [_start_to_wire(start) for start in value.starts], [_end_to_wire(end) for end in value.ends]
    prompts = [
        decode_pb2.PromptLogprobs(
            request_number=p.number, attempt=p.attempt, position=p.position, logprobs=logprobs_to_wire(p.logprobs)
        )
        for p in value.prompt_logprobs
    ]
    step = decode_pb2.StepOutput(
        step=value.step,
        tokens=tokens,
        starts=starts,
        ends=ends,
        prompt_logprobs=prompts,
        begun=value.begun,
        paused=value.paused,
    )
    return decode_pb2.AttachResponse(step=step)


def decode_message_from_wire(wire: decode_pb2.AttachResponse) -> m.DecodeMessage:
    if _one_of(wire) == "beat":
        return m.Beat(wire.beat.step)
    return m.StepOutput(
        step=wire.step.step,
        tokens=tuple(
            m.NewTokens(
                t.request_number,
                t.attempt,
                t.choice,
                t.index,
                tuple(t.token_ids),
                _logprobs_from_wire(t.logprobs) if t.logprobs else (),
            )
            for t in wire.step.tokens
        ),
        prompt_logprobs=tuple(
            m.PromptLogprobs(p.request_number, p.attempt, p.position, _logprobs_from_wire(p.logprobs))
            for p in wire.step.prompt_logprobs
        ),
        starts=tuple(_start_from_wire(start) for start in wire.step.starts),
        ends=tuple(_end_from_wire(end) for end in wire.step.ends),
        begun=tuple(wire.step.begun),
        paused=tuple(wire.step.paused),
    )


# ---------------------------------------------------------------------------------------------------------- registry

DESCRIPTION = (
    "protocol_version",
    "worker_id",
    "incarnation",
    "address",
    "model_id",
    "fidelity",
    "numerics_id",
    "block_size",
    "block_bytes",
    "pool_tokens",
    "context_tokens",
    "vocabulary_size",
    "max_sequences",
    "pid",
    "num_threads",
    "ceiling_flops_per_s",
    "ceiling_bytes_per_s",
    "previous_end",
)
LOAD = (
    "step",
    "num_waiting",
    "num_fetching",
    "num_running",
    "num_serving",
    "flops_per_s",
    "bytes_per_s",
    "first_event",
    "is_snapshot",
    "kv_tokens",
    "waiting_tokens",
    "your_sequences",
    "your_kv_tokens",
    "is_draining",
)
RATES = ("step_s", "tokens_per_s", "link_bytes_per_s", "waiting_by_size")
SLOTS = ("num_free", "num_filling", "num_live", "num_cached")


def _ids_from_wire(joined: bytes, name: str) -> tuple[bytes, ...]:
    if len(joined) % BLOCK_ID_BYTES:
        raise InvalidRequest(f"{name} has {len(joined)} bytes, not a multiple of {BLOCK_ID_BYTES}", name)
    return tuple(joined[k : k + BLOCK_ID_BYTES] for k in range(0, len(joined), BLOCK_ID_BYTES))


def join_up_to_wire(value: m.JoinUp) -> registry_pb2.JoinRequest:
    if isinstance(value, m.WorkerDescription):
        role: Any = _enum_to_wire("WORKER_ROLE", value.role)
        fields: dict[str, Any] = {name: getattr(value, name) for name in DESCRIPTION}
        return registry_pb2.JoinRequest(worker=registry_pb2.WorkerDescription(role=role, **fields))
    load: dict[str, Any] = {name: getattr(value, name) for name in (*LOAD, *RATES)}
    progress = registry_pb2.WorkerProgress(
        slots=registry_pb2.SlotCounts(**{name: getattr(value.slots, name) for name in SLOTS}),
        counters=value.counters,
        sealed_block_ids=b"".join(value.sealed_block_ids),
        evicted_block_ids=b"".join(value.evicted_block_ids),
        **load,
    )
    return registry_pb2.JoinRequest(progress=progress)


def join_up_from_wire(wire: registry_pb2.JoinRequest) -> m.JoinUp:
    if _one_of(wire) == "worker":
        role = _enum_from_wire(m.Role, "WORKER_ROLE", common_pb2.WorkerRole, wire.worker.role)
        return m.WorkerDescription(role=role, **{name: getattr(wire.worker, name) for name in DESCRIPTION})
    progress = wire.progress
    return m.WorkerProgress(
        slots=m.SlotCounts(*(getattr(progress.slots, name) for name in SLOTS)),
        counters=dict(progress.counters),
        sealed_block_ids=_ids_from_wire(progress.sealed_block_ids, "sealed_block_ids"),
        evicted_block_ids=_ids_from_wire(progress.evicted_block_ids, "evicted_block_ids"),
        **{name: getattr(progress, name) for name in LOAD},
        waiting_by_size=dict(progress.waiting_by_size),
        step_s=dict(progress.step_s),
        tokens_per_s=dict(progress.tokens_per_s),
        link_bytes_per_s=dict(progress.link_bytes_per_s),
    )


def join_down_to_wire(value: m.JoinDown) -> registry_pb2.JoinResponse:
    if isinstance(value, m.Welcome):
        return registry_pb2.JoinResponse(
            welcome=registry_pb2.Welcome(router_id=value.router_id, router_life=value.router_life)
        )
    if isinstance(value, m.Refusal):
        refusal = registry_pb2.Refusal(field=value.field, detail=value.detail)
        return registry_pb2.JoinResponse(refusal=refusal)
    if isinstance(value, m.SnapshotWanted):
        return registry_pb2.JoinResponse(snapshot_wanted=registry_pb2.SnapshotWanted())
    return registry_pb2.JoinResponse(beat=registry_pb2.RegistryBeat())


def join_down_from_wire(wire: registry_pb2.JoinResponse) -> m.JoinDown:
    name = _one_of(wire)
    if name == "welcome":
        return m.Welcome(wire.welcome.router_id, wire.welcome.router_life)
    if name == "snapshot_wanted":
        return m.SnapshotWanted()
    if name == "refusal":
        return m.Refusal(wire.refusal.field, wire.refusal.detail)
    return m.Beat()
