"""`kvferry run`: asks one question, streams the answer, and shows the numbers of its life."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from kvferry.errors import KvferryError, NoWorker
from kvferry.shape import human_bytes

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where `kvferry up` serves if it is not told otherwise."""


def answers_at(url: str) -> bool:
    """Whether a kvferry that is ready serves there."""
    try:
        response = httpx.get(f"{url}/health/ready", timeout=1.0, trust_env=False)
        return response.status_code == 200 and "workers" in response.json()
    except (httpx.HTTPError, ValueError):
        return False


async def ask(url: str, question: str, max_tokens: int | None, temperature: float, console: Console) -> dict[str, Any]:
    """Prints the answer as it comes and a table of numbers; returns the last chunk (usage and kvferry's numbers)."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": temperature,
    }
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    last: dict[str, Any] = {}
    async for chunk in stream_events(f"{url}/v1/chat/completions", body):
        for choice in chunk["choices"]:
            console.out(choice["delta"].get("content", ""), end="", highlight=False)
        if chunk.get("usage"):
            last = chunk
    console.out("")
    if not last:
        raise KvferryError("the stream ended without its numbers: it was cut")
    console.print(_table(last))
    return last


async def stream_events(url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a streamed answer. Raises KvferryError with the server's message, NoWorker if nobody answers."""
    async with httpx.AsyncClient(timeout=httpx.Timeout(10.0, read=None), trust_env=False) as client:
        try:
            async with client.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    raise KvferryError(f"HTTP {response.status_code}: {_message(await response.aread())}")
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise KvferryError(chunk["error"]["message"])
                    yield chunk
        except httpx.TransportError as error:
            raise NoWorker(
                f"nothing answers at {url}: {error or type(error).__name__}; is `kvferry up` running?"
            ) from error


def _message(body: bytes) -> str:
    """Out of OpenAI's error body, or whatever was answered instead."""
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:300] or "no message"


def _table(last: dict[str, Any]) -> Table:
    numbers, usage = last["kvferry"][0], last["usage"]
    at: dict[str, float] = numbers["instants_ms"]
    num_tokens = usage["completion_tokens"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("TTFT", f"{at['first_token']:.0f} ms")
    if num_tokens > 1:
        tpot_ms = (at["last_token"] - at["first_token"]) / (num_tokens - 1)
        table.add_row("TPOT", f"{tpot_ms:.1f} ms")
        table.add_row("tokens/s", f"{1e3 / tpot_ms:.1f}")
    table.add_row(
        "tokens",
        f"{usage['prompt_tokens']} in ({usage['prompt_tokens_details']['cached_tokens']} cached), {num_tokens} out",
    )
    table.add_row("workers", f"{numbers['source_worker'] or 'no source'} -> {numbers['decode_worker']}")
    table.add_row("blocks fetched", f"{numbers['fetched_blocks']}")
    table.add_row("bytes moved", f"{numbers['fetched_bytes']:,} ({human_bytes(numbers['fetched_bytes'])})")
    return table
