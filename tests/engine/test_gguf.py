from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGUFWriter

from kvferry.engine.gguf import converted_directory, gguf_of
from kvferry.engine.unpack import find_model, make_model
from kvferry.errors import ConfigurationError


def test_a_gguf_file_or_a_directory_with_one_is_converted_and_a_checkpoint_is_not(tmp_path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    assert gguf_of(gguf) == gguf_of(tmp_path) == gguf
    (tmp_path / "config.json").write_text("{}")
    assert gguf_of(tmp_path) is None
    assert find_model(tmp_path, tmp_path) == tmp_path


def test_of_several_gguf_files_none_is_guessed(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigurationError, match=r"a\.gguf, b\.gguf"):
        gguf_of(tmp_path)


def test_another_file_of_the_same_name_is_converted_anew(tmp_path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    first = converted_directory(gguf, tmp_path)
    gguf.write_bytes(b"GGUF2")
    assert converted_directory(gguf, tmp_path) != first


def test_what_is_no_gguf_is_refused_by_name_and_leaves_nothing_half(tmp_path):
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"this is no model")
    with pytest.raises(ConfigurationError, match=r"broken\.gguf"):
        make_model(gguf, tmp_path / "home")
    assert not list((tmp_path / "home" / "models").iterdir())


def test_what_does_not_fit_into_memory_while_it_is_converted_is_refused_with_the_arithmetic(tmp_path, monkeypatch):
    path = tmp_path / "large.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((1024, 256), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1024 * 256 * 8 - 1))
    with pytest.raises(
        ConfigurationError, match=r"large\.gguf: converting its 0\.00 billion weights takes 8 bytes each"
    ):
        make_model(path, tmp_path / "home")
    assert not list((tmp_path / "home" / "models").iterdir())


def test_who_makes_nothing_says_how_to_make_it(tmp_path):
    with pytest.raises(ConfigurationError, match="kvferry model unpack"):
        find_model(None, tmp_path)
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ConfigurationError, match="kvferry model unpack --model"):
        find_model(gguf, tmp_path)
