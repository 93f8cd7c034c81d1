"""An actor's own work: begun with the actor, and never lost silently."""

import asyncio
import logging
import os
from collections.abc import Coroutine
from typing import Any


def as_long_as_the_actor(work: Coroutine[Any, Any, None]) -> "asyncio.Future[None]":
    """To be kept. If it fails, so does the actor, and whoever wants it begins it anew.

    (An actor's call to itself would do, but is lost when Ray restarts an actor that `ray.kill` has ended.)
    """
    running = asyncio.ensure_future(work)
    running.add_done_callback(_end_with)
    return running


def _end_with(running: "asyncio.Future[None]") -> None:
    if running.cancelled() or (error := running.exception()) is None:
        return
    logging.getLogger("kvferry").critical("unexpected error", exc_info=error)
    logging.shutdown()
    os._exit(1)
