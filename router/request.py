"""A request after the front doors: tokens and numbers, checked; the same for HTTP and gRPC."""

from dataclasses import dataclass
from typing import Any

from kvferry.messages import Sampling


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    prompt_tokens: tuple[int, ...]
    sampling: Sampling
    num_choices: int = 1
    stops: tuple[str, ...] = ()
    is_stop_included: bool = False
    echo: str | None = None
    """What stands before the answer's text, if it is wanted."""
    continues_prompt: bool = False
    """The answer's text goes on where the prompt's ends, as a completion's does: a space in between is kept."""
    salt: bytes = b""
    tenant: bytes = b""
    """Who asks, for fairness: of the API key alone, not of what else separates caches."""
    priority: int = 0
    timeout_s: float | None = None
    slo_ttft_s: float | None = None
    """The time to the first token that the client wants kept; None: as configured."""
    slo_tpot_s: float | None = None
    explains: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """Numbers of a request's life. Instants are seconds since it was accepted; those that did not occur are absent."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_fetched_blocks: int
    fetched_bytes: int
    num_attempts: int
    decode_worker_id: str
    source_worker_id: str
    road: str
    instants_s: dict[str, float]
    seed: int
    explanation: dict[str, Any] | None = None
    """Why it was placed where it was, and what came of it; if asked for."""
    has_changed_numerics: bool = False
    """It went on at a worker of another numerics id: valid, and not bit-equal to the undisturbed answer."""
