"""The load client and the stub worker, against each other and against canned answers over real sockets."""

import asyncio
import contextlib

import pytest

from loadtest import stub_worker
from loadtest.raw_load import LoadOrder, load
from loadtest.raw_stream import EVENT, LOST, completion_request, open_connection

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 7}, "kvferry": [{"instants_ms": {"placed": 1.5, "first_token": 4.0}}]}\n\n'
ERROR = b'HTTP/1.1 429 Too Many Requests\r\ncontent-length: 14\r\n\r\n{"error": "no"'


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


TOKENS = [chunk(b'data: {"text": "%d"}\n\n' % k) for k in range(3)]
END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
WHOLE = HEAD + b"".join(TOKENS) + chunk(USAGE) + END


@contextlib.asynccontextmanager
async def server_of(pieces, pause_s=0.0, closes=False):
    """Answers each request with these pieces, each sent by itself."""

    async def serve(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                await reader.readuntil(b"}")
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(pause_s)
                if closes:
                    break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def answer_of(pieces, **how):
    async with server_of(pieces, **how) as url:
        connection = await open_connection(url)
        answer = await connection.ask(b"POST / HTTP/1.1\r\n\r\n{}")
        connection.close()
        return answer


async def test_events_are_counted_and_the_usage_counts_tokens():
    answer = await answer_of([WHOLE])
    assert (answer.status, answer.num_events, answer.num_tokens, answer.is_whole) == (200, 3, 7, True)
    assert answer.worker_s == pytest.approx(0.0025)


@pytest.mark.parametrize("size", [1, 2, 5, 7, 64])
async def test_pieces_of_any_size_are_read_alike(size):
    answer = await answer_of([WHOLE[at : at + size] for at in range(0, len(WHOLE), size)])
    assert (answer.status, answer.num_events, answer.num_tokens, answer.is_whole) == (200, 3, 7, True)


async def test_the_first_token_is_the_first_event_not_the_head():
    answer = await answer_of([HEAD, TOKENS[0], END], pause_s=0.05)
    assert 0.04 < answer.ttft_s < 0.5
    assert answer.ended_s - answer.first_s > 0.04


async def test_without_usage_the_events_are_the_tokens():
    answer = await answer_of([HEAD, *TOKENS, END])
    assert (answer.num_events, answer.num_tokens, answer.worker_s) == (3, 3, None)


async def test_a_refusal_is_read_to_its_end():
    answer = await answer_of([ERROR])
    assert (answer.status, answer.num_tokens, answer.is_whole) == (429, 0, False)
    assert answer.sent_s < answer.first_s <= answer.ended_s


async def test_a_connection_that_ends_early_is_lost():
    assert (await answer_of([HEAD, *TOKENS], closes=True)).status == LOST
    assert (await answer_of([], closes=True)).status == LOST


async def test_a_stream_that_ends_without_done_is_not_whole():
    answer = await answer_of([HEAD, *TOKENS, b"0\r\n\r\n"])
    assert (answer.status, answer.is_whole) == (200, False)


async def test_a_connection_carries_one_request_after_the_other():
    async with server_of([WHOLE]) as url:
        connection = await open_connection(url)
        answers = [await connection.ask(b"POST / HTTP/1.1\r\n\r\n{}") for _ in range(3)]
        connection.close()
    assert [answer.num_events for answer in answers] == [3, 3, 3]


@contextlib.asynccontextmanager
async def stub(step_s=0.001):
    listening = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(stub_worker.serve(0, step_s, listening.set_result))
    try:
        yield f"http://127.0.0.1:{await listening}"
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_closed_loop_asks_as_often_as_it_should(is_kept):
    async with stub() as url:
        answers = await load(LoadOrder(url, "stub", 4, 3, output_tokens=5, is_kept=is_kept))
    assert len(answers) == 12
    assert all((one.status, one.num_tokens, one.is_whole) == (200, 5, True) for one in answers)


async def test_an_open_loop_does_not_wait_for_answers():
    async with stub(step_s=0.1) as url:
        answers = await load(LoadOrder(url, "stub", rate_per_s=200, duration_s=0.3, output_tokens=3))
    assert 30 < len(answers) < 100
    assert all(one.is_whole for one in answers)
    assert max(one.sent_s for one in answers) - min(one.sent_s for one in answers) < 0.35


async def test_an_open_loop_counts_what_cannot_connect_as_lost():
    async with stub() as url:
        pass
    answers = await load(LoadOrder(url, "stub", rate_per_s=100, duration_s=0.1))
    assert {one.status for one in answers} == {LOST}


async def test_the_stub_gives_every_stream_one_event_a_step():
    async with stub(step_s=0.05) as url:
        answers = await load(LoadOrder(url, "stub", 3, 1, output_tokens=4))
    assert all(0.14 < one.ended_s - one.first_s < 0.4 for one in answers)
    assert stub_worker.EVENT.count(EVENT) == 1


def test_a_request_says_its_length_and_asks_for_the_usage():
    head, _, body = completion_request("m", "é", 3, seed=1).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert b'"include_usage": true' in body
    assert b'"seed": 1' in body
