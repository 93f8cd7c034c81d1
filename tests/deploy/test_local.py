"""What the processes of a deployment on this machine are started with; none is."""

import json

import pytest
import yaml

from deploy.local import Child, LocalDeployment, LocalPlan
from kvferry.errors import ConfigurationError

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
    flags = flags_of("decode-1", LocalPlan(model, num_prefill=0, device="cuda:1", weights="bfloat16"))
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


@pytest.mark.parametrize(
    ("more", "content", "is_refused"),
    [
        ({}, {}, True),
        ({"num_prefill": 0}, {}, False),
        ({"kv_tokens": 640}, {}, False),
        ({"engine": "sim"}, {}, False),
        ({}, {"prefill": {"device": "cuda:1"}}, False),
        ({}, {"prefill": {"device": "cuda:0"}}, True),
        ({}, {"prefill": {"device": "cpu"}}, False),
        ({"num_decode": 2}, {"prefill": {"device": "cpu"}}, True),
        ({}, {"prefill": {"kv_tokens": 64}}, False),
    ],
)
def test_two_workers_that_would_each_take_all_of_a_device_are_refused(model, tmp_path, more, content, is_refused):
    config = tmp_path / "more.yaml"
    config.write_text(yaml.safe_dump(content))
    plan = LocalPlan(model, device="cuda", config=config, **more)
    if is_refused:
        with pytest.raises(
            ConfigurationError, match=r"2 workers would each take all that is free on cuda:0: say .*--kv-tokens"
        ):
            LocalDeployment(plan)
    else:
        LocalDeployment(plan)
