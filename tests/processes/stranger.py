"""Hostile peers of a deployment, for tests: pickles that tell if they go off, a peer that knows the secret, a source that sends pickles."""

import asyncio
import contextlib
import os
import pickle
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from kvferry.kv.block_id import chain, chain_root
from kvferry.kv.frame import PROBE_IDS, pack_header
from kvferry.kv.memory import BlockFormat
from kvferry.messages import FetchMeet, FetchOffers, FetchOpen, FetchProbe, Frame, RoadOffer
from kvferry.rpc.links import GrpcDialer, add_fetch_service, bind, new_server
from kvferry.streams import StreamEnded
from tests.processes.service import Service

BLOCK = 16
FORM = BlockFormat("float32", (30, 2, 3, BLOCK, 64), BLOCK, BLOCK * 46_080)
"""SmolLM2-135M's."""


class _Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path):
        self._marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self._marker}",)


@contextlib.contextmanager
def armed(folder: Path) -> Iterator[list[bytes]]:
    """Pickles in several protocols, each of which was seen to go off; none of them may inside."""
    marker = folder / "marker"
    made = [pickle.dumps(_Bomb(marker), protocol) for protocol in (0, 2, 4, 5)]
    for bomb in made:
        pickle.loads(bomb)
        assert marker.exists()
        marker.unlink()
    yield made
    assert not marker.exists(), "something was unpickled"


def secret_of(service: Service) -> str:
    return (service.deployment.folder / "secret").read_text().strip()


class Peer:
    """Speaks to workers and router as one of them. Use it as an async context."""

    def __init__(self, service: Service):
        self._dialer = GrpcDialer(secret_of(service), FORM.block_bytes)
        children = service.deployment.children
        self._addresses = {name: child.details["address"] for name, child in children.items() if name != "router"}
        self._addresses["router"] = children["router"].details["registry"]

    async def __aenter__(self) -> "Peer":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._dialer.close()

    @contextlib.asynccontextmanager
    async def stream(self, kind: str, name: str) -> AsyncIterator[Any]:
        """`kind` is fetch, attach or join."""
        stream = getattr(self._dialer, kind)(self._addresses[name])
        try:
            async with asyncio.timeout(20):
                yield stream
        finally:
            stream.close()


async def receive_a(stream: Any, *kinds: type) -> Any:
    """The next message of one of these kinds."""
    while not isinstance(message := await stream.receive(), kinds):
        pass
    return message


class Mallory:
    """A source that plays one trick a fetch: pickles in its offers, in the frame of a probe, and in each field of frames."""

    TRICKS = ("offers", "probe", "header", "digest", "payload", "short payload")

    def __init__(self, bomb: bytes):
        self._bomb, self.played = bomb, list[str]()

    @contextlib.asynccontextmanager
    async def listening(self, secret: str) -> AsyncIterator[str]:
        """Its address."""
        server = new_server(FORM.block_bytes)
        add_fetch_service(server, self, secret)
        address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
        await server.start()
        yield address
        await server.stop(0)

    def _next_trick(self) -> str:
        self.played.append(self.TRICKS[len(self.played)])
        return self.played[-1]

    async def serve_fetch(self, stream: Any) -> None:
        with contextlib.suppress(StreamEnded):
            message = await stream.receive()
            if isinstance(message, FetchMeet):
                await self._meet(stream)
            else:
                await self._send_frame(stream, message)

    async def _meet(self, stream: Any) -> None:
        trick = self._next_trick() if len(self.played) < 2 else ""
        roads = ("inproc", "shm", "ray") if trick == "offers" else ("inproc", "shm", "ray", "grpc")
        await stream.send(FetchOffers("mallory", tuple(RoadOffer(road, self._bomb) for road in roads)))
        await receive_a(stream, FetchProbe)
        header = self._bomb if trick == "probe" else pack_header(FORM, 0, PROBE_IDS[:1], PROBE_IDS[:1])
        await stream.send(Frame(0, header, self._filled(), self._bomb))
        while True:
            await stream.receive()

    async def _send_frame(self, stream: Any, opening: FetchOpen) -> None:
        trick = self._next_trick()
        ids = chain(chain_root(opening.model_id, opening.fidelity, opening.salt), opening.tokens, BLOCK)[:1]
        digests = [self._bomb[:16] if trick == "digest" else bytes(16)]
        header = self._bomb if trick == "header" else pack_header(FORM, 0, ids, digests)
        payload = self._bomb if trick == "short payload" else self._filled()
        await stream.send(Frame(0, header, payload, self._bomb))
        await stream.receive()

    def _filled(self) -> bytes:
        """A block of pickles."""
        return (self._bomb * FORM.block_bytes)[: FORM.block_bytes]
