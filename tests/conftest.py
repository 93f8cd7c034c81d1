"""Fixtures that several folders use."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from kvferry.config import home
from kvferry.engine.unpack import packaged_model_directory


def pytest_configure() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings.register_profile("same", deadline=None, derandomize=True, print_blob=True)
    settings.register_profile(
        "search", deadline=None, max_examples=1000
    )  # HYPOTHESIS_PROFILE=search: other cases each time
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The packaged model; `make test` unpacks it first."""
    directory = packaged_model_directory(home())
    if not (directory / "config.json").is_file():
        pytest.fail("the packaged model is not unpacked: run `make test`, or `.venv/bin/kvferry model unpack`")
    return directory
