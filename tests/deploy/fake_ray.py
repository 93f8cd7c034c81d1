"""Stand-ins for Ray, as it behaves: groups with room, and a controller's world of programs. For tests in virtual time."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

import kvferry
from deploy.cluster import actors, client, controller, reservations
from deploy.cluster.nodes import ClusterNode
from deploy.cluster.program import digest_of
from deploy.cluster.seat import Seat
from kvferry.bell import Bell


class Groups:
    """Nodes with CPUs, and placement groups on them. `num_stolen`: CPUs of each that somebody takes before we can."""

    def __init__(self, **cpus):
        self.cpus, self.told, self.num_stolen = dict(cpus), dict[str, dict](), 0

    def nodes(self):
        return [
            ClusterNode(name, name, name, {}, {"CPU": total}, {"CPU": total - self.taken(name)})
            for name, total in self.cpus.items()
        ]

    def taken(self, name):
        there = (
            one for one in self.told.values() if one["state"] == "CREATED" and one["bundles_to_node_id"][0] == name
        )
        return sum(one["bundles"][0].get("CPU", 0) for one in there)

    def make(self, bundles, name, lifetime, bundle_label_selector):
        assert lifetime == "detached"
        ((node_id,),) = (one.values() for one in bundle_label_selector)
        fits = bundles[0].get("CPU", 0) <= self.cpus[node_id] - self.taken(node_id) - self.num_stolen
        group_id = f"{len(self.told) + 1:036x}"
        self.told[group_id] = {
            "name": name,
            "state": "CREATED" if fits else "PENDING",
            "bundles": {0: bundles[0]},
            "bundles_to_node_id": {0: node_id if fits else ""},
        }
        return SimpleNamespace(id=ray.PlacementGroupID.from_hex(group_id), wait=lambda timeout_s: fits)

    def table(self, group=None):
        return self.told if group is None else self.told[group.id.hex()]

    def remove(self, group):
        self.told[group.id.hex()]["state"] = "REMOVED"

    def lose(self, node_id):
        del self.cpus[node_id]
        for one in self.told.values():
            if one["state"] == "CREATED" and one["bundles_to_node_id"][0] == node_id:
                one["state"], one["bundles_to_node_id"] = "RESCHEDULING", {0: ""}

    @property
    def there(self):
        return {one["name"] for one in self.told.values() if one["state"] != "REMOVED"}

    def stand_in(self, monkeypatch):
        monkeypatch.setattr(ray.util, "placement_group", self.make)
        monkeypatch.setattr(ray.util, "placement_group_table", self.table)
        monkeypatch.setattr(ray.util, "remove_placement_group", self.remove)
        monkeypatch.setattr(reservations, "cluster_nodes", self.nodes)


class FakeActor:
    """A handle: what is called runs as a task here, until it is killed."""

    def __init__(self, name):
        self.name, self.told, self.is_dead = name, [], False
        self._coming = dict[Future, asyncio.Task]()

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda *given: SimpleNamespace(future=lambda: self._call(method, given)))

    def _call(self, method, given):
        coming = Future()
        if self.is_dead:
            coming.set_exception(ActorDiedError())
            return coming
        self.told.append((method, *given))
        answering = self._coming[coming] = asyncio.ensure_future(self._answer(method, given))
        answering.add_done_callback(lambda done: self._tell(coming, done))
        return coming

    def _tell(self, coming, done):
        if coming.done():
            return
        if done.cancelled():
            coming.set_exception(ActorDiedError())
        elif (error := done.exception()) is not None:
            is_lost = isinstance(error, RayActorError)
            coming.set_exception(error if is_lost else RayTaskError("", "", error))
        else:
            coming.set_result(done.result())

    def kill(self):
        self.is_dead = True
        for answering in self._coming.values():
            answering.cancel()


class FakeProgram(FakeActor):
    """Is ready after `begin_s`, and drains for `drain_s`."""

    def __init__(self, name, secret=""):
        super().__init__(name)
        self.secret, self.is_refused = secret, False
        self.begin_s, self.drain_s, self.stop_s = 0.0, 0.0, 0.0
        self.said = {"version": 1, "order": 0, "role": "", "state": "idle", "share": 0.0, "details": {}, "code": None}
        self._bell = Bell()

    def _answer(self, method, given):
        return getattr(self, f"_{method}")(*given)

    def say(self, **said):
        self.said |= {**said, "version": self.said["version"] + 1}
        self._bell.ring()

    async def _where(self):
        digest = digest_of(self.secret)
        return {"version": kvferry.__version__, "address": "a", "host": "", "node_id": "a", "secret_digest": digest}

    async def _begin(self, role, arguments, previous_end):
        if self.is_refused:
            raise RayActorError()
        order, state = self.said["order"] + 1, "listening" if role == "router" else "ready"
        details = (
            dict.fromkeys(("http", "grpc", "registry"), "127.0.0.1:8000")
            if role == "router"
            else {"address": "127.0.0.1:1"}
        )
        self.say(order=order, role=role, state="loading", share=0.0, details=details, code=None)
        asyncio.get_running_loop().call_later(self.begin_s, lambda: self.say(state=state))
        return order

    async def _drain(self):
        self.say(state="draining")
        asyncio.get_running_loop().call_later(self.drain_s, lambda: self.say(code=0))
        return True

    async def _stop(self):
        await asyncio.sleep(self.stop_s)
        self.say(code=0)
        return True

    async def _report(self, version):
        if self.said["version"] <= version:
            await self._bell.wait(5)
        return {**self.said, "private_bytes": 1}


class FakeController(FakeActor):
    """`lost`: how its creation failed."""

    def __init__(self, version=kvferry.__version__, lost=None):
        super().__init__("controller")
        self.itself, self._version, self._lost = controller.Controller("x"), version, lost

    async def _answer(self, method, given):
        if self._lost is not None:
            raise self._lost
        return self._version if method == "version" else await getattr(self.itself, method)(*given)

    def kill(self):
        super().kill()
        self.itself._serving.cancel()


class FakeRay:
    """One namespace: its key-value store, its groups, and its actors by name."""

    def __init__(self, **cpus):
        self.next_controller: FakeController | None = None
        self.begin_s, self.refused = dict[str, float](), set[str]()
        self.groups, self.store, self.actors, self.killed = (
            Groups(**cpus),
            dict[bytes, bytes](),
            dict[str, FakeProgram](),
            [],
        )

    def stand_in(self, monkeypatch):
        async def inline(function, *given, **more):
            return function(*given, **more)

        self.groups.stand_in(monkeypatch)
        monkeypatch.setattr(asyncio, "to_thread", inline)
        monkeypatch.setattr(controller, "cluster_nodes", self.groups.nodes)
        monkeypatch.setattr(controller, "as_long_as_the_actor", asyncio.ensure_future)
        monkeypatch.setattr(controller.process, "set_up_logs", lambda level, name: None)
        monkeypatch.setattr(controller, "_internal_kv_get", lambda key, namespace: self.store.get(key))
        monkeypatch.setattr(
            controller, "_internal_kv_put", lambda key, text, again, namespace: self.store.update({key: text})
        )
        monkeypatch.setattr(controller, "_internal_kv_del", lambda key, namespace: self.store.pop(key, None))
        monkeypatch.setattr(
            ray.util, "list_named_actors", lambda of_all: [{"name": name, "namespace": "x"} for name in self.actors]
        )
        monkeypatch.setattr(ray, "get_actor", self._get_actor)
        monkeypatch.setattr(ray, "kill", self.kill)
        monkeypatch.setattr(ray, "remote", lambda kind: SimpleNamespace(options=self._create))
        monkeypatch.setattr(client, "check_is_of", lambda *given: None)
        monkeypatch.setattr(ray, "get_runtime_context", self._context)
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "a")
        monkeypatch.setattr(actors, "is_of", lambda actor, kind: isinstance(actor, FakeProgram))
        monkeypatch.setattr(Seat, "_find_or_create", lambda seat, room: self._find_or_create(seat))

    def _find_or_create(self, seat):
        made = self.actors.setdefault(seat.name, FakeProgram(seat.name, seat._around.secret))
        made.begin_s, made.is_refused = self.begin_s.get(seat.name, 0), seat.name in self.refused
        return made

    def _context(self):
        return SimpleNamespace(get_node_id=lambda: "a", current_actor=self.actors.get("controller"))

    def _create(self, name, namespace, lifetime, get_if_exists, num_cpus, max_restarts):
        assert (lifetime, get_if_exists, max_restarts) == ("detached", True, -1)
        return SimpleNamespace(remote=lambda of: self.actors.setdefault(name, self.next_controller or FakeController()))

    def _get_actor(self, name, namespace):
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def kill(self, actor):
        self.killed.append(actor)
        if self.actors.get(actor.name) is actor:
            del self.actors[actor.name]
        actor.kill()
