from types import SimpleNamespace

from kvferry.worker.rates import MAX_LINKS, MOST, MeasuredRates


def plan(*lengths, start=0):
    chunks = [SimpleNamespace(tokens=(0,) * length, start=start) for length in lengths]
    return SimpleNamespace(chunks=chunks, num_tokens=sum(lengths))


def test_steps_that_yield_tokens_are_told_by_batch_and_those_that_catch_up_by_position():
    rates = MeasuredRates()
    rates.stepped(plan(1, 1, 1), 0.02)
    rates.stepped(plan(512, 1, start=512), 0.5)
    rates.stepped(plan(3, 1, 1, 1), 0.03)  # neither the one nor the other
    assert rates.step_s == {4: 0.02}
    assert rates.tokens_per_s == {1024: 1024.0}


def test_a_process_that_was_stopped_for_a_while_is_not_slow_for_long():
    rates = MeasuredRates()
    rates.stepped(plan(1), 0.02)
    rates.stepped(plan(1), 30.0)
    assert rates.step_s[1] <= 0.02 * (1 + 0.2 * MOST)
    for _ in range(10):
        rates.stepped(plan(1), 0.02)
    assert rates.step_s[1] < 0.022


def test_what_a_fetch_took_replaces_what_a_probe_guessed():
    rates = MeasuredRates()
    rates.probed("p1", 9e9)
    rates.probed("p1", 1.0)
    assert rates.link_bytes_per_s == {"p1": 9e9}
    rates.fetched("p1", 1000, 1.0)
    assert rates.link_bytes_per_s == {"p1": 1000.0}


def test_workers_that_come_and_go_leave_nothing_behind():
    rates = MeasuredRates()
    for number in range(3 * MAX_LINKS):
        rates.probed(f"p{number}", 1e9)
    assert len(rates.link_bytes_per_s) == len(rates._only_probed) == MAX_LINKS
