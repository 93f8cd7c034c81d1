"""A deployment on this machine: one router, prefill and decode workers, each a process of its own, supervised.

Each child's standard input is a pipe whose other end only this process holds: however this process ends, the children see it
and end too. A child that dies is started again after a pause that grows; one that was refused, or fails before it ever ran, ends
the deployment with its reason.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from kvferry.config import home, read_section
from kvferry.errors import ConfigurationError
from kvferry.kv.road import roads_called
from kvferry.process import REFUSED_EXIT_CODE, make_secret
from kvferry.shape import ModelShape, cpu_kv, pool_tokens, read_checkpoint_shape

MODULES = {"router": "router", "prefill": "prefill_worker", "decode": "decode_worker"}
OWN_KEYS = {"model", "secret_file", "with_parent", "router", "name", "port", "grpc_port", "registry_port", "host"}
FIRST_PAUSE_S, MAX_PAUSE_S, STEADY_S = 0.5, 30.0, 60.0
STOP_TIMEOUT_S = 5.0
READY_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What to start."""

    model: Path
    num_prefill: int = 1
    num_decode: int = 1
    port: int = 0
    grpc_port: int = 0
    kv_tokens: int = 0
    """Per worker; 0: from the memory there is."""
    weights: str = "float32"
    kv: str = "auto"
    transport: str = "auto"
    """How blocks go between workers; "ray" makes them actors of a Ray that is started for them."""
    engine: str = "native"
    """"sim": no model, but its time (kvferry/engine/sim.py)."""
    sim_shape: str = "smollm2-135m"
    sim_accelerator: str = "here"
    device: str = "cpu"
    """Of all workers whose section in the configuration file names none."""
    config: Path | None = None
    extra: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """More flags, by role or by a process's name."""


@dataclass(slots=True)
class Child:
    """One process, through all of its lives."""

    name: str
    role: str
    arguments: list[str]
    state: str = "starting"
    share: float = 0.0
    details: dict[str, str] = field(default_factory=dict[str, str])
    process: asyncio.subprocess.Process | None = None
    pid: int = 0
    num_starts: int = 0
    previous_end: str = ""
    """Of its last life: told to the next one, and so to the routers."""


class LocalDeployment:
    """Use `running()`. `on_change` is called whenever a child's state changes."""

    def __init__(self, plan: LocalPlan, on_change: Callable[[Child], None] = lambda child: None):
        self.plan, self._on_change = plan, on_change
        self.shape: ModelShape = read_checkpoint_shape(plan.model)
        num_workers = plan.num_prefill + plan.num_decode
        self.threads = max(num_cores() // max(num_workers, 1), 1)
        available = psutil.virtual_memory().available
        self.weights, self.kv = (same_for_both(plan.config, key, getattr(plan, key)) for key in ("weights", "kv"))
        self.transport = same_for_both(plan.config, "transport", plan.transport)
        roads_called(self.transport)
        self.kv_tokens = plan.kv_tokens or pool_tokens(self.shape, available, num_workers, cpu_kv(self.kv))
        self._from_file = {role: self._keys_in_file(role) for role in MODULES}
        self._check_devices()
        self.children: dict[str, Child] = {}
        self._changed = asyncio.Event()
        self._fatal: ConfigurationError | None = None
        self.folder = Path()

    @property
    def url(self) -> str:
        return f"http://{self.children['router'].details['http']}"

    @property
    def grpc_address(self) -> str:
        return self.children["router"].details["grpc"]

    def of(self, role: str) -> list[Child]:
        return [child for child in self.children.values() if child.role == role]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["LocalDeployment"]:
        """All processes run and are ready inside. Raises ConfigurationError with a child's reason."""
        (home() / "run").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="up-", dir=home() / "run") as folder:
            self.folder = Path(folder)
            make_secret(self.folder / "secret")
            async with asyncio.TaskGroup() as group:
                supervisors: list[asyncio.Task[None]] = []
                try:
                    supervisors.append(self._start(group, "router", "router", self._router_arguments()))
                    await self._until(lambda: self.children["router"].state == "listening")
                    for role, count in (("prefill", self.plan.num_prefill), ("decode", self.plan.num_decode)):
                        for number in range(1, count + 1):
                            name = f"{role}-{number}"
                            supervisors.append(self._start(group, name, role, self._worker_arguments(name)))
                    await self._until(self._have_workers_joined)
                    await self._until_serving()
                    yield self
                finally:
                    for supervisor in supervisors:
                        supervisor.cancel()

    async def failure(self) -> ConfigurationError:
        """Waits for something that no restart can mend."""
        while self._fatal is None:
            self._changed.clear()
            await self._changed.wait()
        return self._fatal

    def _start(self, group: asyncio.TaskGroup, name: str, role: str, arguments: list[str]) -> asyncio.Task[None]:
        child = self.children[name] = Child(name, role, arguments)
        return group.create_task(self._supervise(child))

    def _router_arguments(self) -> list[str]:
        return [f"--port={self.plan.port}", f"--grpc-port={self.plan.grpc_port}", "--registry-port=0"]

    def _worker_arguments(self, name: str) -> list[str]:
        registry = self.children["router"].details["registry"]
        sizes = {"threads": self.threads, "kv_tokens": self.kv_tokens, "weights": self.weights, "kv": self.kv}
        sizes |= {"transport": self.transport, "engine": self.plan.engine, "device": self.plan.device}
        if self._said("device", name) != "cpu":
            sizes["kv_tokens"] = self.plan.kv_tokens  # 0: what the device holds
        if self.plan.engine == "sim":
            sizes |= {"sim_shape": self.plan.sim_shape, "sim_accelerator": self.plan.sim_accelerator}
            sizes["kv_tokens"] = self.plan.kv_tokens  # 0: what the accelerator holds
        from_file = self._from_file[name.partition("-")[0]]
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in sizes.items() if key not in from_file]
        return [f"--name={name}", f"--router={registry}", *flags]

    def _said(self, key: str, name: str) -> str:
        """Of a worker, by the configuration file, else by the plan."""
        section = read_section(self.plan.config, name.partition("-")[0]) if self.plan.config else {}
        return str(section.get(key, getattr(self.plan, key)))

    def _check_devices(self) -> None:
        """Raises ConfigurationError if two workers would each take all that is free on a device."""
        taken: dict[str, int] = {}
        for role, count in (("prefill", self.plan.num_prefill), ("decode", self.plan.num_decode)):
            device = self._said("device", role)
            if device != "cpu" and self._said("kv_tokens", role) == "0" and self._said("engine", role) != "sim":
                key = f"{device}:0" if device == "cuda" else device
                taken[key] = taken.get(key, 0) + count
        for device, count in taken.items():
            if count > 1:
                raise ConfigurationError(
                    f"{count} workers would each take all that is free on {device}: say how many tokens each may keep (--kv-tokens), "
                    "or give each kind a device of its own in --config"
                )

    def _keys_in_file(self, role: str) -> set[str]:
        """What the configuration file says of a role; what only this deployment can know must not be in it."""
        keys = set(read_section(self.plan.config, role)) if self.plan.config else set[str]()
        for key in sorted(keys & OWN_KEYS):
            raise ConfigurationError(f"{self.plan.config}: {role}.{key} is set by `kvferry up` itself: leave it out")
        return keys

    def _have_workers_joined(self) -> bool:
        return all(child.state == "ready" for child in self.children.values() if child.role != "router")

    async def _until_serving(self) -> None:
        """The router has opened its streams to the decode workers."""
        try:
            async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(READY_TIMEOUT_S):
                while (await client.get(f"{self.url}/health/ready")).status_code != 200:
                    await asyncio.sleep(0.05)
        except (TimeoutError, httpx.TransportError) as error:
            raise ConfigurationError(f"the router at {self.url} does not become ready: {error!r}") from error

    async def _until(self, is_reached: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not is_reached():
                    if self._fatal is not None:
                        raise self._fatal
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            late = ", ".join(f"{c.name} is {c.state}" for c in self.children.values() if c.state != "ready")
            raise ConfigurationError(f"not ready after {READY_TIMEOUT_S:g} s: {late}") from None

    # ------------------------------------------------------------------------------------------------------ one process

    async def _supervise(self, child: Child) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began = asyncio.get_running_loop().time()
            code = await self._live(child)
            if code == REFUSED_EXIT_CODE or (
                child.num_starts == 1 and child.state in ("starting", "loading", "failed")
            ):
                reason = child.details.get("reason") or self._last_words(child)
                self._fatal = ConfigurationError(f"{child.name} ended with code {code}: {reason}")
                self._changed.set()
                return
            if asyncio.get_running_loop().time() - began > STEADY_S:
                pause_s = FIRST_PAUSE_S
            child.previous_end = f"signal {-code}" if code < 0 else f"code {code}"
            self._set_state(child, f"died ({_words_of(code)}), starts again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _arguments_of(self, child: Child) -> list[str]:
        config = [f"--config={self.plan.config}"] if self.plan.config else []
        previous = [f"--previous-end={child.previous_end}"] if child.previous_end and child.role != "router" else []
        fixed = [f"--model={self.plan.model}", f"--secret-file={self.folder / 'secret'}"]
        return [
            *config,
            *child.arguments,
            *fixed,
            *previous,
            *self.plan.extra.get(child.role, []),
            *self.plan.extra.get(child.name, []),
        ]

    async def _live(self, child: Child) -> int:
        """Starts the process and returns its exit code; ends it when cancelled."""
        child.num_starts += 1
        self._set_state(child, "starting")
        with (self.folder / f"{child.name}.log").open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                MODULES[child.role],
                *self._arguments_of(child),
                "--with-parent",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self._environment},
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends the others in order
            )
        child.pid = child.process.pid
        try:
            await self._follow(child)
            return await child.process.wait()
        finally:
            await asyncio.shield(_end(child.process))

    @property
    def _environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}

    async def _follow(self, child: Child) -> None:
        assert child.process is not None
        assert child.process.stdout is not None
        async for line in child.process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            self._heard(child, message)

    def _heard(self, child: Child, message: dict[str, Any]) -> None:
        child.share = float(message.pop("share", child.share))
        state = message.pop("state", child.state)
        child.details.update({name: str(value) for name, value in message.items()})
        if state == "listening" and child.role == "router":
            self._fix_ports(child)
        self._set_state(child, state)

    def _fix_ports(self, router: Child) -> None:
        """A router that starts again must be found where it was."""
        ports = {name: router.details[name].rpartition(":")[2] for name in ("http", "grpc", "registry")}
        router.arguments = [
            f"--port={ports['http']}",
            f"--grpc-port={ports['grpc']}",
            f"--registry-port={ports['registry']}",
        ]

    def _set_state(self, child: Child, state: str) -> None:
        child.state = state
        self._changed.set()
        self._on_change(child)

    def _last_words(self, child: Child) -> str:
        log = self.folder / f"{child.name}.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return lines[-1] if lines else "it said nothing"


def same_for_both(config: Path | None, key: str, given: str) -> str:
    """What the configuration file says for either kind of worker holds for both; two that differ could not be paired."""
    if config is None:
        return given
    sections = [read_section(config, role) for role in ("prefill", "decode")]
    found = {str(section[key]) for section in sections if key in section}
    if len(found) > 1:
        raise ConfigurationError(f"{config}: prefill.{key} and decode.{key} differ, and must be the same")
    return found.pop() if found else given


def _words_of(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, then SIGKILL: for a process that may have ended already."""
    if process.returncode is not None:
        return
    try:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            process.terminate()
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
    finally:  # also when this is cancelled in its turn: a stopped process hears nothing but this
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    await process.wait()


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
