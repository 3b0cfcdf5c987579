"""Where charts put their ticks, lines and bars."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay import label
from replay.chart import Bar, Caption, Line, bar_chart, line_chart, linear_axis, log_axis, span_axis

CAPTION = Caption(key="k", title="T", description="D", x_label="x", y_label="y")


def _paths(figure: str) -> list[str]:
    main = figure[figure.index("<svg viewBox") :]
    return re.findall(r'<path class="line s\d" d="([^"]*)"', main)


def test_a_linear_axis_ends_at_a_round_number() -> None:
    assert list(linear_axis([3.2], label.tick).ticks) == [0, 1, 2, 3, 4]
    assert list(linear_axis([1.0], label.tick).ticks) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert list(linear_axis([1.4], label.tick, low=1.0).ticks) == pytest.approx(
        [1, 1.1, 1.2, 1.3, 1.4]
    )


def test_an_axis_of_nothing_has_ticks_too() -> None:
    assert len(linear_axis([], label.tick).ticks) > 1
    assert len(linear_axis([0.0], label.tick).ticks) > 1
    assert len(log_axis([], label.tick).ticks) > 1
    assert len(log_axis([0.0], label.tick).ticks) > 1


@settings(deadline=None)
@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=5))
def test_every_value_lies_on_its_axis(values: list[float]) -> None:
    for axis in (
        linear_axis(values, label.tick),
        log_axis(values, label.tick),
        span_axis(max(values), label.tick),
    ):
        assert all(-1e-6 <= axis.fraction(value) <= 1 + 1e-6 for value in values)
        assert 2 <= len(axis.ticks) <= 20


def test_a_span_axis_ends_where_the_values_do() -> None:
    axis = span_axis(1823.0, label.tick)
    assert list(axis.ticks) == [0, 500, 1000, 1500]
    assert axis.fraction(1823.0) == 1


def test_a_logarithmic_axis_has_decades_where_they_do() -> None:
    assert list(log_axis([0.02, 300.0], label.tick).ticks) == pytest.approx(
        [0.01, 0.1, 1, 10, 100, 1000]
    )
    assert list(log_axis([3.0, 30.0], label.tick).ticks) == pytest.approx([2, 5, 10, 20, 50])
    assert log_axis([3.0, 300.0], label.tick).fraction(0.0) == 0


def test_a_line_goes_from_left_to_right_and_up() -> None:
    figure = line_chart(
        CAPTION,
        [Line(name="a", points=((0.0, 0.0), (4.0, 4.0)))],
        span_axis(4.0, label.tick),
        linear_axis([4.0], label.tick),
    )
    assert _paths(figure) == ["M62.0 232.0L544.0 12.0"]


def test_a_line_is_broken_where_nothing_is_known() -> None:
    figure = line_chart(
        CAPTION,
        [Line(name="a", points=((0.0, 1.0), (1.0, 2.0), (2.0, None), (3.0, 3.0), (4.0, None)))],
        span_axis(4.0, label.tick),
        linear_axis([4.0], label.tick),
    )
    (path,) = _paths(figure)
    assert re.sub(r"[\d. ]", "", path) == "MLMh"
    assert figure.count("<circle") == 3


def test_a_chart_draws_eight_lines_and_says_that_there_are_more() -> None:
    lines = [Line(name=f"line {n}", points=((0.0, 1.0), (1.0, 1.0))) for n in range(10)]
    figure = line_chart(CAPTION, lines, span_axis(1.0, label.tick), linear_axis([1.0], label.tick))
    assert len(_paths(figure)) == 8
    assert "2 more are in the tables only" in figure


def test_bars_are_as_long_as_their_amounts() -> None:
    figure = bar_chart(
        CAPTION, [Bar(name="a", amount=10, text="10"), Bar(name="b", amount=5, text="5")], 7.5
    )
    long, short = (float(width) for width in re.findall(r'width="([\d.]+)" height="16"', figure))
    assert short == pytest.approx(long / 2, abs=0.1)
    assert 'class="mark"' in figure


def test_bars_of_nothing_are_drawn() -> None:
    ET.fromstring(bar_chart(CAPTION, [Bar(name="a", amount=0, text="0")], 0.0))  # noqa: S314
    ET.fromstring(bar_chart(CAPTION, [], None))  # noqa: S314 - our own text


def test_a_figure_says_what_it_is_to_who_cannot_see_it() -> None:
    root = ET.fromstring(bar_chart(CAPTION, [], None))  # noqa: S314 - our own text
    svg = root.find("svg")
    assert svg is not None
    assert svg.get("role") == "img"
    assert svg.get("aria-labelledby") == "k-title k-desc"
    assert [(part.get("id"), part.text) for part in svg][:2] == [("k-title", "T"), ("k-desc", "D")]


def test_foreign_names_are_escaped_in_every_place() -> None:
    name = '<b a="\'">&</b>\x1b'
    lines = [Line(name=name, points=((0.0, 1.0),)), Line(name=name, points=())]
    bars = [Bar(name=name, amount=1, text=name)]
    caption = Caption(key=name, title=name, description=name, x_label=name, y_label=name)
    axis = linear_axis([1.0], lambda _: name)
    for figure in (line_chart(caption, lines, axis, axis), bar_chart(caption, bars)):
        assert "<b" not in figure.replace("<bar", "")
        assert 'a="' not in figure
