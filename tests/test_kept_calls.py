"""Calls of fetches that are used again: the next fetch has one to itself, hears nothing of the last, and one that has ended is no harm."""

import asyncio

import pytest

from kvferry import messages as m
from kvferry.rpc import kept_calls, links
from kvferry.streams import StreamEnded
from tests.test_links import listening


class Source:
    """Answers acknowledgement k with progress k. Knows its calls, by grpc's task for each, and how many streams have not ended."""

    def __init__(self):
        self.calls = list[asyncio.Task]()
        self.num_serving = 0

    async def serve_fetch(self, stream):
        call = asyncio.current_task()
        assert call is not None
        if call not in self.calls:
            self.calls.append(call)
        self.num_serving += 1
        try:
            while True:
                ack = await stream.receive()
                await self.answer(stream, ack.frame_number)
        finally:
            self.num_serving -= 1

    async def answer(self, stream, number):
        await stream.send(m.FetchProgress(number, m.FetchState.SENDING, 0))

    @property
    def num_open_calls(self):
        return sum(not call.done() for call in self.calls)


async def ask(dialer, address, number=1):
    stream = dialer.fetch(address)
    await stream.send(m.FetchAck(number))
    assert (await stream.receive()).step == number
    return stream


async def until(holds):
    async with asyncio.timeout(3):
        while not holds():
            await asyncio.sleep(0.01)


async def rested(dialer):
    """All calls that are to be kept are at rest."""
    await until(lambda: len(dialer._kept._keeping) == sum(map(len, dialer._kept._calls.values())))


async def test_fetches_one_after_the_other_have_one_call():
    source = Source()
    async with listening(serve_fetch=source.serve_fetch) as (_, dialer, address):
        for number in range(5):
            (await ask(dialer, address, number)).close()
            await rested(dialer)
        assert len(source.calls) == 1
        assert source.num_serving == 0


async def test_fetches_at_the_same_time_have_a_call_each_and_few_are_kept():
    source = Source()
    async with listening(serve_fetch=source.serve_fetch) as (_, dialer, address):
        for _ in range(3):
            streams = [await ask(dialer, address, number) for number in range(kept_calls.MAX_CALLS + 3)]
            assert source.num_serving == len(streams)
            for stream in streams:
                stream.close()
            await until(lambda: source.num_open_calls == kept_calls.MAX_CALLS)
            await rested(dialer)
        assert len(source.calls) == kept_calls.MAX_CALLS + 9


async def test_what_its_source_still_sent_is_not_read_by_the_next_fetch():
    class Talkative(Source):
        async def answer(self, stream, number):
            for k in range(4):
                await stream.send(m.FetchProgress(number + k, m.FetchState.SENDING, 0))

    source = Talkative()
    async with listening(serve_fetch=source.serve_fetch) as (_, dialer, address):
        for number in range(0, 100, 10):
            (await ask(dialer, address, number)).close()
            await rested(dialer)
        assert len(source.calls) == 1


async def test_a_stream_that_is_closed_says_so_and_does_nothing_to_the_next_on_its_call():
    source = Source()
    async with listening(serve_fetch=source.serve_fetch) as (_, dialer, address):
        old = await ask(dialer, address)
        old.close()
        await rested(dialer)
        new = await ask(dialer, address, 2)
        old.close()
        for operation in (old.send(m.FetchAck(1)), old.receive()):
            with pytest.raises(StreamEnded):
                await operation
        await new.send(m.FetchAck(3))
        assert (await new.receive()).step == 3
        assert len(source.calls) == 1


@pytest.mark.parametrize("is_cut_first", [True, False])
async def test_a_read_that_is_under_way_or_cut_short_ends_the_call(is_cut_first):
    source = Source()
    async with listening(serve_fetch=source.serve_fetch) as (_, dialer, address):
        stream = await ask(dialer, address)
        reading = asyncio.ensure_future(stream.receive())
        await asyncio.sleep(0.05)
        if is_cut_first:
            reading.cancel()
            await asyncio.wait((reading,))
        stream.close()
        assert not dialer._kept._keeping
        await asyncio.wait((reading,), timeout=3)
        assert reading.cancelled() is is_cut_first
        assert is_cut_first or isinstance(reading.exception(), StreamEnded)
        await until(lambda: source.num_open_calls == 0)
        await ask(dialer, address)
        assert len(source.calls) == 2


async def test_a_write_that_is_cut_short_does_not_end_the_call():
    source = Source()
    async with listening(serve_fetch=source.serve_fetch) as (_, dialer, address):
        stream = await ask(dialer, address)
        writing = asyncio.ensure_future(stream.send(m.FetchAck(2)))
        await asyncio.sleep(0)
        writing.cancel()
        stream.close()
        await rested(dialer)
        await ask(dialer, address, 3)
        assert len(source.calls) == 1


@pytest.mark.parametrize("num_bytes", [0, kept_calls.MAX_DROPPED_BYTES + 1])
async def test_a_source_that_does_not_come_to_an_end_keeps_no_call(num_bytes, monkeypatch):
    monkeypatch.setattr(kept_calls, "ANSWER_S", 0.2 if num_bytes == 0 else 20)

    class Endless(Source):
        async def answer(self, stream, number):
            await super().answer(stream, number)
            if number == 1 and num_bytes:
                await stream.send(m.Frame(0, b"", bytes(num_bytes)))
            elif number == 1:
                await asyncio.sleep(20)

    source = Endless()
    async with listening(serve_fetch=source.serve_fetch) as (_, dialer, address):
        (await ask(dialer, address)).close()
        await until(lambda: not dialer._kept._keeping)
        await until(lambda: source.num_open_calls == 0)
        (await ask(dialer, address, 2)).close()
        assert len(source.calls) == 2


async def test_a_call_ends_when_nobody_has_wanted_it_for_a_while(monkeypatch):
    monkeypatch.setattr(kept_calls, "REST_S", 0.1)
    source = Source()
    async with listening(serve_fetch=source.serve_fetch) as (_, dialer, address):
        (await ask(dialer, address)).close()
        await rested(dialer)
        await until(lambda: source.num_open_calls == 0)
        assert not dialer._kept._calls
        assert not dialer._kept._keeping


async def test_a_call_that_ended_while_it_rested_is_not_taken():
    source = Source()
    async with listening(serve_fetch=source.serve_fetch) as (_, dialer, address):
        (await ask(dialer, address)).close()
        await rested(dialer)
        ((call,),) = dialer._kept._calls.values()
        call.cancel()
        await ask(dialer, address, 2)
        assert len(source.calls) == 2


async def test_a_dialer_that_closes_leaves_nothing_behind():
    source = Source()
    async with listening(serve_fetch=source.serve_fetch) as (_, dialer, address):
        streams = [await ask(dialer, address) for _ in range(3)]
        for stream in streams[:2]:
            stream.close()
        await rested(dialer)
        streams[2].close()
        await dialer.close()
        assert not dialer._kept._keeping
        await until(lambda: source.num_open_calls == 0)


async def test_an_address_with_a_call_at_rest_outlives_its_channel(monkeypatch):
    """A channel that others pushed out of the kept ones, or that lost its connection, takes its calls with it."""
    monkeypatch.setattr(links, "MAX_CHANNELS", 1)
    source = Source()
    async with listening(serve_fetch=source.serve_fetch) as (_, dialer, address):
        (await ask(dialer, address)).close()
        await rested(dialer)
        dialer.channel("127.0.0.1:1")
        await ask(dialer, address, 2)
        assert len(source.calls) == 2


async def test_a_call_that_comes_to_rest_after_its_channel_was_given_up_is_not_taken():
    source = Source()
    async with listening(serve_fetch=source.serve_fetch) as (_, dialer, address):
        stream, give_up = await ask(dialer, address), dialer._forget(address)
        stream.close()
        give_up()
        await rested(dialer)
        new = await ask(dialer, address, 2)
        give_up()  # of the old channel, once more: not the new one's business
        new.close()
        await rested(dialer)
        await ask(dialer, address, 3)
        assert len(source.calls) == 2
