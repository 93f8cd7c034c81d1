"""The counters of a worker, by name: they only rise, ride on its progress, and the router shows them on /metrics."""

from collections import Counter

COUNTERS = {
    "steps": "Engine steps run.",
    "step_flops": "Floating-point operations of those steps.",
    "step_bytes": "Bytes of weights and KV that they read.",
    "step_microseconds": "The time they took.",
    "computed_tokens": "Tokens whose KV was computed.",
    "generated_tokens": "Tokens sampled.",
    "late_tokens": "Of those, the ones whose router had left, or had given this worker up, before they could be sent.",
    "cache_hit_tokens": "Prompt tokens found sealed in this worker's pool on admission.",
    "recomputed_tokens": "Tokens that had been computed or fetched before a preemption, and were needed again.",
    "preemptions": "Sequences preempted.",
    "evicted_blocks": "Blocks evicted from the pool.",
    "fetches_started": "Fetches opened to a source.",
    "fetches_finished": "Fetches that delivered everything.",
    "fetched_blocks": "Blocks received, checked and sealed.",
    "fetched_bytes": "Their bytes.",
    "served_fetches": "Fetch streams served.",
    "served_blocks": "Blocks sent.",
    "served_bytes": "Their bytes.",
    "warmed_chains": "Chains computed ahead for a reader without room.",
    "requests_opened": "Requests opened on this worker.",
    "requests_cancelled": "Choices ended because nobody wanted them any more.",
    "engine_failures": "Sequences ended by a failed step or by logits that were not finite.",
    "non_finite_logits": "Rows of logits that were not finite.",
    "leaked_slots": "Slots that an audit of the idle pool found held by nobody alive.",
}
"""Fetches that failed are counted apart, as `fetch_failed_<kind>`; damaged frames as `bad_frame_<kind>`; bytes fetched also by the
road they came over, as `fetched_bytes_over_<road>`."""
PREFIXES = ("fetch_failed_", "bad_frame_", "fetched_bytes_over_")


class Counters:
    """A Counter that refuses unknown names."""

    def __init__(self) -> None:
        self.values: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    def add(self, name: str, amount: int = 1) -> None:
        if name not in COUNTERS and not name.startswith(PREFIXES):
            raise KeyError(f"unknown counter {name!r}; known: {', '.join(COUNTERS)}")
        self.values[name] += amount
