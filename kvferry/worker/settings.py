"""How a worker behaves, whatever its model: the plain values that its configuration is turned into."""

from dataclasses import dataclass

from kvferry.worker.reader import SILENCE_S


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    worker_id: str
    address: str
    """host:port where other processes reach its services."""
    incarnation: str
    router_addresses: tuple[str, ...]
    max_sequences: int = 64
    """Choices in steps or fetching at once (decode)."""
    step_target_s: float = 0.4
    """The time that catching up may add to a step."""
    max_step_tokens: int = 2048
    max_local_tokens: int = 512
    """A decode worker whose sources all failed computes up to so many missing tokens, and hands back what lacks more."""
    num_threads: int = 1
    silence_s: float = SILENCE_S
