"""Where everything that is wanted goes, and if it cannot, a sentence. Pure: bundles and nodes in, nodes' ids out.

Ray itself places one actor after the other, may so fill the only node that a later one could use, and would then let that one wait for
ever. Here those with the least choice come first, and a choice that leads nowhere is taken back. It is looked for twice: spread over
the nodes, and if that finds nothing, packed as tightly as can be.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from deploy.cluster.room import Bundle, NodeRoom, needs, why_not

MAX_STEPS = 1000
"""Of one search, beside one for each bundle: with a hundred nodes half a second. One that would need more has found nothing."""


@dataclass(frozen=True, slots=True)
class Places:
    node_ids: dict[str, str] = field(default_factory=dict[str, str])
    """By owner, of all that had no place yet."""
    lacking: str = ""
    """Empty if all fit; else which one does not, and why not on each node."""


def find_places(bundles: Iterable[Bundle], nodes: Iterable[NodeRoom]) -> Places:
    everything = list(bundles)
    floor = _Floor(list(nodes), everything)
    for bundle in everything:
        if bundle.node_id in floor.left:
            floor.put(bundle, bundle.node_id)
    wanted = [bundle for bundle in everything if bundle.node_id not in floor.left]
    wanted.sort(key=lambda one: (floor.num_fitting(one), -floor.share(one)))
    spread, tight = _Search(floor, wanted, floor.spread), _Search(floor, wanted, floor.tight)
    if spread.succeeds() or (not spread.is_through and tight.succeeds()):
        return Places({bundle.owner: node_id for bundle, node_id in floor.put_down if bundle in wanted})
    return Places(lacking=max(spread, tight, key=lambda one: one.furthest).lacking)


class _Floor:
    """The nodes, what is left of each, and what was put where, in that order."""

    def __init__(self, nodes: list[NodeRoom], bundles: list[Bundle]):
        names = {name for bundle in bundles for name in bundle.resources}
        labels = sorted({name for bundle in bundles for name in bundle.labels})
        self.nodes = nodes
        self.left = {node.node_id: {name: node.free.get(name, 0) for name in names} for node in nodes}
        self.put_down: list[tuple[Bundle, str]] = []
        self._addresses = {node.node_id: node.address or node.node_id for node in nodes}
        self._num_apart = dict.fromkeys(self._addresses.values(), 0)
        self._counts = dict.fromkeys(self.left, 0)
        self._kinds = {node.node_id: tuple(str(node.labels.get(name)) for name in labels) for node in nodes}
        self._most = {name: max((node.free.get(name, 0) for node in nodes), default=0) for name in names}

    def put(self, bundle: Bundle, node_id: str) -> None:
        self._take(node_id, bundle, 1)
        self.put_down.append((bundle, node_id))

    def take_back(self) -> None:
        bundle, node_id = self.put_down.pop()
        self._take(node_id, bundle, -1)

    def _take(self, node_id: str, bundle: Bundle, times: int) -> None:
        left = self.left[node_id]
        self._counts[node_id] += times
        self._num_apart[self._addresses[node_id]] += times * bundle.is_apart
        for name, amount in bundle.resources.items():
            left[name] = round(left[name] - times * amount, 4)  # Ray counts in ten-thousandths

    def why_not(self, bundle: Bundle, node: NodeRoom) -> str:
        if bundle.is_apart and self._num_apart[self._addresses[node.node_id]]:
            return "has another one, with which it cannot share an address"
        return why_not(bundle, node, self.left[node.node_id])

    def fitting(self, bundle: Bundle) -> list[NodeRoom]:
        return [node for node in self.nodes if not self.why_not(bundle, node)]

    def num_fitting(self, bundle: Bundle) -> int:
        return len(self.fitting(bundle))

    def share(self, bundle: Bundle) -> float:
        """Of the largest node, in the resource of which it needs most."""
        return max((amount / (self._most.get(name) or 1) for name, amount in bundle.resources.items()), default=0.0)

    def spread(self, node: NodeRoom) -> tuple[float, ...]:
        """Lowest first: where fewest are, and of those where most is left."""
        return self._counts[node.node_id], -self.left[node.node_id].get("CPU", 0)

    def tight(self, node: NodeRoom) -> tuple[float, ...]:
        """Lowest first: where least is left."""
        return (sum(amount / (self._most.get(name) or 1) for name, amount in self.left[node.node_id].items()),)

    def state(self) -> tuple[object, ...]:
        """Equal ones differ at most in which of two equal nodes is which."""
        return tuple(
            sorted(
                (self._kinds[name], self._num_apart[self._addresses[name]], tuple(sorted(left.items())))
                for name, left in self.left.items()
            )
        )


class _Search:
    """Depth first, within a number of steps; a state that led nowhere is not tried again."""

    def __init__(self, floor: _Floor, wanted: list[Bundle], order: Callable[[NodeRoom], tuple[float, ...]]):
        self._floor, self._wanted, self._order = floor, wanted, order
        self._seen = set[tuple[object, ...]]()
        self.furthest, self.lacking = -1, ""
        """How many were placed at the most, and why the next was not."""
        self.is_through = False
        """There is no solution, however long it is looked for."""

    def succeeds(self) -> bool:
        """All are on the floor then; else none of them is."""
        open_choices = [self._choices(0)]
        num_left = MAX_STEPS + len(self._wanted)
        while open_choices and len(open_choices) <= len(self._wanted) and num_left:
            num_left -= 1
            node = next(open_choices[-1], None)
            if node is not None:
                self._floor.put(self._wanted[len(open_choices) - 1], node.node_id)
                open_choices.append(self._choices(len(open_choices)))
                continue
            open_choices.pop()
            if open_choices:
                self._floor.take_back()
        if len(open_choices) > len(self._wanted):
            return True
        self.is_through = not open_choices
        for _ in open_choices[1:]:
            self._floor.take_back()
        return False

    def _choices(self, number: int) -> Iterator[NodeRoom]:
        state = (number, *self._floor.state())
        if number == len(self._wanted) or state in self._seen:
            return iter(())
        self._seen.add(state)
        bundle = self._wanted[number]
        fitting = self._floor.fitting(bundle)
        if not fitting and number > self.furthest:
            self.furthest, self.lacking = number, self._words(bundle)
        return iter(sorted(fitting, key=lambda node: (node.address != bundle.near, *self._order(node))))

    def _words(self, bundle: Bundle) -> str:
        reasons = "; ".join(f"{node.name} {self._floor.why_not(bundle, node)}" for node in self._floor.nodes)
        said = (
            f"no node has room for {bundle.owner}: it needs {needs(bundle)}, but {reasons or 'there is no node'}. "
            "Ask for fewer or smaller workers, add a node, or mend the labels in the deployment file"
        )
        if not bundle.machine or all(node.machine == bundle.machine for node in self._floor.nodes):
            return said
        return f"{said}. Other machines than {bundle.machine} need TLS: `kvferry down`, then `kvferry up` with tls: in that file"
