"""What the hand-off benchmark takes from the steps of a decode worker."""

from deploy.handoff_report import NUM_STREAMS, _gaps
from kvferry.worker.step_line import StepLine


def step(number: int, planned_s: float, duration_s: float = 0.01, num_tokens: int = NUM_STREAMS) -> StepLine:
    return StepLine(number, NUM_STREAMS, num_tokens, planned_s, duration_s)


def test_what_lies_between_two_steps_is_a_part_of_the_gap():
    """As the copying of a frame does."""
    steps = [step(1, 0.00), step(2, 0.01), step(3, 0.06), step(4, 0.07)]
    assert [round(gap, 3) for gap in _gaps(steps, (0.0, 0.065))] == [0.01, 0.05, 0.01]


def test_a_step_with_a_tail_is_no_gap_of_the_streams_alone():
    steps = [step(1, 0.00), step(2, 0.01, 0.03, NUM_STREAMS + 5), step(3, 0.04), step(4, 0.05)]
    assert [round(gap, 3) for gap in _gaps(steps, (0.0, 1.0))] == [0.01, 0.01]
    assert not _gaps(steps, (2.0, 3.0))
