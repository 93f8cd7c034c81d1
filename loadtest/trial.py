"""What services are tried with: the same arrivals for all, at rising rates, and the objectives that they are held to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvferry.errors import ConfigurationError
from loadtest.arrivals import Arrival, Fit, poisson_arrivals, replayed_arrivals
from loadtest.goodput import GoodputReport, Slo
from loadtest.lengths import lengths_called
from loadtest.request_trace import TraceRow


@dataclass(frozen=True, slots=True)
class Trial:
    rates: tuple[float, ...]
    """Requests/s; not known yet where there are `loads`."""
    seconds: float
    """In which requests come, at each rate; then all are waited for."""
    slo: Slo
    fit: Fit
    lengths: str = "mix"
    rows: Sequence[TraceRow] = ()
    """Of a trace; then instants and lengths are its own."""
    seed: int = 0
    max_outstanding: int = 256
    loads: tuple[float, ...] = ()
    """Shares of a capacity that is measured first (loadtest/capacity.py); they make the rates."""

    def check(self) -> None:
        """Before minutes of measuring. Raises ConfigurationError."""
        if self.loads:
            self.burst(1)
            return
        for rate in self.rates:
            self.arrivals(rate)

    def arrivals(self, rate: float) -> tuple[Arrival, ...]:
        """Raises ConfigurationError."""
        if self.rows:
            return replayed_arrivals(self.rows, rate, self.seconds, self.fit)
        return poisson_arrivals(rate, self.seconds, lengths_called(self.lengths), self.fit, self.seed)

    def burst(self, count: int) -> tuple[Arrival, ...]:
        """As many that come all at once. Raises ConfigurationError."""
        return tuple(replace(one, at_s=0.0) for one in self.arrivals(count / self.seconds))

    def at_capacity(self, capacity: float) -> "Trial":
        """`capacity` in requests/s. Rates of three digits, so that they can be read."""
        return replace(self, rates=tuple(float(f"{capacity * load:.3g}") for load in self.loads))

    def load_at(self, rate: float) -> float | None:
        """The share of the capacity that this rate was made from."""
        return self.loads[self.rates.index(rate)] if self.loads else None


@dataclass(frozen=True, slots=True)
class Layout:
    """How workers are shared out. One pool: decode workers that compute their prompts themselves."""

    name: str
    num_prefill: int
    num_decode: int

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode

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
    load: float | None = None
    """The rate as a share of the least capacity of all layouts, where that was measured."""


def read_loads(text: str) -> tuple[float, ...]:
    """Percent with commas, rising, as shares. Raises ConfigurationError."""
    return tuple(percent / 100 for percent in read_rates(text))


def read_rates(text: str) -> tuple[float, ...]:
    """Numbers with commas, rising. Raises ConfigurationError."""
    try:
        rates = tuple(float(one) for one in text.split(","))
    except ValueError:
        raise ConfigurationError(f"rates {text!r}: expected numbers with commas, such as 0.5,1,2") from None
    if not all(0 < rate < float("inf") for rate in rates) or list(rates) != sorted(set(rates)):
        raise ConfigurationError(f"rates {text!r}: expected positive numbers that rise")
    return rates
