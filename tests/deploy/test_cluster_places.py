"""Where what is wanted goes, and what is said when it cannot: without Ray."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.cluster import places
from deploy.cluster.places import find_places
from deploy.cluster.room import Bundle, NodeRoom, selects, why_not


def shortage(bundles, nodes):
    return find_places(bundles, nodes).lacking


def node(name, cpus=4.0, gpus=0.0, **labels):
    return NodeRoom(name, name, labels, {"CPU": cpus, "GPU": gpus})


def worker(name, cpus=1.0, gpus=0.0, node_id="", **labels):
    return Bundle(name, {"CPU": cpus, "GPU": gpus}, labels, node_id)


def test_all_that_fits_fits():
    assert shortage([worker(f"w{k}") for k in range(8)], [node("a"), node("b")]) == ""
    assert shortage([worker("small", 1), worker("large", 4)], [node("a", 4), node("b", 1)]) == ""


def test_what_is_missing_is_said_for_each_node():
    text = shortage(
        [worker("decode-1", 2, 1, kind="fast")], [node("a", 8), node("b", 1, 4, kind="fast"), node("c", kind="slow")]
    )
    assert "decode-1" in text
    assert "2 CPU, 1 GPU on a node with kind=fast" in text
    assert "a has no label kind; b has 1 CPU left; c label kind is 'slow'" in text


def test_what_runs_already_keeps_its_place():
    running = [worker("here", 3, node_id="a")]
    assert shortage([*running, worker("new", 2)], [node("a", 4)])
    assert not shortage([*running, worker("new", 1)], [node("a", 4)])


def test_a_node_that_is_gone_frees_nobody_from_needing_another():
    assert "lost" in shortage([worker("lost", node_id="gone")], [node("a", 0.5)])
    assert not shortage([worker("lost", node_id="gone")], [node("a")])


def test_no_node_at_all_is_said():
    assert "there is no node" in shortage([worker("any")], [])


@pytest.mark.parametrize(
    ("wanted", "found", "is_selected"),
    [("x", "x", True), ("x", "y", False), ("x", None, False), ("!x", "y", True), ("!x", "x", False), ("!x", None, True),
     ("in(x, y)", "y", True), ("in(x,y)", "z", False), ("!in(x, y)", "z", True), ("!in(x, y)", "x", False)],
)  # fmt: skip
def test_label_selectors_are_rays(wanted, found, is_selected):
    assert selects(wanted, found) is is_selected


# ------------------------------------------------------------------------------------------- what fits is found, and followed


def test_large_ones_leave_each_other_room():
    found = find_places(
        [worker(f"w{cpus}{k}", cpus) for cpus in (3, 2) for k in range(2)], [node("a", 6), node("b", 4)]
    )
    assert found.node_ids == {"w30": "a", "w31": "a", "w20": "b", "w21": "b"}


def test_one_that_may_be_anywhere_leaves_the_only_labelled_node_free():
    bundles = [worker("prefill-1", 4), worker("decode-1", 4, disk="fast")]
    found = find_places(bundles, [node("a", 4, disk="fast"), node("b", 4)])
    assert found.node_ids == {"prefill-1": "b", "decode-1": "a"}


def test_workers_are_spread_where_they_can_be():
    bundles = [worker(f"{role}-{k}") for role in ("prefill", "decode") for k in (1, 2)]
    found = find_places(bundles, [node("a"), node("b", 8)]).node_ids
    assert found["prefill-1"] != found["prefill-2"]
    assert found["decode-1"] != found["decode-2"]


def test_those_that_have_a_place_are_not_moved():
    found = find_places([worker("here", 2, node_id="a"), worker("new", 3)], [node("a", 4), node("b", 4)])
    assert found.node_ids == {"new": "b"}


def test_those_that_must_be_apart_share_no_address_though_they_share_a_machine():
    nodes = [NodeRoom(name, name, {}, {"CPU": 4}, address) for name, address in (("a", "1"), ("b", "1"), ("c", "2"))]
    routers = [Bundle(f"router-{k}", {"CPU": 1}, {}, is_apart=True) for k in range(3)]
    found = find_places([*routers[:2], worker("w", 4)], nodes).node_ids
    assert {found["router-0"], found["router-1"]} in ({"a", "c"}, {"b", "c"})
    assert "a has another one, with which it cannot share an address; b has" in shortage(routers, nodes)
    there = Bundle("router-9", {"CPU": 1}, {}, node_id="c", is_apart=True)
    assert find_places([there, routers[0]], nodes).node_ids["router-0"] in ("a", "b")


def test_one_that_was_somewhere_is_there_again_if_it_can_be():
    nodes = [NodeRoom(name, name, {}, {"CPU": cpus}, name) for name, cpus in (("a", 8), ("b", 2), ("c", 8))]
    for cpus, place in ((2, "b"), (3, "a")):
        assert find_places([Bundle("router-1", {"CPU": cpus}, {}, near="b")], nodes).node_ids == {"router-1": place}


def test_a_hundred_nodes_and_three_hundred_workers_take_no_searching(monkeypatch):
    monkeypatch.setattr(places, "MAX_STEPS", 0)
    bundles = [worker(f"prefill-{k}", 3, kind="x") for k in range(100)] + [worker(f"decode-{k}", 2) for k in range(200)]
    found = find_places(bundles, [node(f"n{k}", 7, kind="x") for k in range(100)])
    assert len(found.node_ids) == 300


def test_what_would_take_for_ever_to_refuse_is_refused():
    """Of 41 threes, 40 fit, in more ways than can be tried."""
    bundles = [worker(f"w{k}", 3) for k in range(41)]
    assert "no node has room for w" in shortage(bundles, [node(f"n{k}", 6 + k / 100) for k in range(20)])


some_nodes = st.lists(
    st.builds(
        lambda cpus, gpus, label: ({"CPU": cpus, "GPU": gpus}, {"x": label} if label else {}),
        st.integers(0, 8), st.integers(0, 2), st.sampled_from(["", "p", "q"]),
    ), min_size=1, max_size=4,
)  # fmt: skip
some_bundles = st.lists(
    st.tuples(
        st.fixed_dictionaries({"CPU": st.integers(1, 6)}, optional={"GPU": st.integers(1, 2)}),
        st.sampled_from([{}, {}, {"x": "p"}, {"x": "!q"}]), st.sampled_from(["", "", "", "n0", "gone"]), st.booleans(),
    ), max_size=6,
)  # fmt: skip


@given(some_nodes, some_bundles)
def test_places_are_found_exactly_when_there_are_any(room, asked):
    nodes = [NodeRoom(f"n{k}", f"n{k}", labels, free) for k, (free, labels) in enumerate(room)]
    bundles = [Bundle(f"b{k}", *one) for k, one in enumerate(asked)]
    free = [one for one in bundles if one.node_id != "n0"]
    settled = [(one, nodes[0]) for one in bundles if one.node_id == "n0"]
    found = find_places(bundles, nodes)
    ways = (list(zip(free, way, strict=True)) for way in itertools.product(nodes, repeat=len(free)))
    assert (not found.lacking) == any(holds(settled, way, nodes) for way in ways)
    if not found.lacking:
        named = {one.node_id: one for one in nodes}
        assert set(found.node_ids) == {one.owner for one in free}
        assert holds(settled, [(one, named[found.node_ids[one.owner]]) for one in free], nodes)


def holds(settled, way, nodes):
    """All of them at once; what is settled is there, whether it fits or not."""
    left = {one.node_id: dict(one.free) for one in nodes}
    num_apart = dict.fromkeys(left, 0)

    def take(bundle, node):
        num_apart[node.node_id] += bundle.is_apart
        for name, amount in bundle.resources.items():
            left[node.node_id][name] = left[node.node_id].get(name, 0) - amount

    for bundle, there in settled:
        take(bundle, there)
    for bundle, there in way:
        if why_not(bundle, there, left[there.node_id]) or (bundle.is_apart and num_apart[there.node_id]):
            return False
        take(bundle, there)
    return True


def test_what_may_be_on_one_machine_only_is_on_that_one():
    nodes = [replace(node("a", 1), machine="m"), replace(node("b", 9), machine="n")]
    here = [replace(worker(name), machine="m") for name in ("one", "two")]
    assert find_places(here[:1], nodes).node_ids == {"one": "a"}
    text = shortage(here, nodes)
    assert "a has 0 CPU left; b is not on m." in text
    assert text.endswith("Other machines than m need TLS: `kvferry down`, then `kvferry up` with tls: in that file")
    assert "TLS" not in shortage(here, nodes[:1])
