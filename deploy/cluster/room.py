"""What one program needs of a node, and what a node has for it. Pure: why they do not go together is a few words."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeRoom:
    node_id: str
    name: str
    labels: dict[str, str]
    free: dict[str, float]
    """What this deployment may have of it: nobody else does."""
    address: str = ""
    machine: str = ""


@dataclass(frozen=True, slots=True)
class Bundle:
    owner: str
    resources: dict[str, float]
    labels: dict[str, str]
    node_id: str = ""
    """Where it is already."""
    is_apart: bool = False
    """It shares its node's address with no other such."""
    near: str = ""
    """The address where it is best, if it may be there."""
    machine: str = ""
    """The only one where it may be, if it may not be on all."""


def why_not(bundle: Bundle, node: NodeRoom, free: Mapping[str, float]) -> str:
    """Empty if the bundle fits into what is `free` of the node now."""
    if bundle.machine and bundle.machine != node.machine:
        return f"is not on {bundle.machine}"
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
