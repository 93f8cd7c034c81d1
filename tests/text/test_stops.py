import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.text.stops import StopStrings


def run(stops, pieces, is_included=False):
    matcher, given_out = StopStrings(tuple(stops), is_included), []
    for piece in pieces:
        cut = matcher.push(piece)
        given_out.append(cut.text)
        if cut.is_stopped:
            return "".join(given_out), True
    return "".join([*given_out, matcher.flush()]), False


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["END"], "some END text", "some "),
        (["END"], "some EN", "some EN"),
        (["안녕"], "말 안녕 말", "말 "),
        (["👩‍👩‍👧"], "a👩‍👩‍👧b", "a"),
        ([" word"], "a word", "a"),
        (["abc", "abd", "ab!", "a"], "xxab!", "xx"),
        (["aab"], "aaab", "a"),
    ],
)
def test_text_ends_right_before_the_stop_whatever_the_pieces(stops, text, expected):
    for size in range(1, 6):
        pieces = [text[k : k + size] for k in range(0, len(text), size)]
        assert run(stops, pieces)[0] == expected


def test_the_stop_can_be_included():
    assert run(["END"], ["some E", "ND text"], is_included=True) == ("some END", True)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_nothing_of_a_stop_goes_out_and_nothing_else_is_lost(stops, pieces):
    text, is_stopped = run(stops, pieces)
    whole = "".join(pieces)
    assert whole.startswith(text)
    assert is_stopped == any(stop in whole for stop in stops)
    if is_stopped:
        assert not any(stop in text for stop in stops)
    else:
        assert text == whole
