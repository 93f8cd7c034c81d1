"""What services are tried with: the same arrivals for all, at rising rates, and the objectives that they are held to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import ConfigurationError
from loadtest.arrivals import Arrival, Fit, poisson_arrivals, replayed_arrivals
from loadtest.goodput import GoodputReport, Slo
from loadtest.lengths import lengths_called
from loadtest.request_trace import TraceRow


@dataclass(frozen=True, slots=True)
class Trial:
    rates: tuple[float, ...]
    """Requests/s."""
    seconds: float
    """In which requests come, at each rate; then all are waited for."""
    slo: Slo
    fit: Fit
    lengths: str = "mix"
    rows: Sequence[TraceRow] = ()
    """Of a trace; then instants and lengths are its own."""
    seed: int = 0
    max_outstanding: int = 256

    def check(self) -> None:
        """Before minutes of measuring. Raises ConfigurationError."""
        for rate in self.rates:
            self.arrivals(rate)

    def arrivals(self, rate: float) -> tuple[Arrival, ...]:
        """Raises ConfigurationError."""
        if self.rows:
            return replayed_arrivals(self.rows, rate, self.seconds, self.fit)
        return poisson_arrivals(rate, self.seconds, lengths_called(self.lengths), self.fit, self.seed)


@dataclass(frozen=True, slots=True)
class Layout:
    """How workers are shared out. One pool: decode workers that compute their prompts themselves."""

    name: str
    num_prefill: int
    num_decode: int

    @property
    def has_two_pools(self) -> bool:
        return self.num_prefill > 0


@dataclass(frozen=True, slots=True)
class Measured:
    """One layout at one rate."""

    part: str
    """"real" or "sim"."""
    layout: Layout
    rate: float
    report: GoodputReport
    took_s: float
    """Of this machine's time."""


def read_rates(text: str) -> tuple[float, ...]:
    """Numbers with commas, rising. Raises ConfigurationError."""
    try:
        rates = tuple(float(one) for one in text.split(","))
    except ValueError:
        raise ConfigurationError(f"rates {text!r}: expected numbers with commas, such as 0.5,1,2") from None
    if not all(0 < rate < float("inf") for rate in rates) or list(rates) != sorted(set(rates)):
        raise ConfigurationError(f"rates {text!r}: expected positive numbers that rise")
    return rates
