"""What the cluster's subcommands work out before they call anybody."""

import pytest

from deploy.cluster import session
from deploy.cluster.plan import plan_of


@pytest.mark.parametrize(("num_cores", "num_cpus"), [(64, 64), (2, 4), (1, 4)])
def test_a_ray_of_this_machine_has_its_cores_for_scale_to_use_and_what_the_plan_needs(monkeypatch, num_cores, num_cpus):
    monkeypatch.setattr(session, "num_cores", lambda: num_cores)
    plan = plan_of({"router": {"cpus": 0.5}, "prefill": {"count": 1}, "decode": {"count": 2}})
    assert session.num_cpus_here(plan) == num_cpus
