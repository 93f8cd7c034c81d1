import random

import pytest

from router.placement import POLICIES
from router.replay import Replay, ReplayRequest, ReplayWorker

DECODE = [ReplayWorker(f"decode-{k}", True, 10_000.0, 100_000, 0.01, 0.0001, 16) for k in range(3)]
PREFILL = [ReplayWorker(f"prefill-{k}", False, 10_000.0, 100_000) for k in range(2)]


def request(number, gap_s=0.1, num_prompt=1600, num_output=50, group=None):
    seed = f"own {number}" if group is None else f"group {group}"
    rng = random.Random(seed)
    return ReplayRequest(
        number * gap_s, num_prompt, num_output, tuple(rng.getrandbits(63) for _ in range(num_prompt // 16))
    )


def outcome(policy, requests, workers=(*PREFILL, *DECODE)):
    return Replay(workers, policy, 1e-5).run(requests)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_request_of_a_trace_that_the_pools_can_carry_is_placed(policy):
    found = outcome(policy, [request(k) for k in range(60)])
    assert len(found.ttft_s) == 60
    assert found.num_unplaced == 0
    assert found.num_cached_tokens == 0
    assert sum(n for name, n in found.num_by_worker.items() if name.startswith("decode")) == 60


def test_an_idle_pool_takes_what_computing_takes():
    found = outcome("least-loaded", [request(0)])
    assert found.ttft_s[0] == pytest.approx(99 * 16 / 10_000 + 0.003 + 0.0101, rel=0.02)


def test_equal_beginnings_are_not_computed_again():
    found = outcome("cost", [request(k, group=k % 2) for k in range(20)])
    assert found.num_cached_tokens >= 18 * 1500


def test_a_cache_forgets_what_it_has_no_room_for():
    small = [ReplayWorker("decode-0", True, 10_000.0, 3_200, 0.01)]
    again = [request(k, gap_s=10, group=k % 4) for k in range(16)]
    assert outcome("cost", again, small).num_cached_tokens == 0


def test_work_is_spread_evenly():
    found = outcome("cost", [request(k) for k in range(90)])
    counts = [n for name, n in found.num_by_worker.items() if name.startswith("decode")]
    assert max(counts) - min(counts) <= 2


def test_what_fits_nowhere_is_counted():
    found = outcome("cost", [request(0, num_prompt=200_000)])
    assert found.num_unplaced == 1
    assert found.ttft_s == []


def test_a_full_pool_makes_requests_wait_for_the_next_end():
    one = [ReplayWorker("decode-0", True, 1e9, 100_000, 0.01, 0.0, 1)]
    found = outcome("cost", [request(k, gap_s=0.0) for k in range(3)], one)
    assert found.ttft_s[2] > found.ttft_s[1] > found.ttft_s[0]
