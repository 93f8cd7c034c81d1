"""Pools too small for what is asked at once, on both sides, and workers that read from each other: nobody waits for ever (T007, T010)."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvferry.messages import Beat, ChoiceStart, RequestOpen, Sampling, Source, StepOutput
from tests.processes.crowd import body_of, crowd
from tests.processes.service import Service, wait_until
from tests.processes.simulated import counted, expected, expected_of, ids, simulated
from tests.processes.stranger import Peer

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]
SLOTS, BLOCK = 40, 16
WORKERS = ("prefill-1", "prefill-2", "decode-1", "decode-2")


@pytest.fixture(scope="module")
def cramped(model_directory) -> Iterator[Service]:
    with simulated(model_directory, num_prefill=2, num_decode=2, kv_tokens=SLOTS * BLOCK) as service:
        yield service


@pytest.fixture(autouse=True)
def _nothing_is_held_nor_lost(cramped):
    yield
    cramped.wait_idle(3)
    assert cramped.total("kvferry_request_events_total", event="worker_losses") == 0


def test_prompts_that_each_need_the_room_of_the_other_at_their_source_all_end(cramped):
    """Any two of a source's outgrow its pool."""
    bodies = [body_of(ids(330 + k, ("room", k)), 40) for k in range(8)]
    with crowd(cramped.url) as clients:
        for body, answer in zip(bodies, [one.result(60) for one in clients.ask_all(bodies)], strict=True):
            assert (answer.status, answer.error, answer.is_whole) == (200, None, True), answer
            assert answer.tokens == {0: expected_of(body)}, answer.numbers


def sources_of(service: Service, *names: str) -> tuple[Source, ...]:
    return tuple(Source(name, service.deployment.children[name].details["address"]) for name in names)


async def tokens_of(peer: Peer, name: str, openings: list[RequestOpen]) -> dict[int, list[int]]:
    """What one decode worker answers to all of them, by number."""
    found: dict[int, list[int]] = {opening.number: [] for opening in openings}
    num_ended = 0
    async with peer.stream("attach", name) as router, asyncio.TaskGroup() as group:

        async def beat() -> None:
            while True:
                await router.send(Beat())
                await asyncio.sleep(0.5)

        beats = group.create_task(beat())
        for opening in openings:
            await router.send(opening)
        while num_ended < len(openings):
            message: Any = await router.receive()
            if isinstance(message, StepOutput):
                for new in message.tokens:
                    found[new.number] += new.token_ids
                assert all(end.reason.value == "length" for end in message.ends), message.ends
                num_ended += len(message.ends)
        beats.cancel()
    return found


def test_answers_that_each_need_the_room_of_the_other_where_they_decode_all_end(cramped):
    """A router that does not look sends both to one worker, which preempts the younger one."""
    prompts, before = [ids(200, ("grow", k)) for k in range(2)], counted(cramped, "preemptions")

    async def main() -> dict[int, list[int]]:
        sources, sampling = sources_of(cramped, "prefill-1"), Sampling(0, 160, 0.0)
        openings = [
            RequestOpen(k, 1, tuple(prompt), (ChoiceStart(0),), sampling, b"grow", sources)
            for k, prompt in enumerate(prompts)
        ]
        async with Peer(cramped) as peer:
            return await tokens_of(peer, "decode-1", openings)

    answers = asyncio.run(main())
    assert answers == {k: expected(prompt, 160) for k, prompt in enumerate(prompts)}
    wait_until(lambda: counted(cramped, "preemptions") > before, 2, "a preemption to be told")


def test_workers_that_read_from_each_other_in_rings_wait_for_nobody(cramped):
    """Each decode worker fetches from the other and from both sources, each of which reads what it lacks from all others."""
    prompts = [ids(300 + 16 * (k % 3), ("ring", k % 6)) for k in range(12)]
    openings = [
        RequestOpen(k, 1, tuple(prompt), (ChoiceStart(0),), Sampling(0, 8, 0.0), b"ring")
        for k, prompt in enumerate(prompts)
    ]

    def placed(opening: RequestOpen, reader: str) -> RequestOpen:
        others = [name for name in WORKERS if name != reader]
        first = opening.number % len(others)
        sources = sources_of(cramped, *others[first:], *others[:first])
        return replace(opening, sources=sources, holders=sources_of(cramped, *WORKERS[::-1]))

    async def main() -> list[dict[int, list[int]]]:
        async with Peer(cramped) as peer:
            halves = [[placed(one, name) for one in openings[k::2]] for k, name in enumerate(WORKERS[2:])]
            return await asyncio.gather(
                *[tokens_of(peer, name, half) for name, half in zip(WORKERS[2:], halves, strict=True)]
            )

    began = time.monotonic()
    for _ in range(3):  # anew, with what the last turn left where
        for answers in asyncio.run(main()):
            for number, tokens in answers.items():
                assert tokens == expected(prompts[number], 8), number
    assert time.monotonic() - began < 15
