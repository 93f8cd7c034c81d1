import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvferry.engine.safetensors_file import SafetensorsFile
from kvferry.errors import ConfigurationError


def test_tensors_of_every_type_are_what_was_saved(tmp_path):
    tensors = {
        "float": torch.randn(3, 5),
        "half": torch.randn(7).half(),
        "brief": torch.randn(2, 2, 2).bfloat16(),
        "whole": torch.arange(9),
        "scalar": torch.tensor(4.5),
        "none": torch.empty(0, 3),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.shapes() == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert torch.equal(file.tensor(name), tensor)


def test_a_tensor_that_is_not_aligned_is_read_all_the_same(tmp_path):
    values = np.arange(6, dtype=np.float32)
    for spaces in range(4):
        header = json.dumps({"x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}) + " " * spaces
        content = len(header).to_bytes(8, "little") + header.encode() + values.tobytes()
        (tmp_path / "x.safetensors").write_bytes(content)
        assert SafetensorsFile(tmp_path / "x.safetensors").tensor("x").tolist() == values.reshape(2, 3).tolist()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a pickle in a zip", (2**40).to_bytes(8, "little") + b"{}"])
def test_what_is_no_whole_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"broken\.safetensors"):
        SafetensorsFile(path)


def test_a_file_that_was_cut_is_refused(tmp_path):
    path = tmp_path / "cut.safetensors"
    save_file({"x": torch.randn(100)}, path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ConfigurationError, match=r"cut\.safetensors"):
        SafetensorsFile(path)
