"""The controller and all of its seats, with programs that are ready at once: in virtual time, without Ray."""

import asyncio
import contextlib

import pytest
import ray
from ray.exceptions import RaySystemError

from deploy.cluster.actors import SILENCE_S
from deploy.cluster.controller import Controller
from deploy.cluster.plan import plan_of
from kvferry.errors import ConfigurationError, NoWorker
from loadtest.virtual_time import run_virtual
from tests.deploy.fake_ray import FakeProgram, FakeRay

PLAN = plan_of({"model": "", "prefill": {"count": 1}, "decode": {"count": 2}})


@pytest.fixture
def fake(monkeypatch):
    found = FakeRay(a=8)
    found.stand_in(monkeypatch)
    return found


@contextlib.asynccontextmanager
async def controlled():
    """A controller, until it is lost."""
    controller = Controller("x")
    try:
        yield controller
    finally:
        controller._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await controller._serving


async def status_when(controller, is_so):
    while not is_so(status := await controller.status()):
        await asyncio.sleep(0.1)
    return status


def all_ready(status):
    return all(one["is_ready"] for one in status["programs"])


def test_a_machine_that_joined_later_gets_no_program_that_listens_at_loopback_and_how_it_would_is_said(fake):
    async def main():
        async with controlled() as controller:
            await controller.apply(PLAN.model_dump())
            await status_when(controller, all_ready)
            fake.groups.cpus["b"] = 8
            await controller.scale(None, 6)
            await status_when(controller, all_ready)
            assert {one["bundles_to_node_id"][0] for one in fake.groups.told.values()} == {"a"}
            with pytest.raises(
                ConfigurationError, match=r"is not on a \(a\)\. .*Other machines than a \(a\) need TLS: `kvferry down`"
            ):
                await controller.scale(None, 7)

    run_virtual(main)


def test_down_ends_what_still_drains_and_its_room_also_when_the_controller_that_began_it_was_lost(fake):
    async def main():
        async with controlled() as lost:
            await lost.apply(PLAN.model_dump())
            await status_when(lost, all_ready)
            fake.actors["decode-2"].drain_s = 600
            await lost.scale(0, 1)
            await asyncio.sleep(1)
        fake.actors["decode-9"] = None  # somebody else's
        assert fake.actors.keys() == {"router-1", "decode-1", "decode-2", "decode-9"}
        async with controlled() as controller:
            await asyncio.sleep(1)
            async with asyncio.timeout(10):
                await controller.down()
            assert ("stop",) in fake.killed[-1].told
        assert fake.actors.keys() == {"decode-9"}
        assert not fake.groups.there
        assert not fake.store

    run_virtual(main)


def test_down_again_ends_what_runs_on_when_the_controller_was_lost_in_the_middle_of_it(fake):
    async def main():
        async with controlled() as lost:
            await lost.apply(PLAN.model_dump())
            await status_when(lost, all_ready)
        for one in fake.actors.values():
            one.drain_s = 600
        fake.store.clear()
        fake.groups.make([{"CPU": 1}], "kvferry/x/decode-3", "detached", [{"ray.io/node-id": "a"}])
        async with controlled() as controller:
            await controller.down()
        assert not fake.actors
        assert not fake.groups.there
        assert all(("stop",) in one.told for one in fake.killed)

    run_virtual(main)


def test_a_program_that_drains_is_its_seats_once_it_is_wanted_again_and_keeps_no_other_from_ending(fake):
    async def main():
        async with controlled() as lost:
            await lost.apply(plan_of({"model": "", "prefill": {"count": 1}, "decode": {"count": 3}}).model_dump())
            await status_when(lost, all_ready)
            fake.actors["decode-2"].drain_s, fake.actors["decode-3"].drain_s = 100, 10
            await lost.scale(1, 1)
            await asyncio.sleep(1)
        again = fake.actors["decode-2"]
        async with controlled() as controller:
            await asyncio.sleep(1)
            await controller.scale(1, 2)
            await asyncio.sleep(20)
            assert "decode-3" not in fake.actors, "what is awaited of one is nothing to the other"
            await asyncio.sleep(200)
            assert fake.actors["decode-2"] is again, "it is not ended as nobody's"
            assert (await controller.status())["wanted"]["decode"] == 2
            assert {"kvferry/x/decode-1", "kvferry/x/decode-2"} < fake.groups.there
            assert "kvferry/x/decode-3" not in fake.groups.there

    run_virtual(main)


def test_a_program_of_nobody_that_hangs_is_ended_too(fake):
    async def main():
        fake.actors["decode-3"] = hung = FakeProgram("decode-3")
        hung._drain = asyncio.Event().wait
        async with controlled():
            await asyncio.sleep(2 * SILENCE_S + 1)
            assert "decode-3" not in fake.actors

    run_virtual(main)


def test_down_is_not_done_when_ray_does_not_say_what_still_runs(fake, monkeypatch):
    async def main():
        async with controlled() as controller:
            await controller.apply(PLAN.model_dump())
            await status_when(controller, all_ready)

            def fail(name, namespace):
                raise RaySystemError("its store is away")

            fake.actors["decode-7"] = left = FakeProgram("decode-7")
            with monkeypatch.context() as away:
                away.setattr(ray, "get_actor", fail)
                with pytest.raises(NoWorker, match=r"its store is away; try again"):
                    await controller.down()
            assert left not in fake.killed
            await controller.down()
            assert left in fake.killed

    run_virtual(main)
