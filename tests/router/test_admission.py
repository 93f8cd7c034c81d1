from types import SimpleNamespace

import pytest

from kvferry.errors import Overloaded
from router.admission import Admission, FairQueue, QueueLimits


def live(number, tenant=b"", size=100, priority=0, deadline_s=600.0, num_bytes=100):
    return SimpleNamespace(number=number, request=SimpleNamespace(tenant=tenant), size=size, priority=priority,
                           deadline_s=deadline_s, num_bytes=num_bytes)  # fmt: skip


def queue_of(*lives):
    queue = FairQueue()
    for one in lives:
        queue.push(one)
    return queue


def order(queue):
    return [one.number for one in queue.in_order()]


def test_within_a_tenant_by_priority_then_deadline_then_arrival():
    queue = queue_of(live(1), live(2, priority=1), live(3, deadline_s=5.0), live(4))
    assert order(queue) == [2, 3, 1, 4]


def test_tenants_take_turns_by_tokens_whatever_they_queue():
    queue = queue_of(*(live(k, b"many") for k in range(6)), live(10, b"few"), live(11, b"few"))
    assert order(queue) == [10, 0, 11, 1, 2, 3, 4, 5] or order(queue)[:4] == [0, 10, 1, 11]
    queue = queue_of(
        live(1, b"long", size=1000), live(2, b"long", size=1000), *(live(10 + k, b"short") for k in range(9))
    )
    assert order(queue).index(2) >= 10, "a thousand tokens are ten turns of a hundred"


def test_a_tenant_that_was_away_gets_no_credit_for_it():
    queue = queue_of(live(1, b"a"))
    for number in range(1, 50):
        one = next(queue.in_order())
        queue.remove(one)
        queue.charge(one)
        queue.push(live(number + 1, b"a"))
    for number in range(100, 105):
        queue.push(live(number, b"b"))
    assert order(queue)[:4] in ([100, 50, 101, 102], [50, 100, 101, 102], [100, 101, 50, 102])


def test_counts_follow_what_comes_and_goes():
    one, two = live(1, size=10, num_bytes=3), live(2, b"x", size=20, num_bytes=4)
    queue = queue_of(one, two)
    assert (len(queue), queue.num_tokens, queue.num_bytes) == (2, 30, 7)
    assert one in queue
    queue.remove(one)
    assert one not in queue
    assert (len(queue), queue.num_tokens, queue.num_bytes) == (1, 20, 4)


@pytest.mark.parametrize(
    "limits", [QueueLimits(max_requests=2), QueueLimits(max_tokens=250), QueueLimits(max_bytes=250)]
)
def test_the_queue_is_bounded_in_requests_tokens_and_bytes(limits):
    queue = FairQueue()
    admission = Admission(queue, limits)
    for number in (1, 2):
        assert admission.refusal(live(number), 0.0, 30.0) is None
        queue.push(live(number))
    refusal = admission.refusal(live(3), 0.0, 30.0)
    assert isinstance(refusal, Overloaded)
    assert refusal.retry_after_s >= 1
    assert "decode pool" in refusal.message


def test_an_empty_queue_takes_what_is_larger_than_its_limit():
    assert Admission(FairQueue(), QueueLimits(max_tokens=1)).refusal(live(1), 0.0, 30.0) is None


def test_who_would_wait_longer_than_it_may_is_refused_when_it_comes():
    queue = FairQueue()
    admission = Admission(queue, QueueLimits())
    for number in range(11):
        admission.placed(live(number), number * 0.1, has_queue=True)  # a thousand tokens a second
    for number in range(20):
        queue.push(live(100 + number))  # two seconds of them
    assert admission.wait_s(1.0, 2000) == pytest.approx(2.0, rel=0.05)
    assert admission.refusal(live(1), 1.0, 3.0) is None
    refusal = admission.refusal(live(1), 1.0, 1.5)
    assert isinstance(refusal, Overloaded)
    assert "the decode pool is short" in refusal.message
    assert "would wait 2.0 s" in refusal.message
    short = Admission(queue, QueueLimits(max_requests=1), lambda: "prefill").refusal(live(1), 1.0, 1.5)
    assert isinstance(short, Overloaded)
    assert "prefill pool" in short.message


def test_placements_without_a_queue_say_nothing_of_what_the_pools_can_take():
    queue = queue_of(live(1))
    admission = Admission(queue, QueueLimits())
    for number in range(10):
        admission.placed(live(number), float(number), has_queue=False)
    assert admission.wait_s(9.0, 2000) is None


def test_a_tenant_with_less_than_its_share_is_let_into_a_full_queue_and_foretold_its_own_wait():
    queue = queue_of(*(live(k, b"many") for k in range(20)))
    admission = Admission(queue, QueueLimits(max_requests=20))
    for number in range(11):
        admission.placed(live(number), number * 0.1, has_queue=True)
    assert isinstance(admission.refusal(live(99, b"many"), 1.0, 30.0), Overloaded)
    assert admission.refusal(live(99, b"few"), 1.0, 0.5) is None, "it is next but one, whatever the other tenant queues"
    for number in range(10):
        queue.push(live(100 + number, b"few"))
    assert isinstance(admission.refusal(live(199, b"few"), 1.0, 30.0), Overloaded)


def test_a_queue_that_has_emptied_says_nothing_of_the_next_one():
    queue = FairQueue()
    admission = Admission(queue, QueueLimits())
    for number in range(20):
        admission.placed(live(number), number * 0.2, has_queue=number % 5 == 0)
    queue.push(live(100))
    assert admission.wait_s(4.0, 1000) is None


def test_what_a_request_did_not_use_is_given_back():
    queue = queue_of(*(live(k, b"a", size=1000) for k in range(3)), *(live(10 + k, b"b", size=100) for k in range(3)))
    one = live(0, b"a", size=1000)
    one.used_tokens = 50
    queue.charge(one)
    assert order(queue)[:3] == [10, 11, 12]
    queue.settle(one)
    assert order(queue)[:2] != [10, 11]


def test_nothing_is_given_back_for_what_was_never_charged_or_was_forgotten():
    queue = queue_of(*(live(k, b"asks", size=1000) for k in range(3)), live(10, b"waits", size=1000))
    served = live(20, b"asks", size=1000)
    queue.charge(served)
    before = order(queue)
    assert before[0] == 10
    left = live(99, b"asks", size=100_000)
    left.used_tokens = 10
    queue.push(left)
    queue.remove(left)
    queue.settle(left)  # it was cancelled, or its time ran out, while it waited
    assert order(queue) == before
    served.used_tokens = 1000
    for _ in range(2):
        queue.settle(served)
    assert order(queue) == before


def test_tenants_that_come_and_go_leave_nothing_behind():
    queue = queue_of(live(0, b"stays", size=10**9))
    for number in range(1, 5000):
        one = live(number, b"%d" % number)
        queue.push(one)
        queue.remove(one)
        queue.charge(one)
    assert len(queue._served) < 3000
    queue.remove(next(queue.in_order()))
    assert not queue._served


def test_passing_by_an_empty_queue_is_as_if_it_had_been_in_it():
    queued, passed = FairQueue(), FairQueue()
    for number, tenant in enumerate([b"a", b"b", b"a", b"c"]):
        one = live(number, tenant, size=100 + number)
        queued.push(one)
        queued.remove(one)
        queued.charge(one)
        passed.pass_by(one)
        assert vars(passed) == vars(queued)
