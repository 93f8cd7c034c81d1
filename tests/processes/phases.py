"""A fetch in each of its phases at once, between two processes, and what must be so again after a fault.

One prefill worker behind a proxy, whose pool holds two of three prompts, and two decode workers; all simulated. The model's shape is made
so that a prompt is computed in about 0.4 s and then needs 0.8 s of the link: the first prompt is being sent while the second one is
computed and the third waits for the room of both. All three are fetched by one and the same decode worker.
"""

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes.crowd import Answer, Crowd, body_of, crowd
from tests.processes.proxy import Proxy
from tests.processes.service import Service, wait_until
from tests.processes.simulated import Footprint, choices_of, counted, ids, simulated

SOURCE, READERS = "prefill-1", ("decode-1", "decode-2")
SILENCE_S = 2.0
BLOCK = 16
SENT_BLOCKS, COMPUTED_BLOCKS, QUEUED_BLOCKS = 100, 100, 110
SOURCE_SLOTS = 210
"""Beside what is computed there is no room for what waits."""
NUM_BYSTANDERS, BYSTANDER_TOKENS = 8, 100
SHAPE = {
    "num_hidden_layers": 32,
    "hidden_size": 128,
    "intermediate_size": 65_536,
    "num_attention_heads": 2688,
    "num_key_value_heads": 672,
    "head_dim": 128,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
}
"""11 MB of KV a token, and most of the work in attention: an A100 computes some 4,000 tokens a second, and sends some 2,300."""
number = itertools.count()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def num_objects() -> int:
    """In the object store of this machine's Ray, by what its node says."""
    import ray
    from ray._private.internal_api import get_memory_info_reply

    node: Any = ray._private.worker.global_worker.node  # type: ignore[attr-defined]
    reply: Any = get_memory_info_reply(None, node.node_ip_address, node.node_manager_port)
    return reply.store_stats.num_local_objects


def made_shape(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


class Rig:
    """Use `rig()`."""

    def __init__(self, road: str, service: Service, clients: Crowd, proxy: Proxy):
        self.road, self.service, self.clients, self.proxy = road, service, clients, proxy
        for _ in range(4):  # either reader meets the source
            self._check([self.ask(ids(100, ("meet", next(number))), 2) for _ in range(2)])
        self.service.wait_idle()
        self.footprint = Footprint(service)
        self.shared_memory = self._shared_memory
        self.num_objects = self._num_objects

    def ask(self, prompt: list[int], max_tokens: int, **fields: Any) -> "Asked":
        body = body_of(prompt, max_tokens, **fields)
        return Asked(body, self.clients.ask(body))

    def _check(self, asked: list["Asked"]) -> list[Answer]:
        return [one.checked() for one in asked]

    # ---------------------------------------------------------------------------------------------------- the phases

    def staged(self) -> "Staged":
        """A fetch that is sent, one that is computed and one that waits, of one reader, all at this moment."""
        for _ in range(4):
            staged = self._stage()
            if self._is_in_all_phases():
                return staged
            staged.check()
            self.service.wait_idle()
        raise AssertionError("no fetches were seen in all three phases at once")

    def _stage(self) -> "Staged":
        """The streams of one request keep one decode worker busier than the other, which so gets all three prompts."""
        others = self.ask(ids(12, ("others", next(number))), BYSTANDER_TOKENS, n=NUM_BYSTANDERS)
        wait_until(lambda: any(self._running(name) == NUM_BYSTANDERS for name in READERS), 20, "streams to run")
        reader = min(READERS, key=self._running)
        sent = self.ask_blocks(SENT_BLOCKS)
        wait_until(lambda: self._is_being_sent() or sent.is_over, 20, "the first prompt to be sent")
        fetches = [sent, self.ask_blocks(COMPUTED_BLOCKS)]
        wait_until(lambda: self.num_fetching(reader) == 2 or sent.is_over, 5, "the second one to be asked for")
        fetches.append(self.ask_blocks(QUEUED_BLOCKS))
        wait_until(lambda: self.num_fetching(reader) == 3 or sent.is_over, 5, "the third one to be asked for")
        bystanders = [self.ask(ids(12, ("by", next(number))), BYSTANDER_TOKENS) for _ in range(NUM_BYSTANDERS)]
        wait_until(lambda: self._is_in_all_phases() or sent.is_over, 5, "all phases")
        return Staged(self, reader, fetches, [others, *bystanders])

    def ask_blocks(self, num_blocks: int) -> "Asked":
        return self.ask(ids(num_blocks * BLOCK + 5, ("long", next(number))), 3)

    @property
    def num_lost_sources(self) -> float:
        """Fetches that were given up; a block that is evicted before its turn comes is only asked for again."""
        kinds = ("silent", "queued", "computing", "sending", "stream_ended", "unreachable", "road")
        return sum(counted(self.service, f"fetch_failed_{kind}") for kind in kinds)

    @property
    def num_served_blocks(self) -> float:
        """By this life of the source."""
        return counted(self.service, "served_blocks", worker=SOURCE)

    def _running(self, name: str) -> float:
        return self.service.total("kvferry_worker_sequences", worker=name, state="running")

    def num_fetching(self, name: str) -> float:
        return self.service.total("kvferry_worker_sequences", worker=name, state="fetching")

    def _is_being_sent(self) -> bool:
        return self._phases() == {"serving": 1}

    def _is_in_all_phases(self) -> bool:
        is_so = self._phases() == {"serving": 3, "running": 1, "waiting": 1}
        return is_so and self.service.total("kvferry_requests", phase="decoding") == 1 + NUM_BYSTANDERS

    def _phases(self) -> dict[str, int]:
        """Of one scrape. Streams that are served beyond the chains that wait or are computed have blocks to send."""
        found: dict[str, int] = {}
        for key, value in self.service.metrics().items():
            if key.startswith("kvferry_worker_sequences{") and f'worker="{SOURCE}"' in key and value:
                found[key.partition('state="')[2].partition('"')[0]] = int(value)
        return found

    # ------------------------------------------------------------------------------------------------------- afterwards

    def check_baseline(self) -> None:
        """Within three seconds of the last answer, once all are members again: pools, descriptors, threads, shared memory, objects."""
        self.proxy.bytes_per_s = self.proxy.up_bytes_per_s = None
        self.service.wait_ready()
        self.service.wait_idle(3)
        began = time.monotonic()
        self.footprint.wait_back(3, *self._spare)
        left_s = 3 - (time.monotonic() - began)
        wait_until(lambda: self._num_objects <= self.num_objects, max(left_s, 0.1), "the object store to be as it was")
        assert self._shared_memory == self.shared_memory

    @property
    def _spare(self) -> tuple[int, int]:
        """Threads and descriptors: Ray's own come and go; else readers have met each other."""
        return (8, 8) if self.road == "ray" else (1, 1)

    @property
    def _shared_memory(self) -> list[str]:
        return sorted(os.listdir("/dev/shm"))

    @property
    def _num_objects(self) -> int:
        return num_objects() if self.road == "ray" else 0


@dataclass(frozen=True)
class Asked:
    body: dict[str, Any]
    answer: Future[Answer]

    @property
    def is_over(self) -> bool:
        return self.answer.done()

    def checked(self) -> Answer:
        """Whole, and every choice token-exact."""
        answer = self.answer.result(60)
        assert (answer.status, answer.error, answer.is_whole) == (200, None, True), answer
        assert answer.tokens == choices_of(self.body), answer.numbers
        return answer


@dataclass(frozen=True)
class Staged:
    rig: Rig
    reader: str
    """The decode worker of all fetches."""
    fetches: list[Asked]
    """Sent, computed, queued."""
    bystanders: list[Asked]

    def check(self) -> list[Answer]:
        """Those of the fetches."""
        answers = [one.checked() for one in self.fetches]
        for one in self.bystanders:
            one.checked()
        return answers


@contextlib.contextmanager
def rig(road: str, model: Path, folder: Path) -> Iterator[Rig]:
    with Proxy().running() as proxy:
        proxy.target = free_port()
        silence = f"--silence-s={SILENCE_S:g}"
        extra = {
            "router": [silence, "--policy=least-loaded"],
            "decode": [silence, "--max-local-tokens=4096"],
            "prefill": [
                silence,
                f"--port={proxy.target}",
                f"--advertise=127.0.0.1:{proxy.port}",
                f"--kv-tokens={SOURCE_SLOTS * BLOCK}",
                "--max-step-tokens=512",
            ],
        }
        shape = {"sim_shape": str(made_shape(folder)), "sim_accelerator": "a100", "kv_tokens": 16_000}
        plan = {"num_prefill": 1, "num_decode": 2, "transport": road, **shape}
        with simulated(model, extra=extra, **plan) as service, crowd(service.url) as clients:
            yield Rig(road, service, clients, proxy)


class Rigs:
    """One rig after the other: it stays for as long as the same road is asked for."""

    def __init__(self, model: Path, folder: Path):
        self._model, self._folder = model, folder
        self._rig: Rig | None = None
        self._stack = contextlib.ExitStack()

    def on(self, road: str) -> Rig:
        if self._rig is None or self._rig.road != road:
            self._rig = None
            self._stack.close()
            self._rig = self._stack.enter_context(rig(road, self._model, self._folder))
        return self._rig

    @contextlib.contextmanager
    def one_at_a_time(self) -> Iterator["Rigs"]:
        with self._stack:
            yield self
