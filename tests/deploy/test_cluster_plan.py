"""Deployment files, what fits where, and what is wanted after each change: without Ray."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from deploy.cluster.controller import with_routers
from deploy.cluster.flags import plan_from_flags
from deploy.cluster.nodes import ClusterNode
from deploy.cluster.plan import ClusterPlan, difference, plan_of, read_plan
from deploy.cluster.room import Bundle
from deploy.cluster.wanted import bundles_of, first_wanted, wanted_of
from kvferry.errors import ConfigurationError

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_parses_and_is_what_the_programs_accept(path):
    plan = read_plan(path)
    plan.check()
    assert plan_of(plan.model_dump()) == plan
    assert not difference(plan, plan)


def test_there_are_the_three_examples():
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == {"laptop", "one_gpu_host", "ten_hosts"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"decode": {"count": -1}}, "decode.count"),
        ({"decod": {}}, "decod: Extra inputs"),
        ({"decode": {"cpu": 1}}, "decode.cpu"),
        ({"tls": {"certificate": "x"}}, "tls.key"),
        ("text", "file"),
    ],
)
def test_what_is_no_plan_is_named_with_its_file(tmp_path, content, words):
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigurationError, match=r"bad\.yaml.*" + words.replace(".", r"\.")):
        read_plan(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"settings": {"kv_token": 5}}, "unknown setting 'kv_token'; known: .*kv_tokens"),
        ({"settings": {"itl_target_ms": 5}}, "prefill: unknown setting 'itl_target_ms'"),
        ({"decode": {"settings": {"name": "mine"}}}, "'name' is the deployment's own"),
        ({"decode": {"settings": {"drain_s": 5}}}, "'drain_s' is the deployment's own"),
        ({"decode": {"settings": {"weights": "int3"}}}, "weights"),
        ({"settings": {"device": "tpu"}}, "device"),
        (
            {"settings": {"device": "cuda"}, "prefill": {"gpus": 1}},
            "decode: device is 'cuda', but gpus is 0: .*say gpus: 1",
        ),
        (
            {
                "settings": {"device": "cuda", "kv_tokens": 640},
                "prefill": {"gpus": 0.5},
                "decode": {"gpus": 0.5, "settings": {"kv_tokens": 0}},
            },
            "decode: gpus is 0.5, but each worker would take all .*say kv_tokens",
        ),
        ({"decode": {"count": 0}}, "without a decode worker"),
    ],
)
def test_settings_that_no_program_takes_are_refused_before_anything_starts(content, words):
    with pytest.raises(ConfigurationError, match=words):
        plan_of(content).check()


def test_a_flag_counts_more_than_the_file(tmp_path):
    file = tmp_path / "deployment.yaml"
    file.write_text(
        yaml.safe_dump({"settings": {"weights": "int8", "kv": "bfloat16"}, "decode": {"count": 5, "cpus": 2}})
    )
    plan = plan_from_flags(file, {"weights": "float16", "decode": 3, "port": 9000}, is_here=False)
    assert plan.settings == {"weights": "float16", "kv": "bfloat16"}
    assert (plan.decode.count, plan.decode.cpus) == (3, 2)
    assert (plan.router.port, plan.router.grpc_port, plan.router.registry_port) == (9000, 9001, 9002)
    assert "--threads=2" in plan.flags("decode")


def test_workers_on_a_device_are_not_told_what_this_machines_memory_holds(tmp_path):
    shape = dict(num_hidden_layers=1, num_attention_heads=1, hidden_size=8, intermediate_size=8, vocab_size=9)
    (tmp_path / "config.json").write_text(json.dumps(shape))
    file = tmp_path / "deployment.yaml"
    for content, told in (
        ({}, {"prefill", "decode"}),
        ({"settings": {"device": "cuda"}}, set()),
        ({"decode": {"settings": {"device": "cuda"}}}, {"prefill"}),
        ({"settings": {"device": "cuda"}, "decode": {"settings": {"device": "cpu"}}}, {"decode"}),
        ({"prefill": {"settings": {"engine": "sim"}}}, {"decode"}),
        ({"prefill": {"settings": {"kv_tokens": 64}}}, {"decode"}),
    ):
        file.write_text(yaml.safe_dump({"model": str(tmp_path), **content}))
        plan = plan_from_flags(file, {}, is_here=True)
        sizes = {role: plan.pool(role).settings.get("kv_tokens", 64) for role in ("prefill", "decode")}
        assert {role for role, size in sizes.items() if size > 64} == told
        assert "kv_tokens" not in plan.settings
    plan = plan_from_flags(None, {"model": tmp_path, "device": "cuda:1"}, is_here=True)
    assert plan.settings == {"device": "cuda:1"}


def test_plans_that_differ_in_counts_alone_are_one_deployment_scaled():
    plan = ClusterPlan()
    more = plan_of({"decode": {"count": 7}})
    assert not difference(plan, more)
    assert difference(plan, plan_of({"router": {"count": 2}})) == "router.count is 1 there and 2 here"
    assert difference(plan, plan_of({"decode": {"cpus": 7}})) == "decode.cpus is 1.0 there and 7.0 here"


def test_a_router_may_be_on_each_address_that_is_labelled_for_it_however_many_there_are():
    front = {"labels": {"kvferry": "front"}}
    plan, one = plan_of({"router": {"each": True, **front}}), plan_of({"router": front})
    nodes = [
        ClusterNode(f"n{k}", f"10.0.0.{k % 3}", "", {"kvferry": "front"} if k % 3 else {}, {}, {}) for k in range(6)
    ]
    assert with_routers(plan, nodes).router.count == 2
    assert with_routers(one, nodes) == one
    assert not difference(with_routers(plan, nodes), plan), "a second `up` adopts it"
    with pytest.raises(ConfigurationError, match=r"router.each: no node has the labels {'kvferry': 'front'}"):
        with_routers(plan, nodes[::3])


# ---------------------------------------------------------------------------------------------------------------- wanted


def test_scaling_takes_free_names_from_below_and_lets_the_highest_go():
    wanted = first_wanted(plan_of({"prefill": {"count": 1}, "decode": {"count": 3}}), "m")
    assert list(wanted.workers) == ["prefill-1", "decode-1", "decode-2", "decode-3"]
    wanted = wanted.without("decode-1").scaled("decode", 3)
    assert set(wanted.workers) == {"prefill-1", "decode-1", "decode-2", "decode-3"}
    assert set(wanted.scaled("decode", 1).workers) == {"prefill-1", "decode-1"}
    assert set(wanted.scaled("decode", 1, {"decode-1", "decode-3"}).workers) == {"prefill-1", "decode-2"}
    assert len(wanted.scaled("decode", 5, {"decode-1"}).workers) == 6


def test_a_worker_that_changed_its_role_keeps_its_name_and_nobody_else_gets_it():
    wanted = first_wanted(ClusterPlan(), "m").with_role("prefill-1", "decode")
    assert (wanted.count("prefill"), wanted.count("decode")) == (0, 2)
    assert wanted.scaled("prefill", 1).workers == {"prefill-1": "decode", "decode-1": "decode", "prefill-2": "prefill"}


def test_what_is_wanted_survives_being_stored():
    wanted = first_wanted(read_plan(EXAMPLES / "ten_hosts.yaml"), "").with_router(
        "router-1", "10.0.0.1:8002", [1, 2, 3]
    )
    assert wanted_of(wanted.to_json()) == wanted
    assert wanted_of(replace(wanted, workers={}).to_json()).workers == {}


def test_what_answers_comes_first_and_routers_beyond_one_machine_are_apart_and_where_they_were():
    plan = plan_of({"router": {"count": 2, "cpus": 0}, "prefill": {"cpus": 3}, "decode": {"labels": {"x": "y"}}})
    beyond = (
        first_wanted(plan, "")
        .with_router("router-2", "10.0.0.2:8002", [8000, 8001, 8002])
        .with_role("prefill-1", "decode")
    )
    assert bundles_of(beyond) == [
        Bundle("router-1", {}, {}, is_apart=True),
        Bundle("router-2", {}, {}, is_apart=True, near="10.0.0.2"),
        Bundle("prefill-1", {"CPU": 1}, {"x": "y"}),
        Bundle("decode-1", {"CPU": 1}, {"x": "y"}),
    ]
    here = bundles_of(first_wanted(plan, "m"))
    assert not any(bundle.is_apart for bundle in here), "their ports differ"
    assert [bundle.owner for bundle in here] == ["router-1", "router-2", "decode-1", "prefill-1"]


def test_every_deployment_has_a_secret_of_its_own():
    assert first_wanted(ClusterPlan(), "m").secret != first_wanted(ClusterPlan(), "m").secret
