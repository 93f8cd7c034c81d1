"""Which kind of deployment a plan asks for."""

from collections.abc import Callable

from deploy.local import Child, LocalDeployment, LocalPlan, same_for_both
from deploy.one_process import OneProcessDeployment
from deploy.ray_local import RayDeployment

BY_TRANSPORT = {"ray": RayDeployment, "inproc": OneProcessDeployment}
"""All others: processes."""


def deployment_of(plan: LocalPlan, on_change: Callable[[Child], None] = lambda child: None) -> LocalDeployment:
    """Raises ConfigurationError."""
    return BY_TRANSPORT.get(same_for_both(plan.config, "transport", plan.transport), LocalDeployment)(plan, on_change)
