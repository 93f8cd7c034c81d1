"""What a service can do at most, and rates that are shares of it."""

import pytest

from kvferry.errors import ConfigurationError, KvferryError
from loadtest.arrivals import Arrival, Fit
from loadtest.capacity import capacity_of
from loadtest.goodput import Slo
from loadtest.open_loop import Sent
from loadtest.stream import StreamRecord
from loadtest.trial import Trial, read_loads


def sent_of(*records):
    return [Sent(Arrival(k, 0.0, 1, 1), record, 0.0) for k, record in enumerate(records)]


def test_capacity_is_what_succeeded_over_the_time_until_the_last_of_it_had_ended():
    good = [StreamRecord(10.0, [10.5, 11.0], 2), StreamRecord(10.0, [12.0, 14.0], 2)]
    bad = [StreamRecord(10.0, [30.0], failure="cut"), StreamRecord(10.0, failure="http_429")]
    assert capacity_of(sent_of(*good, *bad)) == 2 / 4.0
    with pytest.raises(KvferryError, match="no request"):
        capacity_of(sent_of(*bad))


def test_rates_are_the_shares_of_the_capacity_and_know_which():
    trial = Trial((), 10.0, Slo(1.0, 1.0), Fit(num_output=7), loads=read_loads("25,50,80"))
    trial.check()
    measured = trial.at_capacity(12.3456)
    assert measured.rates == (3.09, 6.17, 9.88)
    assert [measured.load_at(rate) for rate in measured.rates] == [0.25, 0.5, 0.8]
    assert Trial((1.0,), 10.0, Slo(1.0, 1.0), Fit()).load_at(1.0) is None
    assert {arrival.num_output for arrival in measured.arrivals(3.09)} == {7}


def test_a_burst_comes_all_at_once():
    trial = Trial((1.0,), 10.0, Slo(1.0, 1.0), Fit())
    burst = trial.burst(33)
    assert len(burst) == 33
    assert {arrival.at_s for arrival in burst} == {0.0}
    assert len({arrival.num_prompt for arrival in burst}) > 10


@pytest.mark.parametrize("text", ["50,25", "0", "half"])
def test_shares_are_numbers_that_rise(text):
    with pytest.raises(ConfigurationError, match=text):
        read_loads(text)
