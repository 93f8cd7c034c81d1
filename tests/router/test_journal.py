from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from kvferry.messages import NewTokens, Sampling
from router.journal import Acceptance, FinishReason, Journal


def journal(max_tokens=10, stop_ids=(), stops=(), n=1):
    def letters():
        return SimpleNamespace(push=lambda token: chr(97 + token), flush=lambda: "")

    made = Journal(n, Sampling(1, max_tokens, stop_token_ids=stop_ids), letters, stops)
    made.next_attempt()
    return made


def new(index, *tokens, attempt=1, choice=0):
    return NewTokens(1, attempt, choice, index, tokens)


def test_tokens_are_taken_once_in_order_from_the_current_attempt():
    j = journal()
    assert j.accept(new(0, 1, 2)) is Acceptance.NEW
    assert j.accept(new(0, 1, 2)) is Acceptance.STALE
    assert j.accept(new(1, 2, 3)) is Acceptance.NEW
    assert j.accept(new(5, 9)) is Acceptance.GAP
    j.next_attempt()
    assert j.accept(new(3, 4)) is Acceptance.STALE
    assert j.accept(new(3, 4, attempt=2)) is Acceptance.NEW
    assert j.choices[0].tokens == [1, 2, 3, 4]


def test_a_choice_ends_by_itself_at_its_limit_or_stop_token():
    j = journal(max_tokens=2)
    j.accept(new(0, 1, 2, 3))
    assert (j.choices[0].tokens, j.choices[0].finish) == ([1, 2], FinishReason.LENGTH)
    j = journal(stop_ids=(5,))
    j.accept(new(0, 1, 5, 6))
    assert (j.choices[0].tokens, j.choices[0].text, j.choices[0].finish) == ([1, 5], "b", FinishReason.STOP)


def test_a_stop_string_over_several_tokens_cuts_the_text_and_counts_the_tokens():
    j = journal(stops=("bcd",))
    for index, token in enumerate((0, 1, 2)):
        j.accept(new(index, token))
    assert j.choices[0].text == "a"
    j.accept(new(3, 3, 4))
    assert (j.choices[0].text, len(j.choices[0].tokens), j.choices[0].finish) == ("a", 4, FinishReason.STOP)


def test_text_held_back_for_a_stop_goes_out_at_the_end():
    j = journal(max_tokens=2, stops=("bcd",))
    j.accept(new(0, 1, 2))
    assert (j.choices[0].text, j.choices[0].finish) == ("bc", FinishReason.LENGTH)


def test_another_attempt_goes_on_with_the_choices_that_are_open():
    j = journal(max_tokens=3, n=2)
    j.accept(new(0, 1, 2, 3, choice=0))
    j.accept(new(0, 7, choice=1))
    (start,) = j.starts()
    assert (start.choice, start.emitted_tokens) == (1, (7,))
    assert not j.is_done


@given(st.lists(st.integers(1, 4), max_size=12), st.data())
def test_readers_at_any_pace_see_every_token_and_all_text_once(bursts, data):
    j, position, text, tokens, finishes, index = journal(max_tokens=20, stops=("zz",)), 0, "", [], [], 0
    for burst in bursts:
        j.accept(new(index, *range(index, index + burst)))
        index += burst
        if data.draw(st.booleans()):
            delta, position = j.choices[0].read(position)
            if delta:
                text, tokens = text + delta.text, [*tokens, *delta.token_ids]
                finishes.append(delta.finish)
    delta, position = j.choices[0].read(position)
    if delta:
        text, tokens = text + delta.text, [*tokens, *delta.token_ids]
        finishes.append(delta.finish)
    assert tokens == j.choices[0].tokens
    assert text == j.choices[0].text
    assert [f for f in finishes if f] == ([FinishReason.LENGTH] if index >= 20 else [])
