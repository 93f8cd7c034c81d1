"""Work that two threads share: all of it, once, and nothing goes on afterwards."""

import os
import sys
import threading
from collections import Counter

import pytest

from kvferry.worker import copier as copier_module
from kvferry.worker.copier import MIN_SHARED_BYTES, Copier

COUNT = 200


@pytest.fixture
def num_cores():
    return 2


@pytest.fixture
def copier(monkeypatch, num_cores):
    """Of a caller that may use so many cores."""
    monkeypatch.setattr(copier_module, "_cores", lambda: set(range(num_cores)))
    return Copier()


@pytest.mark.parametrize("num_cores", [1, 2])
def test_each_block_is_worked_on_once(copier):
    done = list[int]()
    for _ in range(20):
        copier.each(done.append, COUNT, MIN_SHARED_BYTES)
    assert Counter(done) == dict.fromkeys(range(COUNT), 20)


def test_two_threads_work_at_the_same_time(copier):
    """Each waits for the other, in vain if there is none."""
    both = threading.Barrier(2, timeout=5)
    copier.each(lambda number: both.wait() and None, 2, MIN_SHARED_BYTES)


@pytest.mark.parametrize(("num_cores", "num_bytes"), [(1, MIN_SHARED_BYTES), (2, MIN_SHARED_BYTES - 1)])
def test_one_core_or_little_to_do_wakes_nobody(copier, num_bytes):
    threads = set[int]()
    copier.each(lambda number: threads.add(threading.get_ident()), COUNT, num_bytes)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("is_mine", [True, False])
def test_an_error_in_either_thread_is_raised_when_both_have_stopped(copier, is_mine):
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
        copier.each(work, 2, MIN_SHARED_BYTES)
    assert not is_working.is_set()


ON_TWO_CORES = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs two cores of a Linux"
)


class Caller:
    """Shares work from a thread that is confined to some cores, and notes what the other one may use."""

    def __init__(self):
        self.copier, self.others = Copier(), list[set[int]]()

    def share(self, confined_to: set[int]) -> None:
        os.sched_setaffinity(0, confined_to)
        first, has_begun = threading.get_ident(), threading.Event()

        def work(number: int) -> None:
            mine = os.sched_getaffinity(0)
            if threading.get_ident() != first:
                self.others.append(mine)
                has_begun.set()
            elif len(confined_to) > 1:
                has_begun.wait(5)

        self.copier.each(work, 2, MIN_SHARED_BYTES)

    def run(self, *confined_to: set[int]) -> None:
        thread = threading.Thread(target=lambda: [self.share(cores) for cores in confined_to])
        thread.start()
        thread.join()


@ON_TWO_CORES
def test_the_other_thread_does_not_wait_for_the_core_of_the_first(monkeypatch):
    cores, caller = os.sched_getaffinity(0), Caller()
    for core in cores:
        monkeypatch.setattr(copier_module, "_here", lambda core=core: core)
        caller.run(cores)
        assert caller.others.pop() == cores - {core}


@ON_TWO_CORES
def test_who_is_confined_to_a_core_later_on_works_alone_there():
    cores, caller = os.sched_getaffinity(0), Caller()
    caller.run(cores, {min(cores)}, cores)
    assert len(caller.others) == 2
