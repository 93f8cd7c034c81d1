"""The cluster's nodes as they are now, and what of them this deployment may use."""

from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node

from deploy.cluster.room import NodeRoom


@dataclass(frozen=True, slots=True)
class ClusterNode:
    node_id: str
    address: str
    host: str
    labels: dict[str, str]
    total: dict[str, float]
    free: dict[str, float]

    @property
    def machine(self) -> str:
        return f"{self.address} ({self.host})"

    @property
    def name(self) -> str:
        return f"{self.address} ({self.host}, node {self.node_id[:8]})"

    def room(self, ours: dict[str, float]) -> NodeRoom:
        """`ours`: what this deployment has of it already."""
        free = {key: self.free.get(key, 0) + ours.get(key, 0) for key in {*self.free, *ours}}
        return NodeRoom(self.node_id, self.name, self.labels, free, self.address, self.machine)


def cluster_nodes() -> list[ClusterNode]:
    """Those that are alive. Asks the control store: not for an event loop's thread."""
    available: dict[str, Any] = available_resources_per_node()  # what Ray Serve uses; there is no public one
    return [
        ClusterNode(
            one["NodeID"],
            one["NodeManagerAddress"],
            one["NodeManagerHostname"],
            dict(one.get("Labels") or {}),
            dict(one["Resources"]),
            dict(available.get(one["NodeID"], {})),
        )
        for one in ray.nodes()
        if one["Alive"]
    ]


def are_one_machine(nodes: list[ClusterNode]) -> bool:
    return len({node.machine for node in nodes}) == 1
