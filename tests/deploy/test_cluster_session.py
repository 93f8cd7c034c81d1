"""What the cluster's subcommands work out before they call anybody."""

import asyncio

import pytest

from deploy.cluster import session
from deploy.cluster.plan import plan_of
from kvferry.errors import NoWorker


@pytest.mark.parametrize(("num_cores", "num_cpus"), [(64, 64), (2, 4), (1, 4)])
def test_a_ray_of_this_machine_has_its_cores_for_scale_to_use_and_what_the_plan_needs(monkeypatch, num_cores, num_cpus):
    monkeypatch.setattr(session, "num_cores", lambda: num_cores)
    plan = plan_of({"router": {"cpus": 0.5}, "prefill": {"count": 1}, "decode": {"count": 2}})
    assert session.num_cpus_here(plan) == num_cpus


def test_load_on_a_deployment_whose_router_begins_again_says_so(monkeypatch):
    class Client:
        def __init__(self, namespace):
            self.find = self.status

        async def status(self):
            return {"programs": [{"details": {}}, {"details": {"fetch": "127.0.0.1:9"}}]}

    monkeypatch.setattr(session, "ClusterClient", Client)
    with pytest.raises(NoWorker, match="no router listens"):
        asyncio.run(session._urls_there("kvferry"))
