from router.retry_budget import LEAST, WINDOW_S, RetryBudget


def test_retries_are_a_tenth_of_successes_and_never_under_ten():
    budget = RetryBudget()
    assert [budget.take(1.0) for _ in range(LEAST + 1)] == [True] * LEAST + [False]
    for _ in range(300):
        budget.succeeded(2.0)
    assert [budget.take(3.0) for _ in range(21)] == [True] * 20 + [False]
    assert not budget.take(WINDOW_S + 1), "the last window still counts"
    assert budget.take(3 * WINDOW_S)
