"""One streamed request as a client sees it: instants of its events, its tokens, and how it ended.

A stream counts as a success only with a finish reason, the usage and `[DONE]`; everything else is a failure with a kind. The
first token is the first event with text or token ids: an empty role chunk is none, and the usage chunk ends nothing.
"""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(slots=True)
class StreamRecord:
    """Times are seconds of the client's clock. `failure` is empty for a success, else its kind."""

    began_s: float
    event_s: list[float] = field(default_factory=list[float])
    """Of each event with text or token ids."""
    num_tokens: int = 0
    """As the server's usage says."""
    failure: str = ""
    detail: str = ""
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    """The server's own, of the usage chunk."""

    @property
    def ttft_s(self) -> float | None:
        return self.event_s[0] - self.began_s if self.event_s else None

    @property
    def e2e_s(self) -> float | None:
        return self.event_s[-1] - self.began_s if self.event_s else None

    @property
    def tpot_s(self) -> float | None:
        if self.num_tokens < 2 or not self.event_s:
            return None
        return (self.event_s[-1] - self.event_s[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.event_s, self.event_s[1:], strict=False)]


async def stream_completion(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> StreamRecord:
    """Never raises for what a server does; `body` is a completion's without the streaming fields."""
    record = StreamRecord(time.perf_counter())
    sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=sent) as response:
            if response.status_code != 200:
                record.failure = f"http_{response.status_code}"
                record.detail = (await response.aread()).decode(errors="replace")[:300]
            else:
                await _read(response, record)
    except httpx.TransportError as error:
        record.failure, record.detail = "transport", f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError) as error:
        record.failure, record.detail = "malformed", f"{type(error).__name__}: {error}"
    return record


async def _read(response: httpx.Response, record: StreamRecord) -> None:
    is_finished = is_done = has_usage = False
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        now = time.perf_counter()
        if line == "data: [DONE]":
            is_done = True
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            record.failure, record.detail = "error_event", chunk["error"]["message"]
            return
        for choice in chunk["choices"]:
            is_finished = is_finished or choice.get("finish_reason") is not None
            if choice.get("text") or choice.get("token_ids"):
                record.event_s.append(now)
        if chunk.get("usage"):
            has_usage = True
            record.num_tokens = chunk["usage"]["completion_tokens"]
            record.numbers = (chunk.get("kvferry") or [{}])[0]
    if not is_done:
        record.failure = "cut"
    elif not (is_finished and has_usage):
        record.failure = "incomplete"
    elif not record.event_s:
        record.failure = "empty"
