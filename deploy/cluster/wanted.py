"""What is wanted of a deployment: its plan, its secret, and every program by name. The controller's memory.

Kept in the cluster's own key-value store, so that a controller that was lost goes on where it was; as long as the store is.
"""

import json
import secrets
from collections.abc import Set
from dataclasses import dataclass, replace

from deploy.cluster.plan import ClusterPlan, plan_of
from deploy.cluster.room import Bundle

KEY = b"kvferry-wanted"
ROUTER_PORTS_APART = 10
"""Of two routers on one machine."""


@dataclass(frozen=True, slots=True)
class Wanted:
    plan: ClusterPlan
    secret: str
    machine: str
    """Of all nodes where it began without TLS: nothing listens beyond it, so nothing may be elsewhere. Empty: anywhere."""
    workers: dict[str, str]
    """Role by name. A worker that changes its role keeps its name."""
    routers: dict[str, str]
    """Where each listens for workers; empty as long as that is not known."""
    ports: dict[str, list[int]]
    """HTTP, gRPC and registry of each router, once it has them: it must be found where it was."""

    @property
    def is_loopback(self) -> bool:
        return self.machine != ""

    @property
    def roles(self) -> dict[str, str]:
        """Of every program, by name."""
        return {**dict.fromkeys(self.routers, "router"), **self.workers}

    def count(self, role: str) -> int:
        return sum(one == role for one in self.workers.values())

    def scaled(self, role: str, count: int, homeless: Set[str] = frozenset()) -> "Wanted":
        """So many of a role: free names are taken from below; those go that have no room, then those with the highest numbers."""
        workers = dict(self.workers)
        while sum(one == role for one in workers.values()) < count:
            workers[_free_name(role, workers)] = role
        of_role = (name for name, one in workers.items() if one == role)
        leaving = sorted(of_role, key=lambda name: (name in homeless, _number(name)))[count:]
        return replace(self, workers={name: one for name, one in workers.items() if name not in leaving})

    def with_role(self, name: str, role: str) -> "Wanted":
        return replace(self, workers={**self.workers, name: role})

    def without(self, name: str) -> "Wanted":
        return replace(self, workers={one: role for one, role in self.workers.items() if one != name})

    def with_router(self, name: str, registry: str, ports: list[int]) -> "Wanted":
        return replace(self, routers={**self.routers, name: registry}, ports={**self.ports, name: ports})

    def ports_of(self, name: str) -> list[int]:
        """HTTP, gRPC and registry that a router is to listen at; 0: any."""
        if name in self.ports:
            return self.ports[name]
        plan = self.plan.router
        apart = ROUTER_PORTS_APART * list(self.routers).index(name) if self.is_loopback else 0
        return [port + apart if port else 0 for port in (plan.port, plan.grpc_port, plan.registry_port)]

    def to_json(self) -> bytes:
        return json.dumps(
            {
                "plan": self.plan.model_dump(),
                "secret": self.secret,
                "machine": self.machine,
                "workers": self.workers,
                "routers": self.routers,
                "ports": self.ports,
            }
        ).encode()


def first_wanted(plan: ClusterPlan, machine: str) -> Wanted:
    """On one machine with fixed ports it is known where routers will be: workers load while those begin."""
    routers = {f"router-{number}": "" for number in range(1, plan.router.count + 1)}
    empty = Wanted(plan, secrets.token_urlsafe(32), machine, {}, routers, {})
    if machine and plan.router.registry_port:
        empty = replace(empty, routers={name: f"127.0.0.1:{empty.ports_of(name)[2]}" for name in routers})
    return empty.scaled("prefill", plan.prefill.count).scaled("decode", plan.decode.count)


def wanted_of(text: bytes) -> Wanted:
    found = json.loads(text)
    return Wanted(**{**found, "plan": plan_of(found["plan"])})


def bundles_of(wanted: Wanted) -> list[Bundle]:
    """What each program needs, those first without which nothing is answered. Beyond one machine, routers have the same ports."""
    roles = sorted(wanted.roles.items(), key=lambda one: ("router", "decode", "prefill").index(one[1]))
    return [
        Bundle(
            name,
            wanted.plan.pool(role).bundle,
            wanted.plan.pool(role).labels,
            is_apart=role == "router" and not wanted.is_loopback,
            near=wanted.routers.get(name, "").rpartition(":")[0],
            machine=wanted.machine,
        )
        for name, role in roles
    ]


def _free_name(role: str, taken: dict[str, str]) -> str:
    number = 1
    while f"{role}-{number}" in taken:
        number += 1
    return f"{role}-{number}"


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
