import json

import pytest

from kvferry.errors import ConfigurationError
from kvferry.shape import SHAPES, human_bytes, read_shape

GIB = 1024**3


def test_the_arithmetic_that_the_project_started_from():
    llama = read_shape("llama-2-7b")
    assert llama.kv_bytes_per_token("float16") == 512 * 1024
    assert llama.kv_bytes_per_token("float16") * 4096 == 2 * GIB
    assert llama.kv_bytes_per_token("float16") * 4096 * 10 == 20 * GIB
    assert round(llama.weight_bytes("float16") / 1e9, 1) == 13.5
    qwen = read_shape("qwen2.5-7b")
    assert qwen.kv_bytes_per_token("float16") == 56 * 1024
    assert qwen.kv_bytes_per_token("float16") * 131_072 == 7 * GIB
    assert SHAPES["smollm2-135m"].kv_bytes_per_token("float32") == 46_080
    assert round(SHAPES["smollm2-135m"].num_weights / 1e6, 1) == 134.5


def test_a_directory_is_read_and_what_is_missing_is_named(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ConfigurationError, match="llama-2-7b"):
        read_shape(str(tmp_path))
    fields = dict(num_attention_heads=4, num_hidden_layers=2, hidden_size=64, intermediate_size=96, vocab_size=199)
    path.write_text(json.dumps(fields))
    assert read_shape(str(tmp_path)).kv_bytes_per_token("float32") == 2 * 2 * 4 * 16 * 4
    path.write_text(json.dumps({**fields, "vocab_size": None}))
    with pytest.raises(ConfigurationError, match="vocab_size"):
        read_shape(str(tmp_path))
    del fields["hidden_size"]
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigurationError, match="hidden_size"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("count", "text"), [(10, "10 B"), (1536, "1.5 KiB"), (2 * GIB, "2 GiB"), (1023 * 1024, "1023 KiB")]
)
def test_sizes_are_written_for_people(count, text):
    assert human_bytes(count) == text
