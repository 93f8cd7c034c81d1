"""What an open-loop run was worth: how each request ended, latencies of those that succeeded, and goodput.

Goodput is the number of requests that kept every service level objective, a second of the time in which requests came (DistServe, OSDI
2024). A failed request never counts, nor does it lend its times to a percentile. An answer that ended before any text is neither: it
has no first token, and is counted apart. Pure.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from loadtest.fate import Fate, count_failures, count_no_text, fate_of
from loadtest.open_loop import Sent
from loadtest.report import percentile
from loadtest.stream import StreamRecord

PERCENTILES = (50, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_s: float
    tpot_s: float
    """Of a request: the mean gap between its tokens. An answer of one token has none, and keeps it."""

    def is_kept_by(self, record: StreamRecord) -> bool:
        ttft_s, tpot_s = record.ttft_s, record.tpot_s
        return ttft_s is not None and ttft_s <= self.ttft_s and (tpot_s is None or tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True)
class TtftSplit:
    """How one request came to its first token, by the server's own clock, in seconds."""

    queue_s: float
    """At the router, for a decode worker."""
    fetch_s: float
    """From there to the last block: waiting and computing at the source, and what of the transfer did not hide; 0 without a fetch."""
    tail_s: float
    """The rest: waiting for a step and computing in it; in one pool, the whole prompt."""

    @property
    def whole_s(self) -> float:
        return self.queue_s + self.fetch_s + self.tail_s

    @staticmethod
    def of(record: StreamRecord) -> "TtftSplit | None":
        """None if the server did not say."""
        at = record.numbers.get("instants_ms", {})
        if "placed" not in at or "first_token" not in at:
            return None
        ready = max(at.get("last_block", at["placed"]), at["placed"])
        return TtftSplit(at["placed"] / 1e3, (ready - at["placed"]) / 1e3, (at["first_token"] - ready) / 1e3)


@dataclass(frozen=True)
class GoodputReport:
    sent: Sequence[Sent]
    seconds: float
    """In which they came."""
    slo: Slo

    @cached_property
    def succeeded(self) -> list[Sent]:
        return [one for one in self.sent if fate_of(one.record) is Fate.SUCCEEDED]

    @property
    def num_no_text(self) -> int:
        return count_no_text(one.record for one in self.sent)

    @cached_property
    def failures(self) -> Counter[str]:
        return count_failures(one.record for one in self.sent)

    @property
    def share_failed(self) -> float:
        """1 if nothing was sent: that is no success."""
        return self.failures.total() / len(self.sent) if self.sent else 1.0

    @property
    def goodput(self) -> float:
        """Requests/s."""
        return sum(self.slo.is_kept_by(one.record) for one in self.succeeded) / self.seconds

    @property
    def kinds(self) -> list[str]:
        return sorted({one.arrival.kind for one in self.sent})

    def samples_s(self, name: str, kind: str = "") -> list[float]:
        """Seconds, of those that succeeded: `ttft`, `itl` (between two events), `tpot`, `e2e`."""
        records = [one.record for one in self.succeeded if not kind or one.arrival.kind == kind]
        if name == "itl":
            return [gap for record in records for gap in record.gaps_s]
        values: Iterable[float | None] = (getattr(record, f"{name}_s") for record in records)
        return [value for value in values if value is not None]

    def percentile_s(self, name: str, share: float, kind: str = "") -> float | None:
        samples = self.samples_s(name, kind)
        return percentile(samples, share) if samples else None

    @cached_property
    def split(self) -> TtftSplit | None:
        """The means over all that the server told of."""
        found = [split for one in self.succeeded if (split := TtftSplit.of(one.record)) is not None]
        if not found:
            return None
        return TtftSplit(*(sum(getattr(one, name) for one in found) / len(found) for name in TtftSplit.__slots__))

    @property
    def transfer_share(self) -> float | None:
        """Of the time to the first token, over all whose transfer is known: what passed between computing and the last block."""
        known = [(one.transfer_s, one.record.ttft_s) for one in self.succeeded if one.transfer_s is not None]
        whole_s = sum(ttft_s or 0.0 for _, ttft_s in known)
        return sum(transfer_s for transfer_s, _ in known) / whole_s if whole_s else None

    def figures(self) -> list[dict[str, object]]:
        figures: list[dict[str, object]] = []
        kinds = ["", *self.kinds] if len(self.kinds) > 1 else [""]
        for name in ("ttft", "itl", "tpot", "e2e"):
            for kind in kinds:
                samples = self.samples_s(name, kind)
                of = {"kind": kind} if kind else {}
                for share in PERCENTILES if samples else ():
                    value = round(percentile(samples, share) * 1e3, 3)
                    figures.append(
                        {"figure": f"{name}_p{share}", "value": value, "unit": "ms", "n": len(samples), **of}
                    )
        figures.append({"figure": "goodput", "value": round(self.goodput, 4), "unit": "requests/s"})
        if self.split is not None:
            for name in TtftSplit.__slots__:
                value = round(getattr(self.split, name) * 1e3, 3)
                figures.append({"figure": f"ttft_{name.removesuffix('_s')}_mean", "value": value, "unit": "ms"})
        if self.transfer_share is not None:
            figures.append({"figure": "transfer_share", "value": round(self.transfer_share, 5), "unit": "of TTFT"})
        counts = {"sent": len(self.sent), "succeeded": len(self.succeeded), "no_text": self.num_no_text}
        counts |= {"failed": self.failures.total(), **{f"failed_{kind}": n for kind, n in self.failures.items()}}
        figures += [{"figure": name, "value": count, "unit": "requests"} for name, count in counts.items()]
        if self.sent:
            lag_ms = round(percentile([one.lag_s for one in self.sent], 99) * 1e3, 3)
            figures.append({"figure": "client_lag_p99", "value": lag_ms, "unit": "ms", "n": len(self.sent)})
        return figures
