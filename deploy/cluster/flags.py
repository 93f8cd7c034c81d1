"""The plan that `kvferry up --on ray` means: its deployment file, and the flags that were given, which count more."""

from pathlib import Path
from typing import Any

import psutil

from deploy.cluster.plan import ClusterPlan, plan_of, read_plan
from kvferry.shape import cpu_kv, pool_tokens, read_checkpoint_shape

SETTINGS = ("kv_tokens", "weights", "kv", "device", "transport", "engine", "sim_shape", "sim_accelerator")
"""Flags that are settings of both kinds of worker."""


def plan_from_flags(deployment: Path | None, given: dict[str, Any], is_here: bool) -> ClusterPlan:
    """`given`: flags by name. `is_here`: all of it will share this machine's memory. Raises ConfigurationError."""
    content = (read_plan(deployment) if deployment else ClusterPlan()).model_dump()
    for role in ("prefill", "decode"):
        if role in given:
            content[role]["count"] = given[role]
    if given.get("model"):
        content["model"] = str(Path(given["model"]).absolute())
    if "port" in given:
        port = given["port"]
        ports = {"port": port, "grpc_port": port + 1 if port else 0, "registry_port": port + 2 if port else 0}
        content["router"] |= ports
    content["settings"] |= {name: given[name] for name in SETTINGS if name in given and given[name] != 0}
    plan = plan_of(content)
    for role in ("prefill", "decode") if is_here and plan.model else ():
        said = {**plan.settings, **plan.pool(role).settings}
        is_told = "kv_tokens" in said or said.get("engine") == "sim" or said.get("device", "cpu") != "cpu"
        if not is_told:  # a worker on a device asks it how many tokens it holds
            content[role]["settings"]["kv_tokens"] = _tokens_here(plan, str(said.get("kv", "auto")))
    return plan_of(content)


def _tokens_here(plan: ClusterPlan, kv: str) -> int:
    """Of each worker on the CPU; those on a device have as much of the host's memory, for their pools' mirrors."""
    available = psutil.virtual_memory().available
    num_workers = plan.prefill.count + plan.decode.count
    return pool_tokens(read_checkpoint_shape(Path(plan.model)), available, num_workers, cpu_kv(kv))
