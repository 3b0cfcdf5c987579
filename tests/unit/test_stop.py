from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.stop import Passed, StopFilter


def test_without_stop_strings_everything_passes() -> None:
    assert StopFilter([]).feed("abc") == Passed("abc")


def test_a_stop_string_across_deltas_is_never_shown() -> None:
    stop = StopFilter(["END"])
    assert stop.feed("so E") == Passed("so ")
    assert stop.feed("N") == Passed("")
    assert stop.feed("D and more") == Passed("", "END")


def test_what_looked_like_a_stop_string_and_is_none_is_shown_later() -> None:
    stop = StopFilter(["END"])
    assert stop.feed("E").text == ""
    assert stop.feed("NX").text == "ENX"
    assert stop.feed("EN").text == ""
    assert stop.flush() == "EN"


def test_the_earliest_stop_string_wins() -> None:
    assert StopFilter(["late", "a l"]).feed("be a late one") == Passed("be ", "a l")


@given(
    stops=st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=3),
    text=st.text("ab ", max_size=40),
    sizes=st.lists(st.integers(0, 4), max_size=20),
)
def test_the_outcome_is_that_of_the_whole_text_however_it_is_cut(
    stops: list[str], text: str, sizes: list[int]
) -> None:
    ends = [
        (end, stop)
        for end in range(len(text) + 1)
        for stop in sorted(stops, key=len, reverse=True)
        if text[:end].endswith(stop)
    ]
    expected = (text, None) if not ends else (text[: ends[0][0] - len(ends[0][1])], ends[0][1])
    stop_filter = StopFilter(stops)
    shown, start = "", 0
    for size in [*sizes, len(text)]:
        passed = stop_filter.feed(text[start : start + size])
        shown += passed.text
        start += size
        if passed.stopped_by is not None:
            assert (shown, passed.stopped_by) == expected
            return
    assert (shown + stop_filter.flush(), None) == expected


def test_what_cannot_become_a_stop_string_is_shown_at_once() -> None:
    stop = StopFilter(["aab", "\n\n"])
    assert [stop.feed(char).text for char in "aaac\n."] == ["", "", "a", "aac", "", "\n."]


def test_of_two_that_end_together_the_longer_is_the_reason() -> None:
    assert StopFilter(["b", "ab", "xb"]).feed("cab") == Passed("c", "ab")
