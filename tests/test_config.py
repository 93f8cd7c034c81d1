import stat

import pytest

from kvferry.config import DecodeConfig, PrefillConfig, RouterConfig, read_config
from kvferry.errors import ConfigurationError
from kvferry.process import make_secret, read_secret, read_tls


def test_flags_go_before_environment_before_file_before_defaults(tmp_path, monkeypatch):
    path = tmp_path / "kvferry.yaml"
    path.write_text("decode:\n  threads: 2\n  kv_tokens: 100\n  name: from-file\nrouter:\n  port: 1234\n")
    monkeypatch.setenv("KVFERRY_DECODE_KV_TOKENS", "200")
    monkeypatch.setenv("KVFERRY_DECODE_NAME", "from-environment")
    config = read_config(DecodeConfig, [f"--config={path}", "--name=from-flag", "--router=a:1", "--router=b:2"])
    assert (config.threads, config.kv_tokens, config.name, config.block_size) == (2, 200, "from-flag", 16)
    assert config.router == ["a:1", "b:2"]
    assert read_config(RouterConfig, ["--config", str(path)]).port == 1234
    assert read_config(PrefillConfig, ["--config", str(path)]).threads == 1


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("decode:\n  thread: 2\n", "thread"),
        ("decoder:\n  threads: 2\n", "decoder"),
        ("decode:\n  threads: many\n", "threads"),
        ("decode: [", "not YAML"),
        ("- 1\n", "sections"),
    ],
)
def test_what_a_file_should_not_hold_is_named(tmp_path, content, named):
    path = tmp_path / "kvferry.yaml"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=named):
        read_config(DecodeConfig, [f"--config={path}"])


def test_unknown_variables_missing_files_and_unknown_flags_are_named(tmp_path, monkeypatch, capsys):
    with pytest.raises(ConfigurationError, match=r"absent\.yaml"):
        read_config(DecodeConfig, [f"--config={tmp_path}/absent.yaml"])
    with pytest.raises(SystemExit):
        read_config(DecodeConfig, ["--bogus"])
    assert "--bogus" in capsys.readouterr().err
    monkeypatch.setenv("KVFERRY_DECODE_THREAD", "2")
    with pytest.raises(ConfigurationError, match="KVFERRY_DECODE_THREAD"):
        read_config(DecodeConfig, [])


@pytest.mark.parametrize("limit", ["inf", "1e300"])
def test_a_time_limit_that_no_message_to_a_worker_can_carry_is_refused(limit):
    with pytest.raises(ConfigurationError, match="request_timeout_s"):
        read_config(RouterConfig, [f"--request-timeout-s={limit}"])


def test_beyond_loopback_tls_is_required(tmp_path):
    with pytest.raises(ConfigurationError, match="tls-certificate"):
        read_tls(read_config(DecodeConfig, ["--host=0.0.0.0"]))
    with pytest.raises(ConfigurationError, match="all of"):
        read_tls(read_config(DecodeConfig, [f"--tls-key={tmp_path}"]))
    assert read_tls(read_config(DecodeConfig, ["--host=127.0.0.1"])) is None


def test_the_secret_is_made_once_for_its_owner_only(tmp_path):
    path = tmp_path / "secret"
    make_secret(path)
    secret = read_secret(path)
    make_secret(path)
    assert read_secret(path) == secret
    assert len(secret) > 20
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_secret(path)
