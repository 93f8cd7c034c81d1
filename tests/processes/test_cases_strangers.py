"""What strangers send to every port, and clients in every field: nothing is unpickled (T080), and nobody outside chooses where blocks
come from (T081)."""

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc import aio

from kvferry.messages import (
    Beat,
    ChoiceStart,
    FetchEnd,
    FetchEndReason,
    FetchMeet,
    FetchOffers,
    FetchOpen,
    FetchProbe,
    Frame,
    Refusal,
    RequestOpen,
    Role,
    Sampling,
    StepOutput,
    WorkerDescription,
    WorkerProgress,
)
from kvferry.rpc.links import FETCH_METHOD, SECRET_KEY
from kvferry.rpc.v1 import decode_pb2, fetch_pb2, generation_pb2, generation_pb2_grpc, registry_pb2
from tests.processes.service import completion_body
from tests.processes.stranger import Peer, armed, receive_a, secret_of

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]
PROMPT = [random.Random(f"strangers {k}").randrange(100, 40_000) for k in range(60)]
NUM_TOKENS = 2
ROUTES = (
    FETCH_METHOD,
    "/kvferry.v1.DecodeService/Attach",
    "/kvferry.v1.RegistryService/Join",
    "/kvferry.v1.GenerationService/Generate",
)


@pytest.fixture
def bombs(tmp_path: Path) -> Iterator[list[bytes]]:
    with armed(tmp_path) as made:
        yield made


def listening(service) -> dict[str, list[int]]:
    """Ports by process; all of them are for this host alone."""
    found: dict[str, list[int]] = {}
    for name in service.deployment.children:
        sockets = [
            one.laddr for one in psutil.Process(service.pid(name)).net_connections("inet") if one.status == "LISTEN"
        ]
        assert all(address.ip.removeprefix("::ffff:") == "127.0.0.1" for address in sockets), sockets
        found[name] = [address.port for address in sockets]
        assert found[name], name
    return found


def is_closed_by_the_other_side(port: int, content: bytes) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    return True


def check_service(service, reference) -> None:
    reference.check(PROMPT, service.tokens(PROMPT, NUM_TOKENS, cache_salt="as before"), NUM_TOKENS)


def test_raw_pickles_at_every_port_close_their_connection_and_nothing_else(service, reference, bombs):
    ports = listening(service)
    assert len(ports["router"]) == 3
    for port in [port for found in ports.values() for port in found]:
        for bomb in bombs:
            for content in (bomb, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bomb, b"POST / HTTP/1.1\r\n\r\n" + bomb):
                assert is_closed_by_the_other_side(port, content)
    for bomb in bombs:
        for kind in ("application/json", "application/octet-stream", "application/x-python-pickle"):
            for path in ("/v1/completions", "/v1/chat/completions"):
                response = service.http.post(path, content=bomb, headers={"content-type": kind})
                assert response.status_code in (400, 415)
    check_service(service, reference)


async def say(channel: aio.Channel, method: str, secret: str, content: bytes) -> grpc.StatusCode:
    """How a call ends whose only message is these bytes."""
    call: Any = channel.stream_stream(method)(metadata=((SECRET_KEY, secret),))
    with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
        await call.write(content)
        await call.done_writing()
        while await call.read() is not aio.EOF:
            pass
    return await call.code()


async def test_pickles_as_grpc_messages_end_their_call_with_the_secret_and_without(service, reference, bombs):
    ports, secret = listening(service), secret_of(service)
    addresses = [f"127.0.0.1:{port}" for found in ports.values() for port in found]
    for address in addresses:
        if address == service.url.removeprefix("http://"):
            continue
        async with asyncio.timeout(20), aio.insecure_channel(address) as channel:
            for method in ROUTES:
                for bomb in bombs[::3]:
                    await say(channel, method, secret, bomb)
                    assert await say(channel, method, "guess", bomb) is not grpc.StatusCode.OK
    await asyncio.to_thread(check_service, service, reference)


async def test_pickles_in_every_field_of_bytes_are_bytes(service, reference, bombs):
    """Fields of the messages by which workers and routers speak; the source's own are tried in test_cases_hand_off.py."""
    with grpc.insecure_channel(service.grpc) as channel:
        model_id = (
            generation_pb2_grpc.GenerationServiceStub(channel).GetModel(generation_pb2.GetModelRequest()).model_id
        )
    wanted = service.tokens(PROMPT, NUM_TOKENS)
    worker = WorkerDescription("stranger", "x", Role.PREFILL, "a:1", model_id, "float32", "n", 16, 1, 9, 9, 9, 1)
    async with Peer(service) as peer:
        for bomb in bombs:
            async with peer.stream("fetch", "prefill-1") as stream:
                await stream.send(FetchMeet(model_id, "float32"))
                offers = await receive_a(stream, FetchOffers)
                await stream.send(FetchProbe("grpc", bomb, 1))
                assert await receive_a(stream, Frame)
            async with peer.stream("fetch", "prefill-1") as stream:
                opening = FetchOpen(model_id, "float32", tuple(PROMPT[:16]), salt=bomb, road="shm", ticket=bomb)
                await stream.send(replace(opening, incarnation=offers.incarnation))
                assert (await receive_a(stream, Frame)).place
            async with peer.stream("fetch", "decode-1") as stream:
                await stream.send(FetchMeet(bomb.decode("latin-1"), "float32"))
                assert (await receive_a(stream, FetchEnd)).reason is FetchEndReason.REFUSED
            async with peer.stream("attach", "decode-1") as stream:
                await stream.send(Beat())
                sampling = Sampling(1, NUM_TOKENS, 0.0)
                await stream.send(RequestOpen(1, 1, tuple(PROMPT), (ChoiceStart(0),), sampling, salt=bomb))
                tokens: list[int] = []
                while len(tokens) < NUM_TOKENS:
                    output = await receive_a(stream, StepOutput)
                    tokens += [token for new in output.tokens for token in new.token_ids]
                assert tokens == wanted
            whole = bomb + bytes(-len(bomb) % 16)
            sealed = tuple(whole[k : k + 16] for k in range(0, len(whole), 16))
            for first in (worker, WorkerProgress(sealed_block_ids=sealed, evicted_block_ids=sealed)):
                async with peer.stream("join", "router") as stream:
                    await stream.send(first)
                    assert await receive_a(stream, Refusal)
        text = bombs[0].decode("latin-1")
    await asyncio.to_thread(service.tokens, PROMPT, NUM_TOKENS, cache_salt=text)
    await asyncio.to_thread(check_service, service, reference)


def test_every_field_of_bytes_has_been_tried():
    files = (fetch_pb2, decode_pb2, registry_pb2, generation_pb2)
    messages = [message for file in files for message in file.DESCRIPTOR.message_types_by_name.values()]
    found = {field.full_name.split("v1.")[1] for m in messages for field in m.fields if field.type == field.TYPE_BYTES}
    assert found == {
        *("FetchProbe.ticket", "FetchOpen.salt", "FetchOpen.ticket", "RequestOpen.salt"),
        *("RoadOffer.detail", "Frame.header", "Frame.payload", "Frame.place"),
        *("WorkerProgress.sealed_block_ids", "WorkerProgress.evicted_block_ids"),
    }


# -------------------------------------------------------------------------------------------- what clients must not choose


class Ear:
    """Listens, and counts who connects."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.num_heard = 0
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.num_heard += 1
                connection.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture
def ear() -> Iterator[Ear]:
    """Hears nobody but the fixture itself, which tries it first."""
    one = Ear()
    socket.create_connection(("127.0.0.1", one.port)).close()
    yield one
    try:
        socket.create_connection(("127.0.0.1", one.port)).close()
        time.sleep(0.1)
        assert one.num_heard == 2, "somebody connected to where a client pointed"
    finally:
        one.close()


def pointing_at(port: int) -> dict[str, Any]:
    """What other services take such words by, and our own workers among themselves."""
    address, source = f"127.0.0.1:{port}", {"worker_id": "mine", "address": f"127.0.0.1:{port}"}
    return {
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "mine",
            "remote_host": "127.0.0.1",
            "remote_port": port,
            "remote_block_ids": [0, 1, 2**31],
            "remote_request_id": "1",
            "tp_size": 2**31,
        },
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "remote_block_ids": [2**31, -1],
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": port,
        "bootstrap_room": 2**31,
        "disaggregated_params": {"request_type": "generation_only", "ctx_request_id": 1, "opaque_state": "gASV"},
        "sources": [source],
        "holders": [source],
        "source_ids": ["mine"],
        "decode_id": "prefill-1",
        "decode_worker": address,
        "prefill_url": f"http://{address}",
        "advertise": address,
        "router": [address],
        "road": "grpc",
        "ticket": "dGlja2V0",
        "incarnation": "1",
        "first_block": 2**31,
        "hold_only": True,
        "block_ids": ["00" * 16],
        "num_blocks": 2**31,
        "salt": "00",
        "attempt": 2**31,
        "number": 1,
    }


def headers_at(port: int) -> dict[str, str]:
    address = f"127.0.0.1:{port}"
    names = ("x-prefiller-host-port", "x-kv-source", "x-remote-host", "kv-transfer-params", "x-data-parallel-host")
    return {**{name: address for name in names}, "x-forwarded-host": address, SECRET_KEY: "guess", "forwarded": address}


@pytest.mark.parametrize("stream", [False, True])
def test_fields_and_headers_that_name_addresses_blocks_or_handles_choose_nothing(service, reference, ear, stream):
    named, headers = pointing_at(ear.port), headers_at(ear.port)
    wanted = service.tokens(PROMPT, NUM_TOKENS)
    for number, fields in enumerate([named, *({name: value} for name, value in named.items())]):
        body = {**completion_body(PROMPT, NUM_TOKENS, cache_salt=f"{stream} {number % 3}"), **fields, "stream": stream}
        response = service.http.post("/v1/completions", json=body, headers=headers)
        if response.status_code == 400:
            assert response.json()["error"]["param"] in fields
        elif stream:
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            answer = response.json()
            assert answer["choices"][0]["token_ids"] == wanted
            assert answer["kvferry"][0]["source_worker"] in ("prefill-1", None)
    body = {"messages": [{"role": "user", "content": "hi", **named}], "max_tokens": 1, **named}
    assert service.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    reference.check(PROMPT, wanted, NUM_TOKENS)


def test_metadata_and_fields_that_the_public_service_has_not_choose_nothing(service, ear):
    address = f"127.0.0.1:{ear.port}".encode()
    wanted = service.tokens(PROMPT, NUM_TOKENS)
    opening = decode_pb2.RequestOpen(sources=[dict(worker_id="mine", address=address)], salt=b"x").SerializeToString()
    plain = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=PROMPT), max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True
    )
    with grpc.insecure_channel(service.grpc) as channel:
        generate = channel.unary_stream(
            "/kvferry.v1.GenerationService/Generate",
            request_serializer=bytes,
            response_deserializer=generation_pb2.GenerateResponse.FromString,
        )
        for number in (26, 100, 2**28):
            unknown = field_of(number, address) + field_of(number + 1, opening)
            plain.cache_salt = f"unknown {number}"
            metadata = [(name, value) for name, value in headers_at(ear.port).items() if name != "forwarded"]
            responses = list(generate(plain.SerializeToString() + unknown, metadata=metadata))
            assert [token for response in responses for token in response.token_ids] == wanted
            assert responses[-1].summary.source_worker_id == "prefill-1"


def field_of(number: int, content: bytes) -> bytes:
    """As protobuf writes a field of bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


@pytest.mark.parametrize("method", ROUTES[:3])
def test_the_doors_of_workers_are_shut_to_clients(service, method):
    """At the public port they are not there; at their own they want the secret, whatever a client guesses."""
    ports = listening(service)
    worker = "decode-1" if "Decode" in method else "prefill-1"
    registry = service.deployment.children["router"].details["registry"]
    own = registry if "Registry" in method else f"127.0.0.1:{ports[worker][0]}"
    for address, code in ((service.grpc, "UNIMPLEMENTED"), (own, "UNAUTHENTICATED")):
        with grpc.insecure_channel(address) as channel:
            for metadata in ((), ((SECRET_KEY, ""),), ((SECRET_KEY, "guess"),), (("authorization", "Bearer x"),)):
                call = channel.stream_stream(method, request_serializer=bytes, response_deserializer=bytes)
                with pytest.raises(grpc.RpcError) as error:
                    list(call(iter([b""]), metadata=metadata, timeout=5))
                assert error.value.code().name == code
