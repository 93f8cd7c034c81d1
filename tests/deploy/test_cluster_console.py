"""What a person sees of a deployment on a cluster as it changes: without Ray."""

import io

from rich.console import Console

from deploy.cluster.console import SeatLines

NODE = {"address": "10.0.0.7", "node_id": "0123456789", "pid": 7}


def program(name, state, reason="", node=NODE):
    return {"name": name, "state": state, "reason": reason, "share": 0.5, "node": node}


def test_each_change_is_one_line_and_what_stays_is_none():
    said = io.StringIO()
    show = SeatLines(Console(file=said))
    for programs in (
        [program("router-1", "placing", node={}), program("decode-1", "loading")],
        [program("router-1", "placing", "no node has room"), program("decode-1", "loading")],
        [program("decode-1", "ready"), program("router-1", "gone")],
        [program("decode-1", "ready")],
        [],
    ):
        show({"programs": programs})
    assert [" ".join(line.split()) for line in said.getvalue().splitlines()] == [
        "router-1 placing",
        "decode-1 loading 10.0.0.7 node 01234567 pid 7",
        "router-1 placing: no node has room 10.0.0.7 node 01234567 pid 7",
        "decode-1 ready 10.0.0.7 node 01234567 pid 7",
        "router-1 gone 10.0.0.7 node 01234567 pid 7",
        "decode-1 gone",
    ]
