"""Room that programs have for themselves: each a placement group of Ray with one bundle, on the node that was found for it.

It is there before the program, stays through all of the program's lives, and nobody else gets it meanwhile. What is wanted together is
reserved together. One group each, not one a pool: Ray's groups do not shrink, and what one worker of many gives back must be free.
"""

import asyncio
import time
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.cluster.nodes import ClusterNode, cluster_nodes
from deploy.cluster.places import Places, find_places
from deploy.cluster.room import Bundle, NodeRoom, why_not

RESERVE_S = 2.0
"""Ray needs milliseconds, and a second for what has just become free. What it has not by then, somebody else has."""
NOTHING = {"memory": 1.0}
"""A group needs something."""
NODE_LABEL = "ray.io/node-id"
"""Ray gives it to every node."""


@dataclass(frozen=True, slots=True)
class Reservation:
    node_id: str
    resources: dict[str, float]
    group: PlacementGroup

    @property
    def strategy(self) -> Any:
        return PlacementGroupSchedulingStrategy(self.group, 0)


class Reservations:
    """Of one deployment, by the programs' names."""

    def __init__(self, namespace: str):
        self._prefix = f"kvferry/{namespace}/"
        self._held = dict[str, Reservation]()
        self._changing = asyncio.Lock()

    @property
    def names(self) -> set[str]:
        return set(self._held)

    async def adopt(self) -> None:
        """What was made by a controller that was lost."""
        self._held = await asyncio.to_thread(_made_before, self._prefix)

    async def standing(self, name: str) -> Reservation | None:
        """None if it has none, or its node was lost."""
        held = self._held.get(name)
        if held is None or await asyncio.to_thread(_is_made, held.group):
            return held
        await self.give_up([name])
        return None

    async def reserve(self, bundles: list[Bundle]) -> str:
        """For all of them that have none: at once where there is room, and not yet where others of this deployment have to leave.

        If it cannot be for all, it is for none: why not, is returned.
        """
        async with self._changing:
            return await self._reserve(bundles)

    async def reserve_some(self, bundles: list[Bundle]) -> str:
        """For as many of them as can be, the first ones first; why not for all, if so."""
        async with self._changing:
            lacking = await self._reserve(bundles)
            kept = [bundle for bundle in bundles if bundle.owner in self._held]
            hopeless = list[Bundle]()
            for bundle in bundles if lacking else ():
                alike = replace(bundle, owner="")
                if bundle in kept or alike in hopeless:
                    continue
                if await self._reserve([*kept, bundle]):
                    hopeless.append(alike)
                else:
                    kept.append(bundle)
            return lacking

    async def give_up(self, names: Iterable[str]) -> None:
        async with self._changing:
            await self._give_up(names)

    async def give_up_all(self) -> None:
        """Also what is there and was not known."""
        async with self._changing:
            self._held.clear()
            await asyncio.to_thread(_remove_all_but, set(), self._prefix)

    async def _give_up(self, names: Iterable[str]) -> None:
        groups = [held.group for name in names if (held := self._held.pop(name, None)) is not None]
        await asyncio.to_thread(_remove, groups)

    async def _reserve(self, bundles: list[Bundle]) -> str:
        nodes = await self._living_nodes()
        found = await self._search(bundles, nodes)
        if found.lacking:
            return found.lacking
        made = await asyncio.to_thread(self._make, _with_room_now(bundles, found, nodes))
        self._held |= {name: one for name, one in made.items() if one is not None}
        late = [name for name, one in made.items() if one is None]
        if late:
            await self._give_up(made)
            return f"the room for {', '.join(late)} was taken by somebody else in the same moment: try again"
        return ""

    # --------------------------------------------------------------------------------------------------------- where

    async def _living_nodes(self) -> list[ClusterNode]:
        """Nothing is reserved on others, and no group is there that is not known."""
        nodes = await asyncio.to_thread(cluster_nodes)
        alive = {node.node_id for node in nodes}
        await self._give_up([name for name, held in self._held.items() if held.node_id not in alive])
        await asyncio.to_thread(_remove_all_but, {held.group.id.hex() for held in self._held.values()}, self._prefix)
        return nodes

    async def _search(self, bundles: list[Bundle], nodes: list[ClusterNode]) -> Places:
        """Beside all that is reserved; else where what leaves will have been."""
        placed = [self._placed(bundle) for bundle in bundles]
        mine = {bundle.owner for bundle in bundles}
        found = await asyncio.to_thread(find_places, placed, self._rooms(nodes, mine))
        if found.lacking and self._held.keys() - mine:
            found = await asyncio.to_thread(find_places, placed, self._rooms(nodes, self.names))
        return found

    def _placed(self, bundle: Bundle) -> Bundle:
        held = self._held.get(bundle.owner)
        return bundle if held is None else replace(bundle, resources=held.resources, node_id=held.node_id)

    def _rooms(self, nodes: list[ClusterNode], names: set[str]) -> list[NodeRoom]:
        """With what is reserved for `names` counted as free."""
        ours: dict[str, dict[str, float]] = {}
        for held in (held for name, held in self._held.items() if name in names):
            on_node = ours.setdefault(held.node_id, {})
            for key, amount in held.resources.items():
                on_node[key] = on_node.get(key, 0) + amount
        return [node.room(ours.get(node.node_id, {})) for node in nodes]

    def _make(self, bundles: list[Bundle]) -> dict[str, Reservation | None]:
        """On a thread of its own. None: not in time; it is given up."""
        made = {
            bundle.owner: Reservation(
                bundle.node_id,
                bundle.resources or NOTHING,
                ray.util.placement_group(
                    [bundle.resources or NOTHING],
                    name=self._prefix + bundle.owner,
                    lifetime="detached",
                    bundle_label_selector=[{NODE_LABEL: bundle.node_id}],
                ),
            )
            for bundle in bundles
        }
        ends = time.monotonic() + RESERVE_S
        are_made = {name: one.group.wait(max(ends - time.monotonic(), 0.01)) for name, one in made.items()}
        _remove(made[name].group for name, is_made in are_made.items() if not is_made)
        return {name: one if are_made[name] else None for name, one in made.items()}


def _with_room_now(bundles: list[Bundle], found: Places, nodes: list[ClusterNode]) -> list[Bundle]:
    """Those that need not wait until another has left, with their nodes."""
    rooms = {node.node_id: node.room({}) for node in nodes}
    able = list[Bundle]()
    for bundle in (bundle for bundle in bundles if bundle.owner in found.node_ids):
        room = rooms[found.node_ids[bundle.owner]]
        if not why_not(bundle, room, room.free):
            able.append(replace(bundle, node_id=room.node_id))
            for key, amount in bundle.resources.items():
                room.free[key] -= amount
    return able


def _is_made(group: PlacementGroup) -> bool:
    return ray.util.placement_group_table(group).get("state") == "CREATED"


def _made_before(prefix: str) -> dict[str, Reservation]:
    return {
        told["name"].removeprefix(prefix): Reservation(
            told["bundles_to_node_id"][0], dict(told["bundles"][0]), _group(group_id)
        )
        for group_id, told in _table(prefix).items()
        if told["state"] == "CREATED"
    }


def _remove_all_but(group_ids: Set[str], prefix: str) -> None:
    _remove(_group(group_id) for group_id in _table(prefix).keys() - group_ids)


def _table(prefix: str) -> dict[str, Any]:
    """What Ray says of groups that are there, by id."""
    told = ((key, one) for key, one in ray.util.placement_group_table().items() if one["state"] != "REMOVED")
    return {key: one for key, one in told if one["name"].rpartition("/")[0] + "/" == prefix}


def _group(group_id: str) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID.from_hex(group_id))


def _remove(groups: Iterable[PlacementGroup]) -> None:
    for group in groups:
        ray.util.remove_placement_group(group)
