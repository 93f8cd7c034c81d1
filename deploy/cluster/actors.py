"""Programs' actors, seen from the controller: which there are, how one is asked, and how it ends.

Knows nothing of what is wanted; seats do, and end their own through this.
"""

import asyncio
import contextlib
from typing import Any

import ray
from ray.exceptions import RayError

from deploy.cluster.kinship import has_program_name, is_of
from deploy.cluster.program import ProgramActor

STOP_TIMEOUT_S = 3.0
"""For a program to tell its clients that it ends."""


async def result(reference: Any) -> Any:
    """Of a call to an actor."""
    return await asyncio.wrap_future(reference.future())


async def program_names(namespace: str) -> list[str]:
    """Of actors there that may be programs."""
    named: Any = await asyncio.to_thread(ray.util.list_named_actors, True)
    return [one["name"] for one in named if one["namespace"] == namespace and has_program_name(one["name"])]


async def find_program(name: str, namespace: str) -> Any:
    """None if there is none: what is not kvferry's is left alone."""
    with contextlib.suppress(RayError, ValueError):
        actor: Any = await asyncio.to_thread(ray.get_actor, name, namespace)
        return actor if is_of(actor, ProgramActor) else None


async def drain_and_end(actor: Any) -> None:
    with contextlib.suppress(RayError):
        if await result(actor.drain.remote()):
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
        report = await result(actor.report.remote(version))
        version, code = report["version"], report["code"]
