"""What the metrics say of real workers, and what threads they have (T087)."""

import os

import psutil
import pytest

from tests.processes.test_exact import ids

pytestmark = [pytest.mark.model, pytest.mark.processes]


def test_the_metrics_show_prefill_bound_by_compute_and_decode_by_memory(service):
    """Each worker's operations and bytes a second, against what its machine was measured to reach."""
    for k in range(2):
        service.tokens(ids(900, f"roofline {k}"), 40)

    def share(worker, resource):
        labels = dict(worker=worker, resource=resource)
        achieved, ceiling = (
            service.total("kvferry_worker_roofline", kind=kind, **labels) for kind in ("achieved", "ceiling")
        )
        assert ceiling > 0
        return achieved / ceiling

    assert share("prefill-1", "flops") > 2 * share("prefill-1", "bytes")
    assert share("decode-1", "bytes") > share("decode-1", "flops")
    for worker in ("prefill-1", "decode-1"):
        for name in ("step_flops", "step_bytes", "step_microseconds"):
            assert service.total("kvferry_worker_events_total", worker=worker, name=name) > 0


def test_workers_have_the_threads_that_they_are_given_and_no_more_than_there_are_cores(service):
    """T087: with one thread a worker keeps no pool of compute threads."""
    workers = [child for child in service.deployment.children.values() if child.role != "router"]
    assert service.deployment.threads * len(workers) <= max(os.cpu_count() or 1, len(workers))
    service.tokens(ids(300, "threads"), 4)
    for child in workers:
        before = cpu_seconds_by_thread(child.pid)
        service.tokens(ids(600, f"threads {child.name}"), 20)
        spent = {
            thread: seconds - before.get(thread, 0) for thread, seconds in cpu_seconds_by_thread(child.pid).items()
        }
        busy = [seconds for seconds in spent.values() if seconds > 0.25]
        assert len(busy) <= service.deployment.threads


def cpu_seconds_by_thread(pid):
    return {thread.id: thread.user_time for thread in psutil.Process(pid).threads()}
