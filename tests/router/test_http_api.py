"""The HTTP door, called as a server calls it, in virtual time: with clients that read as they like."""

import asyncio
import gc
import json
import weakref
from typing import Any

import pytest

from loadtest.virtual_time import run_virtual
from router.http_api import HttpApi
from router.metrics import RouterMetrics
from router.request_maker import Defaults, RequestMaker
from tests.hand_off import expected
from tests.in_process import Deployment, deployment


def app_of(d: Deployment) -> Any:
    maker = RequestMaker(d.dispatcher._text, d.dispatcher, Defaults("fake"))
    return HttpApi(d.dispatcher, maker, RouterMetrics(d.dispatcher)).app()


def text_of(max_tokens: int) -> str:
    return "".join(f"{token} " for token in expected(list(range(1, 40)), max_tokens))


class Client:
    """Takes what is sent while `reads` is set, and stays until it is told to leave."""

    def __init__(self, d: Deployment, body: dict[str, Any], **headers: str):
        self.reads, self.leaves = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.takes_one = False
        self.messages: list[dict[str, Any]] = []
        self._body = json.dumps({"prompt": list(range(1, 40)), "max_tokens": 4, "temperature": 0, **body}).encode()
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": pairs}
        self.call = asyncio.ensure_future(app_of(d)(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            body, self._body = self._body, b""
            return {"type": "http.request", "body": body}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        self.messages.append(message)
        if self.takes_one:
            self.reads.clear()

    def chunks(self) -> list[dict[str, Any]]:
        text = b"".join(message.get("body", b"") for message in self.messages).decode()
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("usage", [None, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("explains", ["0", "1"])
def test_a_stream_whose_client_asked_why_is_told_with_the_usage_or_without(usage, explains):
    async def main() -> None:
        async with deployment("p1", "d1") as d:
            client = Client(d, {"stream": True, "stream_options": usage}, x_kvferry_explain=explains)
            await client.call
            *_, last = client.chunks()
            has_usage = bool(usage and usage["include_usage"])
            assert ("kvferry" in last) == (has_usage or explains == "1")
            assert ("usage" in last) == has_usage
            if explains == "1":
                explanation = last["kvferry"][0]["explain"]
                assert explanation["decode"] == "d1"
                assert explanation["alternative"]["computes_here"] is True
                assert explanation["alternative"]["predicted_ms"]["computing"] > 0
            assert client.messages[-2]["body"].endswith(b"[DONE]\n\n")
            await d.quiet()

    run_virtual(main)


def test_a_finished_answer_is_kept_for_a_reader_that_takes_some_now_and_then_and_not_for_one_that_takes_nothing():
    async def main() -> None:
        async with deployment("d1") as d:
            limit_s = d.dispatcher.limits.reader_timeout_s
            stalled, slow = (Client(d, {"stream": True, "max_tokens": 200}) for _ in range(2))
            while not (stalled.messages and slow.messages):
                await asyncio.sleep(0.01)
            lives = d.dispatcher.lives
            for client in (stalled, slow):
                client.reads.clear()
            while d.dispatcher.lives:
                await asyncio.sleep(0.01)
            dropped = [weakref.ref(live) for live in lives]
            lives.clear()
            await asyncio.sleep(limit_s - 1)
            assert not stalled.call.done()
            slow.takes_one = True
            slow.reads.set()
            await asyncio.sleep(2)
            assert stalled.call.done()
            assert stalled.call.exception() is None
            assert d.dispatcher.counters["readers_given_up"] == 1
            await asyncio.sleep(limit_s - 3)
            assert not slow.call.done()
            slow.takes_one = False
            slow.reads.set()
            await slow.call
            assert "".join(chunk["choices"][0]["text"] for chunk in slow.chunks()) == text_of(200)
            assert len(stalled.messages) < len(slow.messages)
            gc.collect()
            assert [live() for live in dropped] == [None, None]
            await d.quiet()

    run_virtual(main)


def test_a_reader_may_take_nothing_for_as_long_as_its_answer_grows():
    async def main() -> None:
        async with deployment("d1", step=dict(base_s=1.0)) as d:
            client = Client(d, {"stream": True, "max_tokens": 100})
            while len(client.messages) < 3:
                await asyncio.sleep(0.1)
            client.reads.clear()
            await asyncio.sleep(d.dispatcher.limits.reader_timeout_s + 20)
            assert d.dispatcher.lives
            client.reads.set()
            await client.call
            assert "".join(chunk["choices"][0]["text"] for chunk in client.chunks()) == text_of(100)
            await d.quiet()

    run_virtual(main)
