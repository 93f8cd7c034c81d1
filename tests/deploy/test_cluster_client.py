"""Commands against a controller and its programs: in virtual time, without Ray."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

import kvferry
from deploy.cluster.client import PATIENCE_S, ClusterClient, is_ready
from deploy.cluster.plan import plan_of
from deploy.cluster.session import until_serving
from kvferry.errors import ConfigurationError, NoWorker
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


def test_weights_may_come_as_slowly_as_they_will_as_long_as_they_come(fake):
    async def main():
        fake.begin_s["decode-1"] = 10_000
        up = asyncio.ensure_future(client_of(fake).up(PLAN))
        await asyncio.sleep(1)
        for percent in range(20):
            fake.actors["decode-1"].say(share=percent / 100)
            await asyncio.sleep(PATIENCE_S - 20)
            assert not up.done(), await up
        began = asyncio.get_running_loop().time()
        with pytest.raises(ConfigurationError, match="no news for 330 s: decode-1 is loading"):
            await up
        assert asyncio.get_running_loop().time() - began < 100
        assert not names(fake)

    run_virtual(main, limit_s=10_000)


def test_one_that_begins_again_and_again_is_no_news(fake):
    async def main():
        fake.begin_s["decode-1"] = 10_000
        up = asyncio.ensure_future(client_of(fake).up(PLAN))
        while not up.done():
            await asyncio.sleep(20)
            if "decode-1" in fake.actors:
                fake.actors["decode-1"].say(share=0.5)
                await asyncio.sleep(1)
                fake.kill(fake.actors["decode-1"])
        with pytest.raises(ConfigurationError, match="no news for 330 s: decode-1 is "):
            await up

    run_virtual(main, limit_s=600)


def test_a_program_that_drains_is_waited_for_as_long_as_it_may(fake):
    async def main():
        client = client_of(fake)
        await client.up(PLAN.model_copy(update={"grace_s": 1000.0}))
        fake.actors["decode-2"].drain_s = 1000
        status = await client.scale(None, 1)
        assert {one["name"] for one in status["programs"]} == {"router-1", "prefill-1", "decode-1"}
        await client.down()

    run_virtual(main)


def test_a_program_that_could_not_begin_fails_the_command_that_it_concerns_and_no_other(fake):
    async def main():
        client = client_of(fake)
        await client.up(PLAN)
        fake.refused = {"decode-3"}
        with pytest.raises(ConfigurationError, match="decode-3: actor lost"):
            await client.scale(None, 3)
        assert (await client.scale(2, None))["wanted"] == {"prefill": 2, "decode": 3}
        await client.change_role("prefill-2", "decode")
        await client.drain("prefill-2")
        with pytest.raises(ConfigurationError, match="decode-3: actor lost"):
            await client.scale(None, None)
        assert (await client.drain("decode-3"))["wanted"] == {"prefill": 1, "decode": 2}
        await client.down()

    run_virtual(main)


def test_who_waits_hears_that_another_has_ended_the_deployment(fake):
    async def main():
        fake.begin_s["decode-1"] = 10_000
        up = asyncio.ensure_future(client_of(fake).up(PLAN))
        await asyncio.sleep(1)
        await client_of(fake).down()
        with pytest.raises(ConfigurationError, match="the deployment was ended meanwhile"):
            await up

    run_virtual(main)


def test_one_that_failed_and_leaves_is_no_failure_of_the_command_that_removes_it(fake):
    async def main():
        client = client_of(fake)
        leaving = {
            "name": "decode-3",
            "role": "decode",
            "state": "waiting",
            "share": 0.0,
            "reason": "",
            "is_ready": False,
        }
        leaving |= {"has_failed": True, "previous_end": "code 2", "is_leaving": True}
        said = [[leaving], []]

        async def status(known_version):
            return {"version": 1, "is_wanted": True, "wanted": {"prefill": 0, "decode": 0}, "programs": said.pop(0)}

        client.status = status
        await client.until(is_ready)
        leaving["is_leaving"], said = False, [[leaving]]
        with pytest.raises(ConfigurationError, match="decode-3: code 2"):
            await client.until(is_ready)

    run_virtual(main)


def test_a_controller_of_another_version_is_named_with_its_node_and_stays_only_if_something_is_wanted_of_it(fake):
    async def main():
        for is_used in (False, True):
            fake.next_controller = FakeController(version="0.0.1")
            if is_used:
                await fake.next_controller.itself.apply(PLAN.model_dump())
            with pytest.raises(
                ConfigurationError, match=r"on node a, runs kvferry 0\.0\.1\. Install kvferry .* on all nodes"
            ):
                await ClusterClient("x").find_or_start()
            assert ("controller" in names(fake)) is is_used
        await client_of(fake).down()

    run_virtual(main)


def test_a_node_that_lacks_kvferry_is_named_and_nobody_is_told_to_try_again(fake):
    async def main():
        where = "\x1b[36mray::controller:Controller.__init__()\x1b[39m (pid=7, ip=10.0.0.7, actor_id=1)"
        failed = RayTaskError(
            "ray::Controller", f"{where}\n  File one\nModuleNotFoundError: No module named 'deploy'", None
        )
        fake.next_controller = FakeController(lost=ActorDiedError(failed))
        with pytest.raises(ConfigurationError) as caught:
            await ClusterClient("x").find_or_start()
        assert caught.value.message == (
            "the controller could not begin: ModuleNotFoundError: No module named 'deploy' (on node 10.0.0.7). "
            f"Install kvferry {kvferry.__version__}, as it is here, on all nodes"
        )
        fake.actors["controller"] = FakeController(lost=ActorDiedError())
        with pytest.raises(NoWorker, match="try again"):
            await ClusterClient("x").find_or_start()

    run_virtual(main)


def test_down_shows_what_goes_until_nothing_is_left(fake):
    async def main():
        client = client_of(fake)
        await client.up(PLAN)
        shown = list[set[str]]()
        client._on_status = lambda status: shown.append(
            {one["name"] for one in status["programs"] if one["is_leaving"]}
        )
        fake.actors["decode-1"].stop_s = 2
        await client.down()
        assert {"router-1", "prefill-1", "decode-1", "decode-2"} in shown
        assert {"decode-1"} in shown
        assert shown[-1] == set()

    run_virtual(main)


async def test_a_deployment_whose_router_cannot_be_reached_from_here_is_not_said_to_be_gone():
    with pytest.raises(
        ConfigurationError, match="the deployment stays: `kvferry status` shows it, `kvferry down` ends it"
    ):
        await until_serving({"programs": [{"details": {"http": "127.0.0.1:1"}}]})
