"""Where an address leads, what is said when it leads nowhere, and what a Ray Client lives through."""

import asyncio

import pytest

from deploy.cluster import client, connection
from kvferry.errors import ConfigurationError

FAR = "ray://head:10001"


@pytest.fixture
def told(monkeypatch):
    """What Ray would be told, instead of telling it; nobody listens anywhere."""
    told = list[dict]()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("_reach", "_greet", "show_token"):
        monkeypatch.setattr(connection, name, lambda *arguments: None)
    monkeypatch.setattr(connection, "_init", lambda **options: told.append(options))
    return told


@pytest.mark.parametrize(("address", "of_ray"), [(FAR, ""), ("auto", FAR), (FAR, "10.0.0.9:6379")])
def test_a_ray_client_is_one_by_its_address_or_by_that_of_the_environment(told, monkeypatch, address, of_ray):
    monkeypatch.setenv("RAY_ADDRESS", of_ray)
    connection.connect(address, "kvferry", needs_node=False)
    assert told == [{"address": FAR, "namespace": "kvferry"}]
    with pytest.raises(ConfigurationError, match=r"Run it on a node, .* or send it there with `ray job submit`"):
        connection.connect(address, "kvferry", needs_node=True)
    assert len(told) == 1


def test_what_is_no_address_of_a_cluster_is_refused_also_in_the_environment(told, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    with pytest.raises(ConfigurationError, match="'http://head:8265' is none of a Ray cluster"):
        connection.connect("auto", "kvferry", needs_node=False)
    connection.connect("head:6379", "kvferry", needs_node=True)
    assert told == [{"address": "head:6379", "namespace": "kvferry"}]


@pytest.mark.parametrize("num_deaths", [0, 1, 2])
def test_a_ray_client_whose_process_in_the_cluster_is_stillborn_tries_once_more(told, monkeypatch, num_deaths):
    def init(**options):
        told.append(options)
        if len(told) <= num_deaths:
            raise ConnectionAbortedError("Initialization failure: Starting Ray client server failed. See its log.")

    monkeypatch.setattr(connection, "_init", init)
    if num_deaths < 2:
        connection.connect(FAR, "kvferry", needs_node=False)
    else:
        with pytest.raises(ConfigurationError, match="Starting Ray client server failed"):
            connection.connect(FAR, "kvferry", needs_node=False)
    assert len(told) == min(num_deaths + 1, 2)


def test_other_versions_at_a_ray_clients_cluster_are_said(told, monkeypatch):
    def init(**options):
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.12.1\n")

    monkeypatch.setattr(connection, "_init", init)
    with pytest.raises(ConfigurationError, match=r"Ray: 2.59.0 Python: 3.12.1.*Install the same Ray and Python here"):
        connection.connect(FAR, "kvferry", needs_node=False)


def test_a_ray_client_that_loses_its_connection_is_told_so():
    async def lost():
        raise ConnectionError("Failed to reconnect within the reconnection grace period (30s)")

    with pytest.raises(
        ConfigurationError, match=r"connection to the Ray cluster was lost: Failed to reconnect .*again"
    ):
        asyncio.run(client._bounded(lost()))
