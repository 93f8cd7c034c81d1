import asyncio
from types import SimpleNamespace

from kvferry.messages import Beat, RequestCancel
from kvferry.streams import StreamEnded
from router.decode_link import DecodeLink


class Wire:
    """A stream that takes one message at a time, and each only when `room` says so."""

    def __init__(self):
        self.sent, self.room, self.has_ended, self.is_closed = [], asyncio.Event(), False, False
        self.room.set()
        self._sending = asyncio.Lock()

    async def send(self, message):
        if self.has_ended:
            raise StreamEnded("ended", "UNAVAILABLE")
        async with self._sending:
            self.sent.append(message)
            while not self.room.is_set():
                await self.room.wait()

    async def receive(self):
        await asyncio.get_running_loop().create_future()

    def close(self):
        self.is_closed = True


class Listener:
    def __init__(self):
        self.ends = []

    def attached(self, member): ...

    def output(self, member, output): ...

    def detached(self, member, reason, may_have_died):
        self.ends.append(reason)


async def running(wire, then):
    member = SimpleNamespace(description=SimpleNamespace(address="a"), is_attached=True)
    listener = Listener()
    link = DecodeLink(SimpleNamespace(attach=lambda address: wire), member, listener, "life")
    task = asyncio.create_task(link.run())
    await settled()
    assert isinstance(wire.sent[0], Beat), "the worker must know first whose stream it is"
    try:
        await then(link, listener)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert wire.is_closed


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


def message(number):
    return RequestCancel(number, 1)


def numbers(wire):
    return [sent.number for sent in wire.sent if isinstance(sent, RequestCancel)]


async def test_a_message_is_on_its_way_in_the_very_turn_in_which_it_is_sent():
    wire = Wire()

    async def then(link, listener):
        link.send(message(1))
        assert numbers(wire) == [1]
        await settled()
        link.send(message(2))
        assert numbers(wire) == [1, 2]

    await running(wire, then)


async def test_messages_keep_their_order_while_the_stream_has_no_room():
    wire = Wire()

    async def then(link, listener):
        for number in range(1, 4):
            link.send(message(number))
        await settled()
        wire.room.clear()
        for number in range(4, 8):
            link.send(message(number))
            await settled()
        assert numbers(wire) == [1, 2, 3, 4]
        wire.room.set()
        await settled()
        link.send(message(8))
        await settled()
        assert numbers(wire) == list(range(1, 9))

    await running(wire, then)


async def test_a_stream_that_has_ended_is_told_as_an_end_not_raised_at_who_sends():
    wire = Wire()

    async def then(link, listener):
        wire.has_ended = True
        link.send(message(1))
        await settled()
        assert listener.ends == ["ended"]

    await running(wire, then)


async def test_a_link_may_end_with_a_message_half_sent():
    wire = Wire()

    async def then(link, listener):
        wire.room.clear()
        link.send(message(1))

    await running(wire, then)
    assert not wire._sending.locked()
