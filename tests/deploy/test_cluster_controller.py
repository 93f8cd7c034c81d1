"""The controller and all of its seats, with programs that are ready at once: in virtual time, without Ray."""

import asyncio
import contextlib

import pytest

from deploy.cluster.controller import Controller
from deploy.cluster.plan import plan_of
from kvferry.errors import ConfigurationError
from loadtest.virtual_time import run_virtual
from tests.deploy.fake_ray import FakeRay

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
