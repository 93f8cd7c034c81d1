import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.messages import Role, WorkerDescription, WorkerProgress
from router.view import MEASURED_ANEW_S, WorkerView


def description(role):
    return WorkerDescription("w", "x", role, "a:1", "model", "float32", "n", 16, 64, 1000, 500, 1000, 8)


def view_of(*roles):
    view = WorkerView(num_rows=2)
    for role in roles:
        view.open_row(description(role))
    return view


def measurements(view, now):
    columns = view.columns(100, np.zeros(view.num_rows, np.int64), now)
    return [columns.step_base_s.tolist(), columns.step_slope_s.tolist(), columns.tokens_per_s.tolist()]


def worked_out_now(view):
    return [view._smooth(key).tolist() for key in ("step_base_s", "step_slope_s", 7)]


told = st.tuples(st.just("told"), st.integers(0, 3), st.floats(1e-3, 1.0))
asked = st.tuples(st.just("asked"), st.just(0), st.just(0.0))
events = st.lists(st.tuples(st.floats(0.0, 0.3), told | asked), min_size=1, max_size=40)


@given(events)
def test_measurements_are_at_most_so_old_however_workers_tell_and_requests_come(events):
    view, now = view_of(Role.DECODE, Role.DECODE, Role.PREFILL, Role.DECODE), 100.0
    states = [(now, worked_out_now(view))]  # from when on what was known
    for gap_s, (kind, row, value) in events:
        now += gap_s
        if kind == "told":
            progress = WorkerProgress(step=len(states), step_s={1: value, 8: 2 * value}, tokens_per_s={128: 1 / value})
            view.progressed(row, progress, {}, now)
            states.append((now, worked_out_now(view)))
            continue
        known_until = [*(begin for begin, _ in states[1:]), now]
        fresh = [state for (_, state), until in zip(states, known_until, strict=True) if now - until < MEASURED_ANEW_S]
        assert measurements(view, now) in fresh


def test_nobody_waits_for_what_workers_told_a_while_ago():
    view = view_of(Role.DECODE, Role.PREFILL)
    measurements(view, 1.0)
    view.progressed(0, WorkerProgress(step=1, step_s={1: 0.5}), {}, 2.0)
    view._smooth = None  # nothing is left to be worked out
    assert measurements(view, 2.5)[0][0] == 0.5


@given(st.lists(st.tuples(*[st.booleans()] * 4), min_size=1, max_size=9))
def test_usable_are_members_that_are_attached_and_neither_draining_nor_aside(flags):
    view = view_of(*[Role.DECODE] * len(flags))
    names = ("is_member", "is_attached", "is_draining", "is_aside")
    for row, values in enumerate(flags):
        for name, value in zip(names, values, strict=True):
            view.set(row, **{name: value})
    wanted = [m and a and not d and not s for m, a, d, s in flags]
    assert view.columns(1, np.zeros(view.num_rows, np.int64), 0.0).is_usable.tolist() == wanted


def test_a_prefill_worker_is_usable_from_its_first_progress_and_a_decode_worker_once_its_stream_shows_life():
    view = view_of(Role.PREFILL, Role.DECODE)
    assert view.bools["is_usable"][:2].tolist() == [False, False]
    for row in (0, 1):
        view.progressed(row, WorkerProgress(), {}, 1.0)
    assert view.bools["is_usable"][:2].tolist() == [True, False]
