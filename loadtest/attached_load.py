"""A client that is attached to a decode worker as a router is: what an answer takes without a router in between.

As a program it reads an `AttachedOrder` as JSON from its standard input and writes one time to the first token a line, in seconds.
`run_attached` is how others start it.
"""

import asyncio
import dataclasses
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import KvferryError
from kvferry.messages import Beat, ChoiceStart, DecodeMessage, RequestOpen, RouterMessage, Sampling, StepOutput
from kvferry.process import read_secret
from kvferry.rpc.links import GrpcDialer
from kvferry.streams import Stream
from loadtest.own_process import said_by

LARGEST_ID = 1000


@dataclass(frozen=True, slots=True)
class AttachedOrder:
    """One request after the other over one stream, each with a prompt of its own."""

    address: str
    secret_file: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int


async def run_attached(order: AttachedOrder) -> list[float]:
    """In a process of its own. Raises KvferryError with its reason if it fails."""
    said = await said_by("loadtest.attached_load", asked=json.dumps(dataclasses.asdict(order)).encode())
    return [float(line) for line in said.splitlines()]


async def ask_in_turn(order: AttachedOrder) -> list[float]:
    """Raises StreamEnded if the worker ends the stream."""
    rng = random.Random(0)
    dialer = GrpcDialer(read_secret(Path(order.secret_file)))
    stream: Stream[RouterMessage, DecodeMessage] = dialer.attach(order.address)
    try:
        times: list[float] = []
        for number in range(1, order.num_requests + 1):
            await stream.send(Beat(router_life="an attached client"))
            prompt = tuple(rng.randrange(LARGEST_ID) for _ in range(order.prompt_tokens))
            sampling = Sampling(seed=number, max_tokens=order.output_tokens, temperature=0.0)
            times.append(await _first_token_s(stream, RequestOpen(number, 1, prompt, (ChoiceStart(0),), sampling)))
        return times
    finally:
        stream.close()
        await dialer.close()


async def _first_token_s(stream: Stream[RouterMessage, DecodeMessage], opening: RequestOpen) -> float:
    """Returns at the answer's end."""
    sent_s, first_s = time.perf_counter(), 0.0
    await stream.send(opening)
    while True:
        output = await stream.receive()
        if not isinstance(output, StepOutput):
            continue
        if output.tokens and not first_s:
            first_s = time.perf_counter()
        if output.ends:
            break
    if not first_s:
        raise KvferryError(f"the worker ended the request without a token: {output.ends[0]}")
    return first_s - sent_s


def main() -> None:
    for seconds in asyncio.run(ask_in_turn(AttachedOrder(**json.loads(sys.stdin.read())))):
        print(seconds)


if __name__ == "__main__":
    main()
