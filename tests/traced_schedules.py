"""What all parties of a router's schedule tell each other, a line for each message: the same in any process, on any machine.

`python -m tests.traced_schedules 1 7` traces schedules where nothing but virtual time is as usual: memory is in disorder, the clocks
jump, steps of the event loop and garbage collections come when they like, and PYTHONHASHSEED is the caller's. It prints a digest a line.
"""

import asyncio
import gc
import random
import sys
import time
from dataclasses import fields
from hashlib import blake2b
from typing import Any

from tests.cluster import Cluster
from tests.router_schedules import carry_out, draw

DRAWN_AT_RANDOM = {"offers", "ticket", "router_life", "pid"}
"""By the product itself, for what nobody else may guess; and a frame's payload may say where it lies in memory."""
CLOCKS = ("monotonic", "perf_counter", "process_time", "time")


def _written(message: Any) -> str:
    told = {one.name: getattr(message, one.name) for one in fields(message) if one.name not in DRAWN_AT_RANDOM}
    if "payload" in told:
        told["payload"] = len(told["payload"])
    return f"{type(message).__name__} {told}"


def trace_of(seed: int) -> list[str]:
    lines: list[str] = []

    def observe(address: str, message: Any) -> None:
        lines.append(f"{asyncio.get_running_loop().time()!r} {address}: {_written(message)}")

    def prepare(made: Cluster) -> None:
        made.network.observe = observe

    happened = carry_out(draw(seed), prepare)
    return [*lines, f"{happened}"]


def digests_of(trace: list[str]) -> list[str]:
    return [blake2b(line.encode(), digest_size=8).hexdigest() for line in trace]


def be_a_strange_machine(rng: random.Random) -> list[bytearray]:
    """Returns what must be kept for memory to stay as it is."""
    ahead_s = 0.0

    def jumping(clock: Any, per_s: int) -> Any:
        def read() -> Any:
            nonlocal ahead_s
            ahead_s += 5 * rng.random()
            return clock() + type(clock())(ahead_s * per_s)

        return read

    for name in CLOCKS:
        setattr(time, name, jumping(getattr(time, name), 1))
        setattr(time, f"{name}_ns", jumping(getattr(time, f"{name}_ns"), 10**9))
    run, pause = asyncio.Handle._run, time.sleep

    def run_some_time(handle: asyncio.Handle) -> None:
        if rng.random() < 0.001:
            pause(0.003 * rng.random())
        run(handle)

    asyncio.Handle._run = run_some_time
    gc.set_threshold(rng.randrange(100, 1000), 2, 20)
    return [bytearray(rng.randrange(10, 3000)) for _ in range(20_000)][::3]


if __name__ == "__main__":
    kept = be_a_strange_machine(random.Random())
    for digests in map(digests_of, map(trace_of, map(int, sys.argv[1:]))):
        print(*digests)
