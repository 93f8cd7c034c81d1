"""Prefill workers that are lost in a step, in virtual time: whom it is held against, and what it costs the others."""

import asyncio
from dataclasses import replace

import pytest

from kvferry.errors import EngineFailure, InvalidRequest
from kvferry.messages import Role, Sampling
from loadtest.virtual_time import run_virtual
from router.live import Live, LiveState, wait_all
from router.request import GenerationRequest
from router.suspicion import MAX_UNCLEAR, RETURN_S
from tests.cluster import Cluster, cluster
from tests.hand_off import prompt_of, tokens_of
from tests.in_process import Node, limits_of
from tests.killers import CHAIN_KILLER, HangingExecutor, Mortal
from tests.router_schedules import wanted
from tests.test_cases_router import now, until

SLOW = {"base_s": 0.05}


def asked(seed: object, length: int = 100, max_tokens: int = 20) -> GenerationRequest:
    return GenerationRequest(tuple(prompt_of(length, seed)), Sampling(hash(str(seed)) % 1000, max_tokens, 1.0))


def check(lives: list[Live]) -> None:
    for live in lives:
        assert live.state is LiveState.FINISHED, live.error
        assert tokens_of(live) == wanted(live.request, 0).tokens


class Company:
    """New innocents all the time, whose prompts are computed beside whatever else is."""

    def __init__(self, made: Cluster, every_s: float = 0.05):
        self.lives: list[Live] = []
        self.fewest = len(made.routers[0].members.of(Role.PREFILL))
        """Prefill workers that were there at any time."""
        self._made = made
        self._task = made.group.create_task(self._come(every_s))

    async def _come(self, every_s: float) -> None:
        router = self._made.routers[0]
        while True:
            self.lives.append(router.dispatcher.submit(asked(("innocent", len(self.lives)))))
            for _ in range(10):
                await asyncio.sleep(every_s / 10)
                ready = [member for member in router.members.of(Role.PREFILL) if member.state == "ready"]
                self.fewest = min(self.fewest, len(ready))

    async def leave(self) -> list[Live]:
        self._task.cancel()
        await wait_all(self.lives)
        return self.lives


def hang(node: Node) -> None:
    node.executor = node.worker.loop._executor = HangingExecutor(node.engine.runner)  # type: ignore[union-attr]


@pytest.mark.parametrize(("num_prefill", "back_s"), [(2, 1.0), (3, 1.0), (5, 1.0)])
def test_a_prompt_that_kills_prefill_workers_is_found_out_before_it_has_taken_the_pool(num_prefill, back_s):
    """It is blamed for the steps that its blocks were in, and nobody else is refused."""

    async def main() -> None:
        async with cluster(1, limits_of(0)) as made:
            mortal = Mortal(made, *(f"p{k}" for k in range(num_prefill)), back_s=back_s)
            for name in ("d1", "d2", "d3"):
                made.start(name)
            await made.ready()
            dispatcher, company = made.routers[0].dispatcher, Company(made)
            await asyncio.sleep(0.3)
            killer = dispatcher.submit(CHAIN_KILLER)
            with pytest.raises(EngineFailure, match="killed the worker that it ran on"):
                await wait_all([killer])
            assert company.fewest >= 1
            assert mortal.num_deaths <= min(MAX_UNCLEAR + 1, num_prefill - 1) + 1, "until it waits, and once apart"
            num_deaths = mortal.num_deaths
            for same in (CHAIN_KILLER, replace(CHAIN_KILLER, sampling=replace(CHAIN_KILLER.sampling, seed=5))):
                with pytest.raises(InvalidRequest, match="refused"):
                    dispatcher.submit(same)
            await asyncio.sleep(2)
            check(await company.leave())
            assert mortal.num_deaths == num_deaths
            assert dispatcher.counters["retries_refused"] == 0
            await made.ready()
            await made.quiet()

    run_virtual(main)


def test_where_there_is_one_prefill_worker_what_kills_it_is_computed_where_it_decodes():
    """Once: it does not meet the one that has come back."""

    async def main() -> None:
        async with cluster(1, limits_of(0)) as made:
            mortal = Mortal(made, "p1")
            made.start("d1")
            await made.ready()
            killer = made.routers[0].dispatcher.submit(CHAIN_KILLER)
            await wait_all([killer])
            check([killer])
            assert mortal.num_deaths == 1
            await made.ready()
            await made.quiet()

    run_virtual(main)


def test_many_of_one_kind_are_all_blamed_for_the_step_that_they_shared():
    """They come from several decode workers, and some wait there for another's fetch, or for room."""

    async def main() -> None:
        async with cluster(1, limits_of(0, policy="cost")) as made:
            mortal = Mortal(made, "p1", "p2", "p3", "p4", "p5", step=SLOW)
            for name in ("d1", "d2"):
                made.start(name, num_slots=25)
            await made.ready()
            dispatcher, company = made.routers[0].dispatcher, Company(made)
            killers = []
            for seed in range(12):
                killers.append(dispatcher.submit(replace(CHAIN_KILLER, sampling=Sampling(seed, 8, 1.0))))
            await until(lambda: all(live.has_ended for live in killers), 200)
            assert {type(live.error) for live in killers} <= {EngineFailure, type(None)}
            assert mortal.num_deaths < len(killers)
            check(await company.leave())
            await made.ready()
            await asyncio.sleep(5)
            await made.quiet()

    run_virtual(main)


def test_a_prompt_that_hangs_prefill_workers_leaves_one_of_them():
    async def main() -> None:
        async with cluster(1, limits_of(0)) as made:
            for name in ("p1", "p2", "p3", "d1", "d2"):
                node = made.start(name)
                if name.startswith("p"):
                    hang(node)
            await made.ready()
            dispatcher, company = made.routers[0].dispatcher, Company(made, 1.0)
            killer = dispatcher.submit(CHAIN_KILLER)
            await wait_all([killer])
            check([killer])
            assert company.fewest >= 1
            check(await company.leave())
            await made.stop()

    run_virtual(main)


def test_who_is_in_the_step_that_its_prefill_worker_dies_in_is_accused_and_who_waits_beside_it_is_not():
    async def main() -> None:
        async with cluster(1, limits_of(0)) as made:
            for name in ("p1", "d1"):
                made.start(name)
            await made.ready()
            dispatcher = made.routers[0].dispatcher
            made.nodes["p1"].executor.hang.clear()
            first = dispatcher.submit(asked("first"))
            await until(lambda: chunks_of(made.nodes["p1"]))
            second = dispatcher.submit(asked("second"))
            await asyncio.sleep(0.5)
            await made.kill("p1")
            await until(lambda: dispatcher.counters["source_losses"])
            assert first.suspicion.is_open
            await wait_all([second])
            assert not second.suspicion.last
            await wait_all([first])
            check([first, second])
            assert not first.suspicion.is_open, "a token clears"
            await made.quiet()

    run_virtual(main)


def chunks_of(node: Node) -> list[int]:
    chains = node.worker._scheduler._chains.values()  # type: ignore[union-attr]
    return [chain.num_missing_tokens for chain in chains if getattr(chain, "is_in_step", False)]


def test_prefill_workers_killed_from_outside_are_held_against_nobody():
    async def main() -> None:
        async with cluster(1, limits_of(0)) as made:
            for name in ("p1", "p2", "d1", "d2"):
                made.start(name, step=SLOW)
            await made.ready()
            router = made.routers[0]
            company = Company(made, 0.3)
            for life in range(2, 10):
                victim = f"p{life % 2 + 1}"
                await until(lambda victim=victim: chunks_of(made.nodes[victim]))
                await made.kill(victim)
                await asyncio.sleep(1.0)
                made.start(victim, life, previous_end="signal 9", step=SLOW)
                await made.ready()
                assert not any(member.is_alone for member in router.members)
            lives = await company.leave()
            check(lives)
            assert router.dispatcher.counters["source_losses"] >= 8
            assert max(live.instants_s["first_token"] for live in lives) < RETURN_S
            await made.quiet()

    run_virtual(main)


def test_a_prefill_worker_that_drains_or_is_still_there_accuses_nobody():
    """Its end is what was asked for; a line between two workers that breaks is nobody's fault."""

    async def main() -> None:
        async with cluster(1, limits_of(0)) as made:
            for name in ("p1", "d1"):
                made.start(name, step=SLOW)
            await made.ready()
            dispatcher = made.routers[0].dispatcher
            for what in ("drain", "cut"):
                live = dispatcher.submit(asked(what, 300))
                await until(lambda: chunks_of(made.nodes["p1"]))
                if what == "drain":
                    made.nodes["p1"].worker.body.is_draining = True
                    await asyncio.sleep(0.15)
                    assert chunks_of(made.nodes["p1"])
                    await made.kill("p1")
                else:
                    for link in [link for link in made.network.links if link.address == "p1"]:
                        link.client.close()
                await until(lambda what=what: dispatcher.counters["source_losses"] == 1 + (what == "cut"))
                if what == "drain":
                    assert not live.suspicion.is_open
                await wait_all([live])
                check([live])
                assert not live.suspicion.is_suspect(now() + 60)
                if what == "drain":
                    made.start("p1", 2, step=SLOW)
                    await made.ready()
            await made.quiet()

    run_virtual(main)


def test_a_suspect_is_alone_in_its_steps_at_a_prefill_worker():
    async def main() -> None:
        async with cluster(1, limits_of(0)) as made:
            mortal = Mortal(made, "p1", "p2", "p3", step=SLOW)
            for name in ("d1", "d2", "d3"):
                made.start(name)
            shared: list[int] = []
            await made.ready()
            company = Company(made)
            killer = made.routers[0].dispatcher.submit(CHAIN_KILLER)
            die = mortal._die

            def noted(name: str) -> None:
                shared.append(sum(chunk > 0 for chunk in chunks_of(made.nodes[name])))
                die(name)

            mortal._die = noted  # type: ignore[method-assign]
            with pytest.raises(EngineFailure):
                await wait_all([killer])
            assert shared[-1] == 1
            check(await company.leave())

    run_virtual(main)
