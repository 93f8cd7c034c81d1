import json

import pytest
import torch
from safetensors.torch import save_file

from kvferry.engine.checkpoint import Tensors
from kvferry.errors import ConfigurationError


def test_a_shards_tensor_that_the_index_does_not_name_is_refused(tmp_path):
    save_file({"a": torch.ones(2), "layers.0.rotary_emb.inv_freq": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(2), "c": torch.ones(2)}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    named = {"a": "1.safetensors", "b": "2.safetensors"}
    index.write_text(json.dumps({"weight_map": {**named, "c": "2.safetensors"}}))
    assert all(name in Tensors(tmp_path) for name in "abc")
    index.write_text(json.dumps({"weight_map": named}))
    with pytest.raises(ConfigurationError, match=r"2\.safetensors: tensor c is there, but model\.safetensors\.index"):
        Tensors(tmp_path)
