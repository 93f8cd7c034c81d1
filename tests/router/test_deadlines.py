from router.deadlines import SLACK, Deadlines


def test_instants_come_in_order_and_once():
    deadlines = Deadlines()
    for at_s, number in ((3.0, 1), (1.0, 2), (2.0, 1)):
        deadlines.add(at_s, number, {1, 2})
    assert list(deadlines.due(2.0)) == [2, 1]
    assert list(deadlines.due(2.0)) == []
    assert deadlines.next_s({1, 2}) == 3.0
    assert deadlines.is_first(1)


def test_those_of_requests_that_have_ended_are_passed_over():
    deadlines = Deadlines()
    deadlines.add(1.0, 1, {1})
    deadlines.add(2.0, 2, {2})
    assert deadlines.next_s({2}) == 2.0
    assert deadlines.next_s(set()) is None
    assert not deadlines.is_first(2)


def test_long_time_limits_of_requests_that_have_ended_take_no_memory():
    deadlines = Deadlines()
    for number in range(50_000):
        deadlines.add(86_400.0, number, {number})
    assert len(deadlines) <= SLACK + 8
