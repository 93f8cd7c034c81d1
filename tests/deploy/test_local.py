"""What the processes of a deployment on this machine are started with; none is."""

import json

import pytest

from deploy.local import Child, LocalDeployment, LocalPlan

SHAPE = dict(num_hidden_layers=1, num_attention_heads=1, hidden_size=8, intermediate_size=8, vocab_size=9)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


def flags_of(name, plan):
    deployment = LocalDeployment(plan)
    deployment.children["router"] = Child("router", "router", [], details={"registry": "127.0.0.1:1"})
    return dict(flag.removeprefix("--").split("=") for flag in deployment._worker_arguments(name))


def test_on_the_cpu_the_pools_share_the_machines_memory(model):
    flags = flags_of("decode-1", LocalPlan(model))
    assert (flags["device"], flags["weights"], flags["kv"]) == ("cpu", "float32", "auto")
    assert int(flags["kv-tokens"]) > 0


def test_a_worker_on_a_device_asks_it_what_it_holds(model):
    flags = flags_of("prefill-1", LocalPlan(model, device="cuda:1", weights="bfloat16"))
    assert (flags["device"], flags["kv-tokens"]) == ("cuda:1", "0")
    assert flags_of("prefill-1", LocalPlan(model, device="cuda", kv_tokens=320))["kv-tokens"] == "320"


def test_each_role_may_have_a_device_of_its_own_in_the_file(model):
    config = model / "kvferry.yaml"
    config.write_text("prefill: {device: 'cuda:0'}\ndecode: {}\n")
    prefill, decode = (flags_of(name, LocalPlan(model, config=config)) for name in ("prefill-1", "decode-1"))
    assert "device" not in prefill  # the file says it
    assert prefill["kv-tokens"] == "0"
    assert decode["device"] == "cpu"
    assert int(decode["kv-tokens"]) > 0
