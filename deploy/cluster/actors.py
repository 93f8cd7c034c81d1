"""Programs' actors, seen from the controller: which there are, how one is asked, and how it ends.

Knows nothing of what is wanted; seats do, and end their own through this.
"""

import asyncio
import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from deploy.cluster.kinship import has_program_name, is_of
from deploy.cluster.program import ProgramActor

STOP_TIMEOUT_S = 3.0
"""For a program to tell its clients that it ends."""
SILENCE_S = 15.0
"""A program's actor that runs reports every few seconds. Asked twice in vain, it hangs: once may be due to who asked."""
DEAD_WORDS = 300
"""From each end of what Ray says of an actor that is lost."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def why_dead(error: RayError) -> str:
    """In Ray's words. An actor that failed as it began is lost with a traceback: its last line says why, and its first one where."""
    text = COLOUR.sub("", str(error)).strip()
    if isinstance(error, RayActorError) and error.actor_init_failed:
        address = re.search(r"\bip=([^\s,)]+)", text)
        return f"{text.splitlines()[-1]}{f' (on node {address[1]})' if address else ''}"
    text = " ".join(text.split())
    return text if len(text) <= 2 * DEAD_WORDS else f"{text[:DEAD_WORDS]} ... {text[-DEAD_WORDS:]}"


async def result(reference: Any) -> Any:
    """Of a call to an actor."""
    return await asyncio.wrap_future(reference.future())


async def prompt_result(ask: Callable[[], Any]) -> Any:
    """Raises TimeoutError: it hangs."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SILENCE_S):
            return await result(ask())
    async with asyncio.timeout(SILENCE_S):
        return await result(ask())


async def program_names(namespace: str) -> list[str]:
    """Of actors there that may be programs."""
    named: Any = await asyncio.to_thread(ray.util.list_named_actors, True)
    return [one["name"] for one in named if one["namespace"] == namespace and has_program_name(one["name"])]


async def find_program(name: str, namespace: str) -> Any:
    """None if there is none: what is not kvferry's is left alone."""
    with contextlib.suppress(ValueError):
        actor: Any = await asyncio.to_thread(ray.get_actor, name, namespace)
        return actor if is_of(actor, ProgramActor) else None


async def drain_and_end(actor: Any) -> None:
    with contextlib.suppress(RayError, TimeoutError):
        if await prompt_result(actor.drain.remote):
            await _ended(actor)
    await end(actor)


async def stop_and_end(actor: Any) -> None:
    """At once, if need be without a word to its clients."""
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(STOP_TIMEOUT_S):
            if await result(actor.stop.remote()):
                await _ended(actor)
    await end(actor)


async def end(actor: Any) -> None:
    with contextlib.suppress(RayError):
        await asyncio.to_thread(ray.kill, actor)


async def _ended(actor: Any) -> None:
    """Returns when its program has ended."""
    version, code = 0, None
    while code is None:
        report = await prompt_result(functools.partial(actor.report.remote, version))
        version, code = report["version"], report["code"]
