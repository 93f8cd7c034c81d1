"""The HTTP front door: OpenAI's routes, health, metrics. Nothing slow happens on its event loop.

Every error, whatever its cause, has OpenAI's body. A client that leaves, at any moment, ends its requests. A streamed answer
begins with its first token, so that what fails before has a status of its own; what fails later is an event with an error,
after which the stream ends without `[DONE]`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.errors import (
    BodyTooLarge,
    Cancelled,
    InvalidRequest,
    KvferryError,
    LaterError,
    MethodNotAllowed,
    NotFound,
    UnsupportedMedia,
)
from kvferry.racing import until_first
from router.dispatcher import Dispatcher
from router.live import Live, NumberedDelta, deltas_of, wait_all
from router.metrics import RouterMetrics
from router.openai_answer import DONE, AnswerShape, ChoiceShape, error_body, event, server_timing
from router.openai_request import Body, ChatBody, CompletionBody, parse_body
from router.reader_patience import ReaderPatience
from router.request import GenerationRequest
from router.request_maker import RequestMaker, Wishes, salt_of, tenant_of

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 1024 * 1024


class HttpApi:
    def __init__(self, dispatcher: Dispatcher, maker: RequestMaker, metrics: RouterMetrics):
        self._dispatcher, self._maker, self._metrics = dispatcher, maker, metrics

    def app(self) -> ASGIApp:
        answers: dict[str, Answer] = {"/v1/chat/completions": self.chat, "/v1/completions": self.completions}
        routes = [
            *(Route(path, answer, methods=["POST"]) for path, answer in answers.items()),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/health/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]
        handlers: dict[Any, Any] = {
            KvferryError: _kvferry_error,
            HTTPException: _http_error,
            Exception: _unexpected_error,
        }
        return _Front(answers, Starlette(routes=routes, exception_handlers=handlers))

    # ---------------------------------------------------------------------------------------------------- generation

    async def chat(self, request: Request) -> Response:
        headers = _headers(request)
        body = parse_body(ChatBody, await _read_body(request, headers))
        self._maker.check_model(body.model)
        tokens = await self._maker.encode_chat([message.rendered() for message in body.messages])
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        wishes, key = Wishes.of_headers(headers), _api_key(headers)
        salt, tenant = salt_of(body.cache_salt, key), tenant_of(key)
        made = self._maker.make(tokens, body, limit, "messages", salt, name, wishes, tenant)
        return await self._answer(request, body, [made], wishes)

    async def completions(self, request: Request) -> Response:
        headers = _headers(request)
        body = parse_body(CompletionBody, await _read_body(request, headers))
        self._maker.check_model(body.model)
        limit = 16 if body.max_tokens is None else body.max_tokens
        wishes, key = Wishes.of_headers(headers), _api_key(headers)
        salt, tenant = salt_of(body.cache_salt, key), tenant_of(key)
        made = list[GenerationRequest]()
        for prompt in body.prompts:
            tokens = prompt if isinstance(prompt, list) else await self._maker.encode_text(prompt, "prompt")
            one = self._maker.make(
                tokens, body, limit, "prompt", salt, wishes=wishes, tenant=tenant, continues_prompt=True
            )
            made.append(replace(one, echo=self._echo(prompt)) if body.echo else one)
        if body.num_prompt_logprobs is not None:
            self._maker.check_scores(sum(len(one.prompt_tokens) for one in made), body, "prompt")
        return await self._answer(request, body, made, wishes)

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._maker.text.decode_with_special(prompt)

    async def _answer(self, request: Request, body: Body, made: list[GenerationRequest], wishes: Wishes) -> Response:
        lives = self._dispatcher.submit_all(made, wishes.key)  # they are on their way: all else can wait until here
        shape = AnswerShape.new(self._maker.defaults.model_name, self._maker.text, body)
        if body.stream:
            return StreamedAnswer(lives, shape, body.includes_usage, self._dispatcher)
        try:
            await until_first(_left(request.receive), wait_all(lives))
        finally:
            for live in lives:
                self._dispatcher.leave(live)
        headers = {"Server-Timing": server_timing(lives[0].summary()), "X-Request-Id": shape.id}
        if body.num_logprobs is None and body.num_prompt_logprobs is None:
            return JSONResponse(shape.whole(lives), headers=headers)
        return await asyncio.to_thread(lambda: JSONResponse(shape.whole(lives), headers=headers))  # it may be long

    # -------------------------------------------------------------------------------------------------------- the rest

    async def models(self, request: Request) -> Response:
        del request
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._maker.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        sizes, name = self._maker.text.sizes, self._maker.defaults.model_name
        limit = self._dispatcher.max_kv_tokens or sizes.context_tokens
        return {"id": name, "object": "model", "created": 0, "owned_by": "kvferry", "max_model_len": limit}

    async def health(self, request: Request) -> Response:
        del request
        return JSONResponse({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        del request
        is_ready, is_degraded = self._dispatcher.is_ready, self._dispatcher.is_degraded
        status = "degraded" if is_degraded else "ready" if is_ready else "not ready"
        workers = [
            {
                "name": member.worker_id,
                "role": member.role.value,
                "pool_tokens": member.description.pool_tokens,
                "block_size": member.description.block_size,
                "model_id": member.description.model_id,
                "fidelity": member.description.fidelity,
                "block_bytes": member.description.block_bytes,
                "pid": member.description.pid,
                "step": member.progress.step,
                "state": member.state,
            }
            for member in self._dispatcher.members
        ]
        return JSONResponse({"status": status, "workers": workers}, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        del request
        return PlainTextResponse(self._metrics.render(), media_type=self._metrics.CONTENT_TYPE)


Answer = Callable[[Request], Awaitable[Response]]


class _Front:
    """Straight to the routes that generate; the framework has the others, and refuses other methods.

    Its layers would be passed by every request before it is looked at, and by every piece of an answer.
    """

    def __init__(self, answers: Mapping[str, Answer], others: ASGIApp):
        self._answers, self._others = answers, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        answer = self._answers.get(scope["path"]) if is_post else None
        if answer is None:
            await self._others(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await answer(request)
            await response(scope, receive, send)
        except KvferryError as error:
            await _error_response(error)(scope, receive, send)
        except Exception as error:
            response = await _unexpected_error(request, error)
            await response(scope, receive, send)  # if an answer has begun, the server closes the connection instead


class StreamedAnswer(Response):
    """Server-sent events of one answer. Whatever ends it ends its requests."""

    def __init__(self, lives: Sequence[Live], shape: AnswerShape, includes_usage: bool, dispatcher: Dispatcher):
        self._lives, self._shape, self._includes_usage = lives, shape, includes_usage
        self._dispatcher = dispatcher
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with ReaderPatience(self._lives, self._dispatcher.limits.reader_timeout_s) as patience:
                await until_first(_left(receive), self._send(_watched(send, patience), scope, receive))
        except Cancelled:
            pass  # the client has left: nobody to tell
        except TimeoutError:
            self._dispatcher.given_up(
                self._lives[0]
            )  # what was not sent is dropped, and the server closes the connection
        finally:
            for live in self._lives:
                self._dispatcher.leave(live)

    async def _send(self, send: Send, scope: Scope, receive: Receive) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-request-id", self._shape.id.encode()),
        ]
        events = self._events()
        try:
            first = await anext(events)
        except KvferryError as error:
            await _error_response(error)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for one in events:
                await send({"type": "http.response.body", "body": one, "more_body": True})
        except KvferryError as error:
            await send({"type": "http.response.body", "body": event(error_body(error)), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        owners = [live for live in self._lives for _ in live.journal.choices]
        choices = [ChoiceShape(self._shape, index, live) for index, live in enumerate(owners)]
        for choice in choices:
            choice.prepare(self._includes_usage)
        async for numbered in deltas_of(self._lives):
            worth = [one for one in numbered if choices[one.index].is_worth_sending(one.delta)]

            def render(worth: list[NumberedDelta] = worth) -> bytes:
                return b"".join([choices[one.index].chunk(one.delta, self._includes_usage) for one in worth])

            if any(choices[one.index].begins_with_scores for one in worth):
                yield await asyncio.to_thread(render)
            elif worth:
                yield render()
        if self._includes_usage:
            yield self._shape.usage_chunk(self._lives) + DONE
        else:
            timing = server_timing(self._lives[0].summary())
            if any(live.request.explains for live in self._lives):
                yield self._shape.numbers_chunk(self._lives)
            yield f": server-timing {timing}\n\n".encode() + DONE


def _watched(send: Send, patience: ReaderPatience) -> Send:
    async def watched(message: Message) -> None:
        await send(message)
        patience.took_some()

    return watched


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise Cancelled("the client has left")


def _headers(request: Request) -> dict[str, str]:
    """By their names in lower case, as ASGI has them; of those that occur twice, the first."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(request.scope["headers"])}


async def _read_body(request: Request, headers: Mapping[str, str]) -> bytes:
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMedia(f"content type {kind[:100]!r} is not supported: send application/json")
    chunks, size, is_whole = list[bytes](), 0, False
    while not is_whole:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left while it sent the body")
        chunk, is_whole = message.get("body", b""), not message.get("more_body", False)
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _api_key(headers: Mapping[str, str]) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else None


def _error_response(error: KvferryError) -> JSONResponse:
    headers = {"Retry-After": error.retry_after} if isinstance(error, LaterError) else None
    return JSONResponse(error_body(error), error.http_status, headers)


async def _kvferry_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, KvferryError)
    return _error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    known: dict[int, Callable[[], KvferryError]] = {
        404: lambda: NotFound(
            f"there is no {path}; see /v1/models, /v1/chat/completions, /v1/completions", code="unknown_url"
        ),
        405: lambda: MethodNotAllowed(f"{method} is not allowed on {path}"),
    }
    made = known.get(error.status_code, lambda: InvalidRequest(str(error.detail)))()
    response = _error_response(made)
    response.headers.update(error.headers or {})
    return response


async def _unexpected_error(request: Request, error: Exception) -> Response:
    logger.error("unexpected error on %s", request.url.path, exc_info=error)
    return _error_response(KvferryError("an unexpected error occurred; the server's log has it"))
