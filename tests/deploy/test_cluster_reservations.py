"""Room that is reserved for programs: all of a change or nothing, kept through their lives. Against Ray's groups as they behave, without Ray."""

import asyncio

import pytest

from deploy.cluster import reservations
from deploy.cluster.reservations import Reservations
from deploy.cluster.room import Bundle
from tests.deploy.fake_ray import Groups


@pytest.fixture
def groups(monkeypatch):
    found = Groups(a=4, b=2)
    found.stand_in(monkeypatch)
    return found


def worker(name, cpus=1):
    return Bundle(name, {"CPU": cpus} if cpus else {}, {})


async def node_of(held, name):
    standing = await held.standing(name)
    return standing and standing.node_id


async def test_room_is_reserved_for_all_and_stays_where_it_is(groups):
    held = Reservations("x")
    assert await held.reserve([worker("large", 3), worker("small", 2)]) == ""
    assert (await node_of(held, "large"), await node_of(held, "small")) == ("a", "b")
    assert groups.there == {"kvferry/x/large", "kvferry/x/small"}
    assert await held.reserve([worker("large", 3), worker("small", 2), worker("more")]) == ""
    assert (await node_of(held, "more"), len(groups.told)) == ("a", 3)


async def test_what_does_not_all_fit_reserves_nothing_and_is_said(groups):
    held = Reservations("x")
    assert "no node has room for w3" in await held.reserve([worker(f"w{k}", 2) for k in range(4)])
    assert not groups.there


async def test_what_somebody_else_takes_in_the_same_moment_costs_all_of_the_change_and_nothing_before_it(groups):
    held = Reservations("x")
    await held.reserve([worker("before")])
    groups.num_stolen = 1
    said = await held.reserve([worker("before"), worker("one", 1), worker("two", 2), worker("three", 2)])
    assert "taken by somebody else in the same moment: try again" in said
    assert groups.there == {"kvferry/x/before"}
    assert held.names == {"before"}


async def test_two_deployments_cannot_have_the_same_room(groups):
    one, two = Reservations("one"), Reservations("two")
    said = await asyncio.gather(*(held.reserve([worker(f"w{k}", 2) for k in range(2)]) for held in (one, two)))
    assert sum(not text for text in said) == 1
    assert len(groups.there) == 2


async def test_new_ones_get_what_is_free_and_wait_for_what_is_left_only_if_they_must(groups):
    held = Reservations("x")
    await held.reserve([worker("leaving", 4)])
    assert await held.reserve([worker("small", 2), worker("large", 3)]) == ""
    assert (await node_of(held, "small"), await node_of(held, "large")) == ("b", None)
    await held.give_up(["leaving"])
    assert await held.reserve([worker("small", 2), worker("large", 3)]) == ""
    assert (await node_of(held, "small"), await node_of(held, "large")) == ("b", "a")


async def test_a_lost_node_is_no_room_and_another_is_found(groups):
    held = Reservations("x")
    await held.reserve([worker("one", 1), worker("two", 2)])
    await held.give_up(["one"])
    lost = await node_of(held, "two")
    groups.lose(lost)
    assert await held.standing("two") is None
    assert await held.reserve([worker("two", 2)]) == ""
    assert await node_of(held, "two") == ({"a", "b"} - {lost}).pop()
    assert len(groups.there) == 1


async def test_as_many_as_can_be_get_room_and_the_first_ones_first(groups, monkeypatch):
    held, searches = Reservations("x"), []

    def searched(bundles, nodes):
        searches.append(bundles)
        return found(bundles, nodes)

    found = reservations.find_places
    monkeypatch.setattr(reservations, "find_places", searched)
    bundles = [*(worker(f"decode-{k}", 2) for k in range(30)), worker("prefill-1", 3), worker("prefill-2", 0)]
    assert "no node has room for" in await held.reserve_some(bundles)
    assert held.names == {"decode-0", "decode-1", "decode-2", "prefill-2"}
    assert len(searches) == 7, "of those that are alike and do not fit, one is tried"


async def test_one_that_does_not_fit_keeps_no_other_from_what_is_free(groups):
    """Nor is the room of one that runs, and is wanted, taken for room to come."""
    held = Reservations("x")
    await held.reserve([worker("prefill-1", 3)])
    groups.cpus["c"] = 3
    wanted = [worker("decode-1", 4), worker("prefill-1", 3), worker("prefill-2", 3)]
    assert "no node has room for decode-1" in await held.reserve_some(wanted)
    assert (await node_of(held, "prefill-1"), await node_of(held, "prefill-2")) == ("a", "c")
    assert held.names == {"prefill-1", "prefill-2"}


async def test_a_controller_that_comes_back_knows_what_it_had_and_removes_what_was_never_made(groups):
    await Reservations("x").reserve([worker("one", 3)])
    await Reservations("x/y").reserve([worker("one", 1)])
    groups.make([{"CPU": 4}], "kvferry/x/two", "detached", [{"ray.io/node-id": "a"}])
    held = Reservations("x")
    await held.adopt()
    assert (held.names, await node_of(held, "one")) == ({"one"}, "a")
    assert await held.reserve([worker("one", 3)]) == ""
    assert groups.there == {"kvferry/x/one", "kvferry/x/y/one"}
