from router.outliers import FIRST_S, Outliers

POOL = {"a": 1.0, "b": 1.1, "c": 0.9, "slow": 5.0}
ALL = set(POOL)


def test_a_slow_worker_is_set_aside_and_comes_back_by_itself():
    outliers = Outliers()
    assert outliers.judge(POOL, ALL, 0.0) == {"slow"}
    assert outliers.judge(POOL, ALL, FIRST_S - 1) == {"slow"}
    assert outliers.judge(POOL, set(), FIRST_S) == frozenset(), "it is tried"
    assert outliers.judge(POOL, set(), FIRST_S + 1) == frozenset(), "and judged only once it was measured anew"


def test_one_that_is_still_slow_stays_aside_longer_and_one_that_recovered_is_forgiven():
    outliers = Outliers()
    outliers.judge(POOL, ALL, 0.0)
    assert outliers.judge(POOL, ALL, FIRST_S) == {"slow"}
    assert outliers.judge(POOL, ALL, FIRST_S + 1.9 * FIRST_S) == {"slow"}
    recovered = POOL | {"slow": 1.0}
    assert outliers.judge(recovered, ALL, 4 * FIRST_S) == frozenset()
    assert outliers.judge(POOL, ALL, 5 * FIRST_S) == {"slow"}
    assert outliers.judge(POOL, set(), 6 * FIRST_S) == frozenset(), "the time is the first one again"


def test_at_most_half_of_a_pool_is_aside_and_a_pool_of_one_never():
    outliers = Outliers()
    assert outliers.judge({"only": 9.0}, {"only"}, 0.0) == frozenset()
    pool = {"a": 1.0, "b": 50.0, "c": 60.0}
    assert len(outliers.judge(pool, set(pool), 0.0)) <= 1


def test_when_healthy_ones_leave_the_fastest_of_those_aside_are_used_again():
    outliers = Outliers()
    pool = {"a": 1.0, "b": 1.0, "c": 1.0, "slow": 8.0, "slower": 9.0}
    assert outliers.judge(pool, set(pool), 0.0) == {"slow", "slower"}
    without = {name: pool[name] for name in ("a", "slow", "slower")}
    assert outliers.judge(without, set(), 1.0) == {"slower"}
    assert outliers.judge({"slow": 8.0, "slower": 9.0}, set(), 1.1) == {"slower"}
    assert outliers.judge({"slower": 9.0}, set(), 1.2) == frozenset()
    assert outliers.judge({"slower": 9.0}, {"slower"}, 2.0) == frozenset()


def test_two_workers_are_compared_with_each_other():
    assert Outliers().judge({"a": 1.0, "b": 4.0}, {"a", "b"}, 0.0) == {"b"}


def test_who_has_left_is_forgotten():
    outliers = Outliers()
    outliers.judge(POOL, ALL, 0.0)
    outliers.judge({"a": 1.0}, {"a"}, 1.0)
    assert outliers.judge(POOL, set(), 2.0) == frozenset()
