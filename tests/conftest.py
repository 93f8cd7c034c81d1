"""Fixtures that several folders use."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from kvferry.config import home
from kvferry.engine.unpack import packaged_model_directory

PROCESS_FOLDERS = ("processes", "deploy")
"""Where `make test` looks for tests that start processes."""

ONE_AT_A_TIME = ("test_ray_", "test_object_store")
"""Modules that start a Ray: `auto` is the one that was begun last on this machine."""


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings.register_profile("same", deadline=None, derandomize=True, print_blob=True)
    settings.register_profile(
        "search", deadline=None, max_examples=1000
    )  # HYPOTHESIS_PROFILE=search: other cases each time
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("processes") and item.path.parent.name not in PROCESS_FOLDERS:
            raise pytest.UsageError(f"{item.path}: tests that start processes are in {PROCESS_FOLDERS}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` gives a module to one worker; those of ONE_AT_A_TIME go all to the same."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByModule(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = super()._split_scope(nodeid)
            return ONE_AT_A_TIME[0] if Path(module).name.startswith(ONE_AT_A_TIME) else module

    return ByModule(config, log)


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The packaged model; `make test` unpacks it first."""
    directory = packaged_model_directory(home())
    if not (directory / "config.json").is_file():
        pytest.fail("the packaged model is not unpacked: run `make test`, or `.venv/bin/kvferry model unpack`")
    return directory
