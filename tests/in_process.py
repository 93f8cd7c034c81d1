"""A whole deployment in one event loop: router, prefill and decode workers over in-process links, with a fake model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from decode_worker.worker import DecodeWorker
from kvferry.engine.engine import Engine, fake_engine
from kvferry.engine.plan import Plan, Runner, StepResult
from kvferry.inprocess import Network
from kvferry.messages import Sampling
from kvferry.text.model_text import TextSizes
from kvferry.worker.settings import WorkerSettings
from prefill_worker.worker import PrefillWorker
from router.admission import QueueLimits
from router.dispatcher import Dispatcher, DispatchLimits
from router.index import PrefixIndex
from router.live import Live, wait_all
from router.members import Members
from router.placer import PlacingRules
from router.request import GenerationRequest

BLOCK = 16


def limits_of(local_tokens: int = 0, max_queued: int = 1024, policy: str = "", **more: Any) -> DispatchLimits:
    """The router's, with what tests like to set. Who wants every block fetched (0) wants no weighing either."""
    policy = policy or ("cost" if local_tokens else "least-loaded")
    slos = {name: more.pop(name) for name in ("slo_ttft_s", "slo_tpot_s") if name in more}
    return DispatchLimits(QueueLimits(max_queued), placing=PlacingRules(policy, local_tokens, **slos), **more)


class VirtualExecutor:
    """Runs the step inline after the virtual time that it is said to take. `fail` makes the next step raise."""

    def __init__(self, runner: Runner, base_s: float = 0.01, s_per_token: float = 0.001):
        self._runner, self._base_s, self._s_per_token = runner, base_s, s_per_token
        self.hang = asyncio.Event()
        self.plans: list[Plan] = []
        self.fail: Exception | None = None
        self.hang.set()

    async def execute(self, plan: Plan) -> StepResult:
        await self.hang.wait()
        self.plans.append(plan)
        await asyncio.sleep(self._base_s + self._s_per_token * plan.num_tokens)
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        return self._runner.run(plan)

    def close(self) -> None:
        pass


class NumberText:
    """Stands in for ModelText where only token ids matter: each token's text is its number and a space."""

    sizes = TextSizes(1000, 8192)
    eos_token_ids = ()

    def stream(self, after: Any = ()) -> Any:
        return SimpleNamespace(push=lambda token: f"{token} ", flush=lambda: "")


@dataclass
class Node:
    worker: PrefillWorker | DecodeWorker
    executor: VirtualExecutor
    task: asyncio.Task[None]
    engine: Engine


@dataclass
class Deployment:
    network: Network
    dispatcher: Dispatcher
    members: Members
    group: asyncio.TaskGroup
    nodes: dict[str, Node] = field(default_factory=dict)

    def start(self, name: str, num_slots: int = 400, **settings: Any) -> Node:
        step = settings.pop("step", {})
        engine = settings.pop("engine", None) or fake_engine(num_slots, BLOCK)
        executor = VirtualExecutor(engine.runner, **step)
        kind = PrefillWorker if name.startswith("p") else DecodeWorker
        worker = kind(engine, executor, self.network, WorkerSettings(name, name, f"{name}-1", ("router",), **settings))
        self.network.listen(name, worker)
        node = Node(worker, executor, self.group.create_task(worker.run()), engine)
        self.nodes[name] = node
        return node

    async def kill(self, name: str) -> None:
        """As kill -9: nothing is said to anybody."""
        node = self.nodes.pop(name)
        self.network.kill(name)
        node.task.cancel()
        await asyncio.wait((node.task,))

    async def ready(self, *names: str) -> None:
        async with asyncio.timeout(60):
            while not all(self._is_ready(name) for name in names or self.nodes):
                await asyncio.sleep(0.05)

    def _is_ready(self, name: str) -> bool:
        member = self.members.get(name)
        return member is not None and member.is_attached

    def submit(self, prompt: list[int], max_tokens: int = 8, n: int = 1, temperature: float = 0, **more: Any) -> Live:
        names = ("stop_token_ids", "num_logprobs", "num_prompt_logprobs")
        fields = {name: more.pop(name) for name in names if name in more}
        sampling = Sampling(more.pop("seed", 7), max_tokens, temperature, **fields)
        return self.dispatcher.submit(GenerationRequest(tuple(prompt), sampling, n, **more))

    async def answer(self, prompt: list[int], max_tokens: int = 8, **more: Any) -> list[int]:
        live = self.submit(prompt, max_tokens, **more)
        await wait_all([live])
        return live.journal.choices[0].tokens

    async def quiet(self) -> None:
        """Waits until nothing runs, then checks that nobody holds anything."""
        await asyncio.sleep(1.5)
        for name, node in self.nodes.items():
            pool = node.worker.body.pool
            audit = pool.audit()
            assert audit.is_clean, (name, audit)
            assert audit.counts.num_live == audit.counts.num_filling == 0, (name, audit)
            load = node.worker.load()
            assert load.num_waiting == load.num_fetching == load.num_running == load.num_serving == 0, (name, load)
            assert load.counters["leaked_slots"] == 0
        assert not self.dispatcher.lives
        for member in self.members:
            assert member.num_active == member.active_tokens == 0, member


@contextlib.asynccontextmanager
async def deployment(
    *names: str, limits: DispatchLimits | None = None, text: Any = None, **settings: Any
) -> AsyncIterator[Deployment]:
    """`names` begin with p or d; they have joined when the body begins."""
    async with asyncio.TaskGroup() as links, asyncio.TaskGroup() as group:
        network = Network(links)
        text = text or NumberText()
        members = Members("router", text.sizes, PrefixIndex())
        network.listen("router", members)
        dispatcher = Dispatcher(text, members, network, limits or DispatchLimits())
        running = group.create_task(dispatcher.run())
        deployed = Deployment(network, dispatcher, members, group)
        for name in names:
            deployed.start(name, **settings)
        await deployed.ready()
        yield deployed
        for node in deployed.nodes.values():
            node.task.cancel()
        running.cancel()
        for link in list(network.links):
            link.client.close()
