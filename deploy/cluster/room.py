"""Does what is wanted fit into the nodes? Pure: bundles and nodes in, a sentence out.

Ray itself would let an actor wait for ever for a node that never comes; this says at once what is missing, and where.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeRoom:
    node_id: str
    name: str
    labels: dict[str, str]
    free: dict[str, float]
    """What this deployment may have of it: nobody else does."""


@dataclass(frozen=True, slots=True)
class Bundle:
    owner: str
    resources: dict[str, float]
    labels: dict[str, str]
    node_id: str = ""
    """Where it is already."""


def shortage(bundles: Iterable[Bundle], nodes: Iterable[NodeRoom]) -> str:
    """Empty if all fit; else which one does not, and why not on each node. Places large ones first, each where most is left."""
    known = list(nodes)
    left = {node.node_id: dict(node.free) for node in known}
    settled, wanted = list[Bundle](), list[Bundle]()
    for bundle in bundles:
        (settled if bundle.node_id in left else wanted).append(bundle)
    for bundle in settled:
        _take(left[bundle.node_id], bundle.resources)
    wanted.sort(key=lambda one: (-one.resources.get("GPU", 0), -sum(one.resources.values())))
    for bundle in wanted:
        fitting = [node for node in known if not _why_not(bundle, node, left[node.node_id])]
        if not fitting:
            return _words(bundle, known, left)
        best = max(fitting, key=lambda node: left[node.node_id].get("CPU", 0))
        _take(left[best.node_id], bundle.resources)
    return ""


def _take(free: dict[str, float], resources: dict[str, float]) -> None:
    for name, amount in resources.items():
        free[name] = free.get(name, 0) - amount


def _why_not(bundle: Bundle, node: NodeRoom, free: dict[str, float]) -> str:
    for name, wanted in bundle.labels.items():
        found = node.labels.get(name)
        if not selects(wanted, found):
            return f"label {name} is {found!r}" if found is not None else f"has no label {name}"
    short = [
        f"{free.get(name, 0):g} {name}"
        for name, amount in bundle.resources.items()
        if free.get(name, 0) < amount - 1e-6
    ]
    return f"has {' and '.join(short)} left" if short else ""


def selects(wanted: str, found: str | None) -> bool:
    """Ray's label selectors."""
    if wanted.startswith("!"):
        return not selects(wanted[1:], found)
    if wanted.startswith("in(") and wanted.endswith(")"):
        return found in [one.strip() for one in wanted[3:-1].split(",")]
    return found == wanted


def needs(bundle: Bundle) -> str:
    resources = ", ".join(f"{amount:g} {name}" for name, amount in bundle.resources.items()) or "nothing"
    labels = ", ".join(f"{name}={value}" for name, value in bundle.labels.items())
    return f"{resources} on a node with {labels}" if labels else f"{resources} on one node"


def _words(bundle: Bundle, nodes: list[NodeRoom], left: dict[str, dict[str, float]]) -> str:
    reasons = "; ".join(f"{node.name} {_why_not(bundle, node, left[node.node_id])}" for node in nodes)
    return (
        f"no node has room for {bundle.owner}: it needs {needs(bundle)}, but {reasons or 'there is no node'}. "
        "Ask for fewer or smaller workers, add a node, or mend the labels in the deployment file"
    )
