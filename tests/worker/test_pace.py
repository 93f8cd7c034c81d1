"""Frames as large as the line is fast."""

from kvferry.worker.pace import FRAME_S, FramePace


def test_a_frame_has_as_many_blocks_as_the_last_ones_say_are_through_in_time():
    pace = FramePace(first=2, largest=11)
    assert (pace.num_blocks, pace.num_in_flight) == (2, 2), "nothing is known"
    pace.sent(2, 0.0)
    pace.sent(2, 0.0)
    assert pace.num_blocks == 2
    pace.acknowledged(1.0)
    assert pace.num_blocks == 2 * FRAME_S
    pace.acknowledged(1.5)
    assert pace.num_blocks == 4 * FRAME_S, "the second one was behind the first"
    for round, num_blocks in enumerate((4, 8, 11, 11)):
        pace.sent(2, 2.0 + round)
        pace.acknowledged(2.001 + round)
        assert pace.num_blocks == num_blocks, "a line that is quick again; or two acknowledgements that came at once"


def test_a_block_that_takes_long_goes_alone():
    pace = FramePace(first=1, largest=4)
    pace.sent(1, 0.0)
    pace.acknowledged(2 * FRAME_S)
    assert (pace.num_blocks, pace.num_in_flight) == (1, 1)
    pace.sent(1, 2.0)
    pace.acknowledged(2.0 + FRAME_S)
    assert pace.num_in_flight == 2


def test_no_time_is_a_fast_line_and_an_acknowledgement_of_nothing_is_nothing():
    pace = FramePace(first=1, largest=64)
    pace.acknowledged(0.0)
    pace.sent(1, 1.0)
    pace.acknowledged(1.0)
    assert pace.num_blocks == 64
