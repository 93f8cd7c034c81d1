"""Commands against a controller and its programs: in virtual time, without Ray."""

import asyncio

import pytest

from deploy.cluster.client import ClusterClient
from deploy.cluster.plan import plan_of
from kvferry.errors import ConfigurationError
from loadtest.virtual_time import run_virtual
from tests.deploy.fake_ray import FakeController, FakeRay

PLAN = plan_of({"prefill": {"count": 1}, "decode": {"count": 2}})


@pytest.fixture
def fake(monkeypatch):
    found = FakeRay(a=8)
    found.stand_in(monkeypatch)
    return found


def client_of(fake):
    """Connected to the controller that is there; else it begins."""
    client = ClusterClient("x")
    if "controller" not in fake.actors:
        fake.actors["controller"] = FakeController()
    client._controller = fake.actors["controller"]
    return client


def names(fake):
    return set(fake.actors)


def test_of_two_that_begin_the_same_at_once_the_one_that_fails_does_not_end_what_the_other_began(fake):
    async def main():
        other = PLAN.model_copy(update={"router": PLAN.router.model_copy(update={"port": 9000})})
        winner, loser = client_of(fake), client_of(fake)
        status, said = await asyncio.gather(winner.up(PLAN), loser.up(other), return_exceptions=True)
        assert "router.port is 8000 there and 9000 here" in said.message
        assert status["wanted"] == {"prefill": 1, "decode": 2}
        assert names(fake) == {"controller", "router-1", "prefill-1", "decode-1", "decode-2"}
        await winner.down()
        assert not names(fake)

    run_virtual(main)


def test_what_an_up_began_it_ends_when_it_is_interrupted_also_before_it_hears_that_it_did(fake):
    async def main():
        for pause_s in (0.0, 0.001, 1.0):
            for one in ("router-1", "decode-1"):
                fake.begin_s[one] = 60
            up = asyncio.ensure_future(client_of(fake).up(PLAN))
            await asyncio.sleep(pause_s)
            up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await up
            assert not names(fake)
            assert not fake.groups.there

    run_virtual(main)


def test_what_cannot_be_leaves_no_controller_unless_another_has_use_for_it(fake):
    async def main():
        large = plan_of({"prefill": {"count": 1}, "decode": {"count": 9}})
        with pytest.raises(ConfigurationError, match="no node has room"):
            await client_of(fake).up(large)
        assert not names(fake)
        refused, granted = client_of(fake), client_of(fake)
        said, status = await asyncio.gather(refused.up(large), granted.up(PLAN), return_exceptions=True)
        assert "no node has room" in said.message
        assert status["wanted"] == {"prefill": 1, "decode": 2}
        assert await granted.status()
        await granted.down()

    run_virtual(main)
