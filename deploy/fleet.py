"""A fleet of simulated workers and their router in one event loop: the one place where the roles meet in one program.

Everything but the model is real: router, schedulers, pools, fetches. Links are those of kvferry/inprocess.py, steps take the time of a
shape on an accelerator (kvferry/engine/sim.py), so in virtual time (loadtest/virtual_time.py) a rack of machines fits into a laptop.
No HTTP: requests are token ids, and instants are those at which the router's journal had the tokens.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from decode_worker.worker import DecodeWorker
from kvferry.engine.plan import Plan, StepResult
from kvferry.engine.sim import SimExecutor, accelerator_called, sim_worker
from kvferry.errors import KvferryError
from kvferry.inprocess import Network
from kvferry.kv.road import roads_called
from kvferry.messages import Sampling
from kvferry.shape import ModelShape, read_shape
from kvferry.text.model_text import TextSizes
from kvferry.worker.settings import WorkerSettings
from loadtest.stream import StreamRecord
from prefill_worker.worker import PrefillWorker
from router.dispatcher import Dispatcher, DispatchLimits
from router.index import PrefixIndex
from router.live import Live, deltas_of
from router.members import Members
from router.openai_answer import numbers_of
from router.request import GenerationRequest

READY_S, LOOK_S = 60.0, 0.05


@dataclass(frozen=True, slots=True)
class FleetPlan:
    num_prefill: int
    num_decode: int
    shape: str = "qwen2.5-7b"
    """A named shape or a checkpoint directory."""
    accelerator: str = "h200"
    kv_tokens: int = 400_000
    """Per worker; the real memory of this machine behind it is 64 bytes for each that was ever used."""
    block_size: int = 16
    max_sequences: int = 256
    max_step_tokens: int = 2048
    step_target_s: float = 0.4
    itl_target_s: float = 0.25
    limits: DispatchLimits = field(default_factory=DispatchLimits)


class _NoText:
    """Stands in for the tokenizer: token ids are all that there is."""

    eos_token_ids = ()

    def __init__(self, sizes: TextSizes):
        self.sizes = sizes

    def stream(self, after: object = ()) -> Any:
        del after
        return SimpleNamespace(push=lambda token: "", flush=lambda: "")


@dataclass(frozen=True, slots=True)
class _Router:
    dispatcher: Dispatcher
    members: Members


def _new_router(network: Network, sizes: TextSizes, limits: DispatchLimits) -> _Router:
    """As router/__main__.py does it: what its parts are made of is known here alone."""
    text: Any = _NoText(sizes)
    members = Members("router", sizes, PrefixIndex())
    network.listen("router", members)
    return _Router(Dispatcher(text, members, network, limits), members)


class _WatchedExecutor:
    """Notes when the worker's steps end."""

    def __init__(self, executor: SimExecutor):
        self._executor = executor
        self.ends_s: list[float] = []

    async def execute(self, plan: Plan) -> StepResult:
        result = await self._executor.execute(plan)
        self.ends_s.append(asyncio.get_running_loop().time())
        return result

    def close(self) -> None:
        self._executor.close()


class Fleet:
    """Made by `fleet`."""

    def __init__(self, plan: FleetPlan, shape: ModelShape, router: _Router):
        self.plan, self._router = plan, router
        self.vocabulary_size = shape.vocabulary_size
        self.executors: dict[str, _WatchedExecutor] = {}

    def submit(self, prompt: list[int], num_output: int) -> Live:
        """Greedy, exactly so many tokens. Raises KvferryError at once for what cannot be taken."""
        request = GenerationRequest(tuple(prompt), Sampling(seed=0, max_tokens=num_output, temperature=0))
        return self._router.dispatcher.submit(request)

    async def ask(self, prompt: list[int], num_output: int) -> StreamRecord:
        """The request as a client would see it that reads each token when the router has it. Never raises for what the fleet does."""
        loop = asyncio.get_running_loop()
        record = StreamRecord(loop.time())
        try:
            live = self.submit(prompt, num_output)
            async for deltas in deltas_of([live]):
                tokens = sum(len(one.delta.token_ids) for one in deltas)
                record.num_tokens += tokens
                if tokens:
                    record.event_s.append(loop.time())
        except KvferryError as error:
            record.failure = f"http_{error.http_status}" if not record.event_s else "error_event"
            record.detail = error.message
        else:
            record.numbers = numbers_of(live.summary())
        return record

    @property
    def step_ends_s(self) -> dict[str, list[float]]:
        """When each worker's steps ended."""
        return {name: executor.ends_s for name, executor in self.executors.items()}

    async def until_ready(self) -> None:
        async with asyncio.timeout(READY_S):
            while not self._is_ready:
                await asyncio.sleep(LOOK_S)

    @property
    def _is_ready(self) -> bool:
        members = list(self._router.members)
        are_attached = all(member.is_attached for member in members)
        return len(members) == self.plan.num_prefill + self.plan.num_decode and are_attached


@contextlib.asynccontextmanager
async def fleet(plan: FleetPlan) -> AsyncIterator[Fleet]:
    """All workers have joined inside. Raises ConfigurationError for a shape or an accelerator that is not known."""
    shape, accelerator = read_shape(plan.shape), accelerator_called(plan.accelerator)
    roads = roads_called("inproc")
    kinds = [(f"prefill-{k + 1}", PrefillWorker) for k in range(plan.num_prefill)]
    kinds += [(f"decode-{k + 1}", DecodeWorker) for k in range(plan.num_decode)]
    async with asyncio.TaskGroup() as links, asyncio.TaskGroup() as group:
        network = Network(links)
        sizes = TextSizes(shape.vocabulary_size, shape.context_tokens)
        router = _new_router(network, sizes, plan.limits)
        made = Fleet(plan, shape, router)
        tasks = [group.create_task(router.dispatcher.run())]
        for name, kind in kinds:
            parts = sim_worker(shape, accelerator, plan.kv_tokens, plan.block_size)
            executor = made.executors[name] = _WatchedExecutor(parts.executor)
            settings = WorkerSettings(
                worker_id=name,
                address=name,
                incarnation=f"{name}-1",
                router_addresses=("router",),
                max_sequences=plan.max_sequences,
                step_target_s=plan.step_target_s,
                itl_target_s=plan.itl_target_s,
                max_step_tokens=plan.max_step_tokens,
                ceilings=parts.ceilings,
                roads=roads,
            )
            worker = kind(parts.engine, executor, network, settings)
            network.listen(name, worker)
            tasks.append(group.create_task(worker.run()))
        try:
            await made.until_ready()
            yield made
        finally:
            for task in tasks:
                task.cancel()
            for link in list(network.links):
                link.client.close()
