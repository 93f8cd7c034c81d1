"""What the router shows on /metrics: its own requests, and each worker's progress. Read when scraped, kept nowhere twice."""

from collections import Counter as Count
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.dispatcher import Dispatcher
from router.live import Live, LiveState

TIME_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class RouterMetrics:
    CONTENT_TYPE = CONTENT_TYPE_LATEST

    def __init__(self, dispatcher: Dispatcher):
        self._registry = CollectorRegistry()
        self._registry.register(_StateCollector(dispatcher))
        self._ttft = self._histogram("ttft", "Accepted to first token.")
        self._tpot = self._histogram("tpot", "(E2E - TTFT) / (tokens - 1).")
        self._e2e = self._histogram("e2e", "Accepted to closed.")
        self._error = self._histogram(
            "ttft_prediction_error", "Between the predicted time to the first token and the real one."
        )
        dispatcher.observe = self._observe

    def render(self) -> str:
        return generate_latest(self._registry).decode()

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"kvferry_{name}_seconds", what, buckets=TIME_BUCKETS, registry=self._registry)

    def _observe(self, live: Live) -> None:
        at = live.instants_s
        if live.state is not LiveState.FINISHED or "first_token" not in at:
            return
        self._ttft.observe(at["first_token"])
        self._e2e.observe(at["closed"])
        if live.predicted_ttft_s is not None and live.journal.attempt == 1:
            self._error.observe(abs(at["first_token"] - at["placed"] - live.predicted_ttft_s))
        num_tokens = live.journal.num_tokens // len(live.journal.choices)
        if num_tokens > 1:
            self._tpot.observe((at["last_token"] - at["first_token"]) / (num_tokens - 1))


class _StateCollector(Collector):
    def __init__(self, dispatcher: Dispatcher):
        self._dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        dispatcher = self._dispatcher
        phases = Count(dispatcher.phase(live) for live in dispatcher.lives)
        live = GaugeMetricFamily("kvferry_requests", "Live requests by phase.", labels=["phase"])
        for phase in ("queued", "prefilling", "decoding"):
            live.add_metric([phase], phases[phase])
        yield live
        events = CounterMetricFamily("kvferry_request_events", "What became of requests, by event.", labels=["event"])
        for name, count in sorted(dispatcher.counters.items()):
            events.add_metric([name], count)
        yield events
        tokens = GaugeMetricFamily("kvferry_queued_tokens", "Tokens of the requests that wait, answers included.")
        tokens.add_metric([], dispatcher.num_queued_tokens)
        yield tokens
        view = CounterMetricFamily("kvferry_view_events", "What the router heard of its workers.", labels=["event"])
        for name, count in sorted(dispatcher.members.counters.items()):
            view.add_metric([name], count)
        yield view
        yield GaugeMetricFamily("kvferry_index_entries", "Blocks in the index.", value=dispatcher.members.num_indexed)
        yield GaugeMetricFamily("kvferry_ready", "1 if requests can be answered.", value=int(dispatcher.is_ready))
        yield GaugeMetricFamily("kvferry_degraded", "1 without prefill workers.", value=int(dispatcher.is_degraded))
        yield from self._workers()

    def _workers(self) -> Iterator[Metric]:
        labels = ["worker", "role"]
        sequences = GaugeMetricFamily("kvferry_worker_sequences", "By state.", labels=[*labels, "state"])
        slots = GaugeMetricFamily(
            "kvferry_worker_slots", "Slots of the block pool by state.", labels=[*labels, "state"]
        )
        step = CounterMetricFamily("kvferry_worker_step", "Step counter.", labels=labels)
        active = GaugeMetricFamily("kvferry_worker_active", "This router's choices or chains there.", labels=labels)
        counters = CounterMetricFamily(
            "kvferry_worker_events", "Counters of a worker, by name.", labels=[*labels, "name"]
        )
        rates = GaugeMetricFamily(
            "kvferry_worker_roofline",
            "A second's operations (flops) and bytes: achieved while stepping, and the machine's ceiling.",
            labels=[*labels, "resource", "kind"],
        )
        states = GaugeMetricFamily("kvferry_worker_state", "1 if it is so.", labels=[*labels, "state"])
        for member in self._dispatcher.members:
            names, progress = [member.worker_id, member.role.value], member.progress
            for state in ("waiting", "fetching", "running", "serving"):
                sequences.add_metric([*names, state], getattr(progress, f"num_{state}"))
            for state in ("free", "filling", "live", "cached"):
                slots.add_metric([*names, state], getattr(progress.slots, f"num_{state}"))
            step.add_metric(names, progress.step)
            active.add_metric(names, member.num_active)
            for state in ("draining", "set aside"):
                states.add_metric([*names, state], int(member.state == state))
            for resource in ("flops", "bytes"):
                rates.add_metric([*names, resource, "achieved"], getattr(progress, f"{resource}_per_s"))
                ceiling = getattr(member.description, f"ceiling_{resource}_per_s")
                rates.add_metric([*names, resource, "ceiling"], ceiling)
            for name, value in sorted(progress.counters.items()):
                counters.add_metric([*names, name], value)
        yield from (sequences, slots, step, active, states, counters, rates)
