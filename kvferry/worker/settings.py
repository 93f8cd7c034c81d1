"""How a worker behaves, whatever its model: the plain values that its configuration is turned into."""

from dataclasses import dataclass, field

from kvferry.engine.roofline import Ceilings
from kvferry.kv.road import Road, known_roads
from kvferry.worker.patience import FetchBudgets


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
    itl_target_s: float = 0.25
    """The time of a whole step in which sequences yield tokens (decode)."""
    max_step_tokens: int = 2048
    max_local_tokens: int = 512
    """A decode worker whose sources all failed computes up to so many missing tokens, and hands back what lacks more."""
    max_warm: int = 4
    """So many of a decode worker's requests without room have their prompts computed meanwhile; 0: none."""
    num_threads: int = 1
    previous_end: str = ""
    """How the last process of this name ended, where it is known."""
    ceilings: Ceilings = field(default_factory=Ceilings)
    silence_s: float = 3.0
    roads: tuple[Road, ...] = field(default_factory=lambda: tuple(known_roads().values()))
    """That blocks may come and go over, best first."""
    budgets: FetchBudgets = field(default_factory=FetchBudgets)
