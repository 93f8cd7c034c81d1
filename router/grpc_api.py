"""The gRPC front door: the public service, health and reflection. Errors are gRPC codes with a message that says what to do."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import Field, ValidationError

from kvferry.errors import InvalidRequest, KvferryError, LaterError
from kvferry.messages import PROTOCOL_VERSION
from kvferry.rpc.converter import logprobs_to_wire
from kvferry.rpc.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from router.dispatcher import Dispatcher
from router.idempotency import checked_key
from router.journal import Delta, FinishReason
from router.live import Live, deltas_of
from router.openai_request import MAX_LOGPROBS, Body, Message
from router.reader_patience import ReaderPatience
from router.request import GenerationRequest, Summary
from router.request_maker import RequestMaker, Wishes, salt_of, tenant_of

SERVICE = "kvferry.v1.GenerationService"
HEALTH_INTERVAL_S = 0.5
SCORES_PER_MESSAGE = 1024
"""Places of a prompt with their log-probabilities: a client takes messages of up to 4 MiB by default."""
LEAST_TIMEOUT_S = 0.001
OPTIONAL = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "seed",
    "n",
)
FINISH = {
    None: generation_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


class GrpcBody(Body):
    """The fields that have another form than over HTTP."""

    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    """0 with `num_prompt_logprobs` only."""
    wanted_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return self.wanted_logprobs


class GrpcApi(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, dispatcher: Dispatcher, maker: RequestMaker):
        self._dispatcher, self._maker = dispatcher, maker
        self._health: Any = getattr(health, "aio").HealthServicer()  # noqa: B009 (not declared)

    def add_to(self, server: aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

    async def watch_health(self) -> None:
        """Serving while requests can be answered; until cancelled."""
        while True:
            serving = health_pb2.HealthCheckResponse.SERVING
            status = serving if self._dispatcher.is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
            for name in ("", SERVICE):
                await self._health.set(name, status)
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> Any:
        live: Live | None = None
        try:
            wishes = _wishes(request, context)
            made = self._in_time(await self._made(request, _api_key(context), wishes), context, wishes.key)
            (live,) = self._dispatcher.submit_all([made], wishes.key)
            async with ReaderPatience((live,), self._dispatcher.limits.reader_timeout_s) as patience:
                async for message in _messages(live):
                    await context.write(message)
                    patience.took_some()
        except TimeoutError:
            assert live is not None
            self._dispatcher.given_up(live)
            context.set_code(grpc.StatusCode.DEADLINE_EXCEEDED)  # sent behind what is on its way: not awaited
            context.set_details(
                f"nothing was read for {self._dispatcher.limits.reader_timeout_s:g} s: the rest is dropped"
            )
        except KvferryError as error:
            await _abort(context, error)
        finally:
            if live is not None:
                self._dispatcher.leave(live)

    async def Tokenize(self, request: generation_pb2.TokenizeRequest, context: Any) -> Any:
        try:
            return generation_pb2.TokenizeResponse(token_ids=(await self._tokens(request))[0])
        except KvferryError as error:
            await _abort(context, error)

    async def GetModel(self, request: generation_pb2.GetModelRequest, context: Any) -> Any:
        del request, context
        description = self._dispatcher.members.any_description
        members = [
            generation_pb2.Member(
                worker_id=member.worker_id,
                role=getattr(common_pb2, f"WORKER_ROLE_{member.role.name}"),
                pool_tokens=member.description.pool_tokens,
            )
            for member in self._dispatcher.members
        ]
        return generation_pb2.GetModelResponse(
            model=self._maker.defaults.model_name,
            model_id=description.model_id if description else "",
            context_tokens=self._dispatcher.max_kv_tokens or self._maker.text.sizes.context_tokens,
            vocabulary_size=self._maker.text.sizes.vocabulary_size,
            members=members,
            protocol_version=PROTOCOL_VERSION,
        )

    async def _made(
        self, request: generation_pb2.GenerateRequest, api_key: str | None, wishes: Wishes
    ) -> GenerationRequest:
        self._maker.check_model(request.model)
        fields: dict[str, Any] = {name: getattr(request, name) for name in OPTIONAL if request.HasField(name)}  # type: ignore[arg-type]
        try:
            body = GrpcBody(
                wanted_logprobs=request.num_logprobs if request.HasField("num_logprobs") else None,
                prompt_logprobs=request.num_prompt_logprobs if request.HasField("num_prompt_logprobs") else None,
                logit_bias={str(token): bias for token, bias in request.logit_bias.items()},
                stop=list(request.stop),
                stop_token_ids=list(request.stop_token_ids),
                ignore_eos=request.ignore_eos,
                include_stop_str_in_output=request.include_stop_str_in_output,
                cache_salt=request.cache_salt,
                priority=request.priority,
                timeout_s=request.timeout_ms / 1000 if request.timeout_ms else None,
                **fields,
            )
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            name = str(fault["loc"][0])
            name = {"wanted_logprobs": "num_logprobs", "prompt_logprobs": "num_prompt_logprobs"}.get(name, name)
            raise InvalidRequest(f"{name}: {fault['msg']}", name) from error
        if body.max_tokens == 0 and body.prompt_logprobs is None:
            raise InvalidRequest("max_tokens is 0: only with num_prompt_logprobs is there an answer", "max_tokens")
        tokens, param = await self._tokens(request)
        salt, tenant = salt_of(body.cache_salt, api_key), tenant_of(api_key)
        continues = param != "chat"
        return self._maker.make(
            tokens, body, body.max_tokens, param, salt, wishes=wishes, tenant=tenant, continues_prompt=continues
        )

    def _in_time(self, made: GenerationRequest, context: Any, key: str | None) -> GenerationRequest:
        """The call's own deadline is the request's, if it is shorter. Not under a key: others may join, with more time."""
        left_s = context.time_remaining()
        if left_s is None or key is not None or left_s >= (made.timeout_s or self._dispatcher.limits.request_timeout_s):
            return made
        return replace(made, timeout_s=max(left_s, LEAST_TIMEOUT_S))

    async def _tokens(self, request: Any) -> tuple[list[int], str]:
        """The prompt's tokens, and the field that they came from."""
        kind = request.WhichOneof("input")
        if kind == "token_ids":
            return list(request.token_ids.ids), kind
        if kind == "text":
            if not request.text:
                raise InvalidRequest("text is empty", "text")
            return await self._maker.encode_text(request.text, "text"), kind
        if kind == "chat":
            if not request.chat.messages:
                raise InvalidRequest("chat has no messages", "chat")
            try:
                messages = [Message(role=m.role, content=m.content).rendered() for m in request.chat.messages]
            except ValidationError as error:
                raise InvalidRequest(f"chat: role: {error.errors(include_url=False)[0]['msg']}", "chat") from error
            return await self._maker.encode_chat(messages), kind
        raise InvalidRequest("give one of text, chat and token_ids", "input")


async def _abort(context: Any, error: KvferryError) -> None:
    """`retry-after` is in the trailing metadata, as in HTTP's headers."""
    later = (("retry-after", error.retry_after),) if isinstance(error, LaterError) else ()
    await context.abort(grpc.StatusCode[error.grpc_code], error.message, later)


def _api_key(context: Any) -> str | None:
    """As over HTTP: `authorization: Bearer KEY`."""
    value = str(dict(context.invocation_metadata() or ()).get("authorization", ""))
    scheme, _, key = value.partition(" ")
    return key if scheme.lower() == "bearer" else None


def _wishes(request: generation_pb2.GenerateRequest, context: Any) -> Wishes:
    """As over HTTP, with `idempotency-key` in the metadata."""
    key = dict(context.invocation_metadata() or ()).get("idempotency-key")
    return Wishes(
        checked_key(None if key is None else str(key)),
        request.slo_ttft_ms / 1000 if request.slo_ttft_ms else None,
        request.slo_tpot_ms / 1000 if request.slo_tpot_ms else None,
        request.explain,
    )


async def _messages(live: Live) -> AsyncIterator[generation_pb2.GenerateResponse]:
    """The whole answer, as it comes."""
    async for numbered in deltas_of((live,)):
        for one in numbered:
            yield _piece(one.delta)
    for begin in range(0, len(live.journal.prompt_logprobs), SCORES_PER_MESSAGE):
        part = logprobs_to_wire(live.journal.prompt_logprobs[begin : begin + SCORES_PER_MESSAGE])
        yield generation_pb2.GenerateResponse(prompt_logprobs=part)
    yield generation_pb2.GenerateResponse(summary=_summary(live.summary()))


def _piece(delta: Delta) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        choice=delta.choice,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=FINISH[delta.finish],
        logprobs=logprobs_to_wire(delta.logprobs),
    )


def _summary(summary: Summary) -> generation_pb2.Summary:
    return generation_pb2.Summary(
        num_prompt_tokens=summary.num_prompt_tokens,
        num_completion_tokens=summary.num_completion_tokens,
        num_cached_tokens=summary.num_cached_tokens,
        num_fetched_blocks=summary.num_fetched_blocks,
        fetched_bytes=summary.fetched_bytes,
        num_attempts=summary.num_attempts,
        decode_worker_id=summary.decode_worker_id,
        source_worker_id=summary.source_worker_id,
        road=summary.road,
        instants_us={name: max(int(seconds * 1e6), 0) for name, seconds in summary.instants_s.items()},
        seed=summary.seed,
        explanation="" if summary.explanation is None else json.dumps(summary.explanation),
        numerics_changed=summary.has_changed_numerics,
    )
