from __future__ import annotations

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
