"""What a person sees of a deployment on a cluster: a line when a program reaches another state, a table, what starting it took."""

import json
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.cluster.client import Status, urls
from kvferry.shape import human_bytes


class SeatLines:
    """Writes a line whenever a program's state changes (shares of loading on a terminal only)."""

    def __init__(self, console: Console):
        self._console, self._shown = console, dict[str, tuple[str, ...]]()

    def __call__(self, status: Status) -> None:
        found = {one["name"]: self._text(one) for one in status["programs"]}
        for name in [*found, *(name for name in self._shown if name not in found)]:
            text, shown = found.get(name, ("gone", "")), self._shown.get(name, ("", ""))
            if text != shown and (name in found or shown[0] != "gone"):
                self._console.print(
                    f"  [bold]{name:<10}[/bold] {text[0]:<34} [dim]{text[1]}[/dim]", highlight=False, soft_wrap=True
                )
        self._shown = found

    def _text(self, one: dict[str, Any]) -> tuple[str, str]:
        state = one["state"]
        if state == "loading" and self._console.is_terminal:
            state = f"loading {one['share']:.0%}"
        if one["reason"]:
            state = f"{state}: {one['reason']}"
        return state, node_words(one)


def node_words(one: dict[str, Any]) -> str:
    node = one["node"]
    return f"{node['address']} node {node['node_id'][:8]} pid {node['pid']}" if node else ""


class Phases:
    """How long each part of a start took."""

    def __init__(self) -> None:
        self._last, self.taken_s = time.monotonic(), dict[str, float]()

    def done(self, what: str) -> None:
        now = time.monotonic()
        self.taken_s[what] = now - self._last
        self._last = now

    @property
    def words(self) -> str:
        return ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self.taken_s.items())


def memory_words(status: Status, ray_bytes: float) -> str:
    """Private bytes, by what has them; Ray's own on this machine only."""
    by_role: dict[str, float] = {}
    for one in status["programs"]:
        by_role[one["role"]] = by_role.get(one["role"], 0) + one["private_bytes"]
    by_role["controller"] = status["controller"]["private_bytes"]
    if ray_bytes:
        by_role["Ray itself"] = ray_bytes
    return ", ".join(f"{role} {human_bytes(count)}" for role, count in by_role.items())


def cluster_banner(status: Status, phases: Phases, ray_bytes: float, address: str) -> str:
    """Where it is, what it took, and lines to paste."""
    grpc = [one["details"]["grpc"] for one in status["programs"] if one["details"].get("grpc")]
    router = next(one["details"] for one in status["programs"] if one["role"] == "router")
    body = {"model": router["model"], "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    wanted, chat = status["wanted"], f"{urls(status)[0]}/v1/chat/completions"
    return "\n".join(
        [
            "",
            "kvferry is ready",
            f"  HTTP      {', '.join(f'{url}/v1' for url in urls(status))}      gRPC  {', '.join(grpc)}",
            f"  pools     {wanted['prefill']} prefill + {wanted['decode']} decode on {_num_nodes(status)} node(s) of Ray {address}",
            f"  start-up  {phases.words}",
            f"  memory    {memory_words(status, ray_bytes)}",
            "",
            f"  try       curl {chat} -H 'content-type: application/json' -d '{json.dumps(body)}'",
            f"            kvferry status --address {address}",
            "",
        ]
    )


def _num_nodes(status: Status) -> int:
    return len({one["node"].get("node_id") for one in status["programs"]})


def print_status(status: Status, as_json: bool) -> None:
    if as_json:
        print(json.dumps(status))
        return
    table = Table("program", "role", "state", "node", "address", "starts", "memory")
    for one in sorted(status["programs"], key=lambda one: (one["role"] != "router", one["name"])):
        address = one["details"].get("http") or one["details"].get("address", "")
        state = f"{one['state']}: {one['reason']}" if one["reason"] else one["state"]
        memory = human_bytes(one["private_bytes"])
        table.add_row(one["name"], one["role"], state, node_words(one), address, str(one["num_starts"]), memory)
    console = Console(highlight=False)
    console.print(table)
    wanted = status["wanted"]
    console.print(
        f"wanted: {wanted['prefill']} prefill + {wanted['decode']} decode; HTTP {', '.join(urls(status)) or 'not yet'}"
    )
