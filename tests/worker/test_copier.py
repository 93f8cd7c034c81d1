"""Work that two threads share: all of it, once, and nothing goes on afterwards."""

import os
import sys
import threading
from collections import Counter

import pytest

from kvferry.worker.copier import MIN_SHARED_BYTES, Copier

COUNT = 200


@pytest.mark.parametrize("num_cores", [1, 2])
def test_each_block_is_worked_on_once(num_cores):
    done = list[int]()
    copier = Copier(num_cores)
    for _ in range(20):
        copier.each(done.append, COUNT, MIN_SHARED_BYTES)
    assert Counter(done) == dict.fromkeys(range(COUNT), 20)


def test_two_threads_work_at_the_same_time():
    """Each waits for the other, in vain if there is none."""
    both = threading.Barrier(2, timeout=5)
    Copier(2).each(lambda number: both.wait() and None, 2, MIN_SHARED_BYTES)


@pytest.mark.parametrize(("num_cores", "num_bytes"), [(1, MIN_SHARED_BYTES), (2, MIN_SHARED_BYTES - 1)])
def test_one_core_or_little_to_do_wakes_nobody(num_cores, num_bytes):
    threads = set[int]()
    Copier(num_cores).each(lambda number: threads.add(threading.get_ident()), COUNT, num_bytes)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("is_mine", [True, False])
def test_an_error_in_either_thread_is_raised_when_both_have_stopped(is_mine):
    caller, both, is_working = threading.get_ident(), threading.Barrier(2, timeout=5), threading.Event()
    other_goes_on = threading.Event()

    def work(number: int) -> None:
        del number
        both.wait()
        if (threading.get_ident() == caller) is is_mine:
            threading.Timer(0.05, other_goes_on.set).start()
            raise ValueError("a fault of the work")
        is_working.set()
        other_goes_on.wait(5)
        is_working.clear()

    with pytest.raises(ValueError, match="a fault of the work"):
        Copier(2).each(work, 2, MIN_SHARED_BYTES)
    assert not is_working.is_set()


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs two cores of a Linux")
def test_the_other_thread_does_not_wait_for_the_core_of_the_first():
    cores, copier, may_use = os.sched_getaffinity(0), Copier(), dict[int, set[int]]()

    def share_from(core: int) -> None:
        os.sched_setaffinity(0, {core})
        first, both = threading.get_ident(), threading.Barrier(2, timeout=5)

        def work(number: int) -> None:
            both.wait()
            if threading.get_ident() != first:
                may_use[core] = os.sched_getaffinity(0)

        copier.each(work, 2, MIN_SHARED_BYTES)

    for core in cores:
        caller = threading.Thread(target=share_from, args=(core,))
        caller.start()
        caller.join()
    assert may_use == {core: cores - {core} for core in cores}
