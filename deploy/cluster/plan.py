"""A deployment file: what shall run on a Ray cluster, and what each program needs of a node. Plain values, to and from JSON.

Knows the three programs' settings by name, and checks them where the file is read; knows nothing of Ray.
"""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deploy.local import OWN_KEYS
from kvferry.config import DecodeConfig, PrefillConfig, RouterConfig, read_config
from kvferry.errors import ConfigurationError

KINDS: dict[str, Any] = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
CLUSTER_KEYS = OWN_KEYS | {"drain_s", "previous_end", "advertise", "tls_certificate", "tls_key", "tls_authority"}
"""Only a deployment on a cluster can know these."""

Setting = bool | int | float | str


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class PoolPlan(_Part):
    count: int = Field(default=1, ge=0)
    cpus: float = Field(default=1.0, ge=0)
    """Of each; what a worker's compute threads are if its settings do not say."""
    gpus: float = Field(default=0.0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict[str, float])
    """Custom resources of Ray that each takes."""
    labels: dict[str, str] = Field(default_factory=dict[str, str])
    """Labels that its node must have, as Ray's label selectors: a value, !value, in(a, b) or !in(a, b)."""
    settings: dict[str, Setting] = Field(default_factory=dict[str, Setting])
    """More settings of the program, as in its configuration file."""

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray must have free on one node."""
        asked = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in asked.items() if amount}


class RouterPlan(PoolPlan):
    count: int = Field(default=1, ge=1)
    """More than one: on nodes of their own, or, all on one machine, at ports that are ten apart."""
    each: bool = False
    """One on every address whose nodes its labels select, when the deployment begins; `count` says nothing then."""
    port: int = Field(default=8000, ge=0, le=65535)
    grpc_port: int = Field(default=8001, ge=0, le=65535)
    registry_port: int = Field(default=8002, ge=0, le=65535)


class TlsPlan(_Part):
    """Paths on every node: each has a certificate for its own address."""

    certificate: str
    key: str
    authority: str


class ClusterPlan(_Part):
    model: str = ""
    """Path on every node; the packaged model if not given."""
    grace_s: float = Field(default=30.0, ge=0)
    """What runs on a worker that drains may go on for so long; then it goes on elsewhere."""
    tls: TlsPlan | None = None
    """Needed as soon as there is more than one machine."""
    settings: dict[str, Setting] = Field(default_factory=dict[str, Setting])
    """Of both kinds of worker."""
    router: RouterPlan = RouterPlan()
    prefill: PoolPlan = PoolPlan()
    decode: PoolPlan = PoolPlan()

    def pool(self, role: str) -> PoolPlan:
        return {"router": self.router, "prefill": self.prefill, "decode": self.decode}[role]

    def flags(self, role: str) -> list[str]:
        """What every program of that role is started with. Raises ConfigurationError."""
        pool = self.pool(role)
        common: dict[str, Setting] = {}
        if role != "router":
            common = {"threads": max(int(pool.cpus), 1), **self.settings, "drain_s": self.grace_s}
        chosen: dict[str, Setting] = {**common, **pool.settings}
        if self.model:
            chosen["model"] = self.model
        if self.tls is not None:
            chosen |= {f"tls_{name}": path for name, path in self.tls.model_dump().items()}
        return [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]

    def check(self) -> None:
        """Raises ConfigurationError naming what no node could make right."""
        if not self.decode.count:
            raise ConfigurationError("decode.count is 0: without a decode worker nothing can be answered")
        for role, kind in KINDS.items():
            given = {**(self.settings if role != "router" else {}), **self.pool(role).settings}
            for name in given:
                if name in CLUSTER_KEYS:
                    raise ConfigurationError(f"{role}: setting {name!r} is the deployment's own: leave it out")
                if name not in kind.model_fields:
                    known = ", ".join(sorted(set(kind.model_fields) - CLUSTER_KEYS))
                    raise ConfigurationError(f"{role}: unknown setting {name!r}; known: {known}")
            read_config(kind, self.flags(role))
            if given.get("device", "cpu") != "cpu" and not self.pool(role).gpus:
                raise ConfigurationError(
                    f"{role}: device is {given['device']!r}, but gpus is 0: Ray shows an actor the accelerators that it asks for; "
                    "say gpus: 1"
                )
            if 0 < self.pool(role).gpus < 1 and not given.get("kv_tokens") and given.get("engine") != "sim":
                raise ConfigurationError(
                    f"{role}: gpus is {self.pool(role).gpus:g}, but each worker would take all that is free on the accelerator that it "
                    "shares: say kv_tokens"
                )

    def without_counts(self) -> dict[str, Any]:
        """What two plans must share for one to be the other scaled: workers are, routers are not."""
        found = self.model_dump()
        for role in ("prefill", "decode", "router") if self.router.each else ("prefill", "decode"):
            del found[role]["count"]
        return found


def read_plan(path: Path) -> ClusterPlan:
    """Raises ConfigurationError naming file and field."""
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not YAML: {error}") from error
    return plan_of(content, str(path))


def plan_of(content: Any, where: str = "the deployment") -> ClusterPlan:
    """Raises ConfigurationError naming the field."""
    try:
        return ClusterPlan.model_validate(content)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'file'}: {one['msg']}" for one in error.errors())
        raise ConfigurationError(f"{where}: {faults}") from error


def difference(old: ClusterPlan, new: ClusterPlan) -> str:
    """The first field in which they differ, other than counts; empty if there is none."""
    return _difference(old.without_counts(), new.without_counts(), "")


def _difference(old: Any, new: Any, where: str) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            found = _difference(old.get(name), new.get(name), f"{where}.{name}" if where else str(name))
            if found:
                return found
        return ""
    return "" if old == new else f"{where} is {old!r} there and {new!r} here"
