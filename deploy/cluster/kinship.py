"""Which actors of a namespace are a deployment's own: those whose name and class are. Anybody may put others there."""

import re
from typing import Any

from kvferry.errors import ConfigurationError

PROGRAM_NAME = re.compile(r"(router|prefill|decode)-[0-9]+")


def has_program_name(name: str) -> bool:
    return PROGRAM_NAME.fullmatch(name) is not None


def is_of(actor: Any, kind: type) -> bool:
    """`actor` is a handle: Ray tells what its class was called where it was made. A Ray Client has to ask for that."""
    import ray
    from ray.util.client.common import ClientActorHandle

    def class_of(handle: Any) -> tuple[str, str]:
        made = handle._ray_actor_creation_function_descriptor  # there is no public one that needs no dashboard
        return made.module_name, made.class_name

    if isinstance(actor, ClientActorHandle):
        asked: Any = ray.remote(num_cpus=0)(class_of)
        made = ray.get(asked.remote(actor))
    else:
        made = class_of(actor)
    return made == (kind.__module__, kind.__qualname__)


def check_is_of(actor: Any, kind: type, name: str, namespace: str) -> None:
    """Raises ConfigurationError: what is not ours is neither used nor ended."""
    if not is_of(actor, kind):
        raise ConfigurationError(
            f"an actor {name!r} that is not kvferry's is in namespace {namespace}: end it, or use another with --namespace"
        )
