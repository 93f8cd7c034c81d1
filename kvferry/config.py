"""Configuration of the three programs: flags, environment, one YAML file, in that order; what is not known is an error.

A YAML file has a section for each role (`router`, `prefill`, `decode`) and may be shared by all of them; `--config FILE` or
KVFERRY_CONFIG names it. Environment variables are KVFERRY_<ROLE>_<FIELD>. Values are frozen once read.
"""

import ipaddress
import os
import sys
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.sources import InitSettingsSource

from kvferry.errors import ConfigurationError

ROLES = ("router", "prefill", "decode")


def home() -> Path:
    """KVFERRY_HOME: models, the default secret, logs."""
    return Path(os.environ.get("KVFERRY_HOME") or Path.home() / ".cache" / "kvferry")


class _Config(BaseSettings):
    """What all three have."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    role: ClassVar[str]
    section: ClassVar[dict[str, Any]] = {}

    model: Path | None = None
    """Hugging Face checkpoint directory or GGUF file; the packaged model if not given."""
    host: str = "127.0.0.1"
    """Address to listen at. Beyond loopback, TLS files are required."""
    secret_file: Path | None = None
    """File with the cluster's secret; made under KVFERRY_HOME if not given."""
    tls_certificate: Path | None = None
    """PEM certificate of this process, for the links between router and workers."""
    tls_key: Path | None = None
    """PEM key of that certificate."""
    tls_authority: Path | None = None
    """PEM certificate that the other processes' certificates must chain to."""
    silence_s: float = Field(3.0, gt=0)
    """A stream without any message for so long is taken for dead."""
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    """debug, info, warning or error."""
    with_parent: bool = False
    """End when standard input ends: for a supervisor that holds its other end."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, InitSettingsSource(settings_cls, cls.section)


class RouterConfig(_Config):
    model_config = SettingsConfigDict(env_prefix="KVFERRY_ROUTER_")
    role: ClassVar[str] = "router"

    name: str = "router"
    """Shown to workers and on metrics."""
    port: int = Field(8000, ge=0, le=65535)
    """HTTP; 0 for any."""
    grpc_port: int = Field(8001, ge=0, le=65535)
    """Public gRPC; 0 for any."""
    registry_port: int = Field(8002, ge=0, le=65535)
    """Where workers join; 0 for any."""
    model_name: str = ""
    """The model's name in requests; the checkpoint directory's name if not given."""
    max_queued: int = Field(1024, ge=1)
    """Requests that may wait for a decode worker; one more is refused."""
    max_queued_tokens: int = Field(4_000_000, ge=1)
    """Tokens (prompts, and the answers that they may have) of the requests that wait."""
    max_queued_bytes: int = Field(256 * 1024 * 1024, ge=1)
    """What those requests may take of the router's memory."""
    queue_timeout_s: float = Field(30.0, gt=0)
    """The longest wait for a decode worker. A request that would wait longer is refused when it comes."""
    policy: str = "cost"
    """Where requests go: cost (time, and what it costs others), prefix (where most of it is held), least-loaded, round-robin."""
    slo_ttft_ms: float = Field(0.0, ge=0)
    """The time to the first token that placing and admission try to keep; 0: none. A request may name its own."""
    slo_tpot_ms: float = Field(0.0, ge=0)
    """The time per token after it; 0: none."""
    request_timeout_s: float = Field(600.0, gt=0, le=1e9)
    """The longest life of a request that names no limit of its own."""
    reader_timeout_s: float = Field(60.0, gt=0)
    """A streamed answer that has ended is kept for so long for a client that reads nothing of it; then its connection is closed."""
    local_tokens: int = Field(16, ge=0)
    """A request that lacks no more than so many tokens at its decode worker fetches nothing."""
    default_temperature: float = Field(1.0, ge=0, le=2)
    """For requests that name none."""


class WorkerConfig(_Config):
    name: str = ""
    """Unique in the deployment; made from role, host name and process id if not given."""
    port: int = Field(0, ge=0, le=65535)
    """Of the worker's gRPC services; 0 for any: the real one is registered."""
    previous_end: str = ""
    """How the last process of this name ended ("signal 9", "code 1"): told by whoever starts it again."""
    advertise: str = ""
    """host:port by which the others reach this worker, where that is not what it listens at (a container's mapped port, a proxy)."""
    router: list[str] = Field(default_factory=lambda: ["127.0.0.1:8002"])
    """Registry addresses (host:port) of the routers to join."""
    kv_tokens: int = Field(0, ge=0)
    """Tokens that the block pool holds; 0: from the memory there is, on a device all that is free."""
    block_size: int = 16
    """Tokens per block: 16, 32 or 64. The same in the whole deployment."""
    context_tokens: int = Field(0, ge=0)
    """Tokens that one sequence may have; 0: the model's limit."""
    threads: int = Field(1, ge=1)
    """Compute threads of the engine."""
    engine: str = Field("native", pattern="^(native|sim)$")
    """native: the model; sim: no model, but the time that `sim_shape` would take on `sim_accelerator`. Its tokens mean nothing."""
    sim_shape: str = "smollm2-135m"
    """One of the shapes of `kvferry size`, or a checkpoint directory. The tokenizer stays that of --model."""
    sim_accelerator: str = "here"
    """l4, a100, h100, h200, b200, or here: measured on this machine."""
    weights: str = Field("float32", pattern="^(float32|float16|bfloat16|int8|auto)$")
    """How weights are kept: float32; float16 at half the memory traffic; bfloat16 likewise, with activations rounded to it, too:
    faster with AVX512-BF16; int8 at a quarter, with a loss (`kvferry bench quality`); auto: float16, unless a weight does
    not fit into it. On a device: float32, float16, bfloat16 (activations are the same), or auto: the checkpoint's own. The same in
    the whole deployment."""
    kv: str = Field("auto", pattern="^(float32|float16|bfloat16|auto)$")
    """What the pool keeps and ships: float32, or bfloat16 (on a device also float16) at half the bytes; auto: float32, on a device
    what the weights are, which loses nothing. The same in the whole deployment."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Where steps run: cpu, cuda or cuda:N. On a device, through transformers' modules; the pool has a mirror in the host's memory."""
    transport: str = "auto"
    """How blocks go to other workers and come from them: shm, ray, grpc or inproc alone, or auto: the best that both ends have."""
    fetch_queued_s: float = Field(300.0, gt=0)
    """A source may let a fetch wait for so long."""
    fetch_computing_s: float = Field(30.0, gt=0)
    """A source may compute for a fetch for so long without a new step or block."""
    fetch_sending_s: float = Field(10.0, gt=0)
    """A source that has the blocks may send none for so long."""
    drain_s: float = Field(30.0, ge=0)
    """After SIGTERM, what runs here may go on for so long; then it goes on elsewhere. A second SIGTERM ends it at once."""
    step_target_s: float = Field(0.4, gt=0)
    """The time that catching up (chunks, tails) may take of one step."""
    max_step_tokens: int = Field(2048, ge=16)
    """The most tokens of catching up in one step."""


class PrefillConfig(WorkerConfig):
    model_config = SettingsConfigDict(env_prefix="KVFERRY_PREFILL_")
    role: ClassVar[str] = "prefill"


class DecodeConfig(WorkerConfig):
    model_config = SettingsConfigDict(env_prefix="KVFERRY_DECODE_")
    role: ClassVar[str] = "decode"

    itl_target_ms: float = Field(250.0, gt=0)
    """The gap between two tokens that catching up (tails, local chunks) may cause in steps in which others yield tokens."""
    max_sequences: int = Field(64, ge=1)
    """Choices in steps or fetching at once."""
    max_warm: int = Field(4, ge=0)
    """So many of the requests that wait for room here have their prompts computed by a source meanwhile; 0: none."""
    max_local_tokens: int = Field(512, ge=0)
    """Computed here when every source has failed; what lacks more is handed back to the router."""


C = TypeVar("C", bound=_Config)


def read_config(kind: type[C], arguments: list[str] | None = None) -> C:
    """From flags (sys.argv's by default), environment and file. Raises ConfigurationError naming what is wrong."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    path, arguments = _take_config_path(arguments)
    _refuse_unknown_variables(kind)
    chosen = type(
        kind.__name__,
        (kind,),
        {"section": read_section(path, kind.role) if path else {}, "__module__": kind.__module__},
    )
    source = CliSettingsSource(
        chosen,
        cli_parse_args=arguments,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_prog_name=f"kvferry {kind.role}",
    )
    try:
        return chosen(_cli_settings_source=source)  # type: ignore[call-arg]
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigurationError(f"{kind.role} configuration: {faults}") from error


def _take_config_path(arguments: list[str]) -> tuple[Path | None, list[str]]:
    rest: list[str] = []
    path = os.environ.get("KVFERRY_CONFIG")
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--config" and position + 1 < len(arguments):
            path, position = arguments[position + 1], position + 1
        elif argument.startswith("--config="):
            path = argument.removeprefix("--config=")
        else:
            rest.append(argument)
        position += 1
    return Path(path) if path else None, rest


def read_section(path: Path, role: str) -> dict[str, Any]:
    """One role's keys and values in a configuration file. Raises ConfigurationError."""
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: expected sections {', '.join(ROLES)}")
    unknown = sorted(str(name) for name in content if name not in ROLES)
    if unknown:
        raise ConfigurationError(f"{path}: unknown section {unknown[0]!r}; known: {', '.join(ROLES)}")
    section = content.get(role) or {}
    if not isinstance(section, dict):
        raise ConfigurationError(f"{path}: section {role!r} must hold keys and values")
    return section


def _refuse_unknown_variables(kind: type[_Config]) -> None:
    prefix = str(kind.model_config.get("env_prefix"))
    known = {f"{prefix}{name}".upper() for name in kind.model_fields}
    for name in os.environ:
        if name.upper().startswith(prefix) and name.upper() not in known:
            raise ConfigurationError(f"environment variable {name} is not known; known: {', '.join(sorted(known))}")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
