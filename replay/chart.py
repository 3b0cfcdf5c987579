"""Charts as inline SVG: lines and bars, without scripts, in the colours of the page around them.

Every figure has a title and a description for who cannot see it, and every point its value as a
tooltip. Lines differ in dashes too, not in colour alone.
"""

from __future__ import annotations

from html import escape
from math import ceil, floor, log10
from typing import TYPE_CHECKING

from msgspec import Struct

from replay import label

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

WIDTH, HEIGHT = 560, 280
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 12, 48
ROW = 24
NAME_WIDTH = 112
STYLES = 8
"""Lines that can be told apart; a chart has no more."""
TOOLTIPS = 50
LAST = 0.97
"""A tick label beyond this part of the width ends at its tick, so that it is not cut."""


class Line(Struct, frozen=True, kw_only=True):
    """A named line through points from left to right; it is broken where y is None."""

    name: str
    points: tuple[tuple[float, float | None], ...]


class Bar(Struct, frozen=True, kw_only=True):
    """A named bar and what is written at its end."""

    name: str
    amount: float
    text: str


class Caption(Struct, frozen=True, kw_only=True):
    """What a figure is called and says; ``key`` is unique on the page."""

    key: str
    title: str
    description: str
    x_label: str = ""
    y_label: str = ""


class Axis:
    """A scale from its first tick to ``high``; what is below the first tick is drawn at it."""

    def __init__(
        self,
        ticks: Sequence[float],
        show: Callable[[float], str],
        *,
        high: float,
        place: Callable[[float], float] = float,
        note: str = "",
    ) -> None:
        self.ticks = ticks
        self.show = show
        self.note = note
        self._place = place
        self._low = place(ticks[0])
        self._extent = place(high) - self._low

    def fraction(self, value: float) -> float:
        """Return where ``value`` is, from 0 at the first tick to 1 at the end."""
        return (self._place(max(value, self.ticks[0])) - self._low) / self._extent


def linear_axis(values: Iterable[float], show: Callable[[float], str], *, low: float = 0.0) -> Axis:
    """Return an axis from ``low`` to the first round number that no value is above."""
    extent = max([*values, low]) - low or 1.0
    step = _step(extent)
    count = max(2, ceil(extent / step - 1e-9))
    ticks = [low + step * index for index in range(count + 1)]
    return Axis(ticks, show, high=ticks[-1])


def span_axis(high: float, show: Callable[[float], str]) -> Axis:
    """Return an axis from 0 to exactly ``high``, with the round numbers on the way as ticks."""
    extent = high or 1.0
    step = _step(extent)
    count = floor(extent / step + 1e-9)
    return Axis([step * index for index in range(count + 1)], show, high=extent)


def _step(extent: float) -> float:
    """Return a round number of which 2 to 5 make up ``extent``."""
    power = 10.0 ** floor(log10(extent / 4))
    return next(power * of for of in (1, 2, 2.5, 5, 10) if extent <= 5 * power * of * 1.0000001)


def log_axis(values: Iterable[float], show: Callable[[float], str]) -> Axis:
    """Return a logarithmic axis around the positive values; decades, or 1-2-5 where those do."""
    positive = [value for value in values if value > 0] or [1.0]
    least, most = min(positive), max(positive)
    decades = range(floor(log10(least)) - 1, ceil(log10(most)) + 2)
    ticks = _around([10.0**power for power in decades], least, most)
    if len(ticks) <= 3:  # noqa: PLR2004 - two decades
        ticks = _around([of * 10.0**power for power in decades for of in (1, 2, 5)], least, most)
    return Axis(ticks, show, high=ticks[-1], place=log10, note="logarithmic")


def _around(ticks: Sequence[float], least: float, most: float) -> list[float]:
    """Return the ticks from the last one not above ``least`` to the first not below ``most``."""
    first = max(index for index, tick in enumerate(ticks) if tick <= least * 1.0000001)
    last = min(index for index, tick in enumerate(ticks) if tick >= most * 0.9999999)
    return list(ticks[first : max(last, first + 1) + 1])


def line_chart(caption: Caption, lines: Sequence[Line], x_axis: Axis, y_axis: Axis) -> str:
    """Return a figure with at most 8 lines and their legend."""
    drawn = lines[:STYLES]
    parts = [*_x_grid(x_axis), *_y_grid(y_axis), *_axis_labels(caption)]
    for style, line in enumerate(drawn):
        placed = [
            (
                x,
                y,
                LEFT + x_axis.fraction(x) * (WIDTH - LEFT - RIGHT),
                HEIGHT - BOTTOM - y_axis.fraction(y or 0.0) * (HEIGHT - TOP - BOTTOM),
            )
            for x, y in line.points
        ]
        parts.append(f'<path class="line s{style}" d="{_path(placed)}"/>')
        every = max(1, len(placed) // TOOLTIPS)
        parts.extend(
            f'<circle class="spot s{style}" cx="{left:.1f}" cy="{top:.1f}" r="5"><title>'
            f"{_name(line.name)}: {escape(y_axis.show(y))} at {escape(x_axis.show(x))}"
            "</title></circle>"
            for x, y, left, top in placed[::every]
            if y is not None
        )
    note = " · ".join(filter(None, (caption.y_label, y_axis.note)))
    return _figure(caption, parts, HEIGHT, note, _legend(drawn, len(lines)))


def _path(placed: Sequence[tuple[float, float | None, float, float]]) -> str:
    """Return the path through the known points; one without neighbours is a dot."""
    steps: list[str] = []
    known = [False, *(y is not None for _, y, _, _ in placed), False]
    for index, (_, y, left, top) in enumerate(placed, start=1):
        if y is None:
            continue
        steps.append(f"{'L' if known[index - 1] else 'M'}{left:.1f} {top:.1f}")
        if not known[index - 1] and not known[index + 1]:
            steps.append("h0.1")
    return "".join(steps)


def _x_grid(axis: Axis) -> Iterable[str]:
    bottom = HEIGHT - BOTTOM
    for tick in axis.ticks:
        place = axis.fraction(tick)
        left = LEFT + place * (WIDTH - LEFT - RIGHT)
        kind = "last" if place > LAST else "x"
        yield f'<path class="tick" d="M{left:.1f} {bottom}v5"/>'
        shown = escape(axis.show(tick))
        yield f'<text class="{kind}" x="{left:.1f}" y="{bottom + 21}">{shown}</text>'


def _y_grid(axis: Axis) -> Iterable[str]:
    for tick in axis.ticks:
        top = HEIGHT - BOTTOM - axis.fraction(tick) * (HEIGHT - TOP - BOTTOM)
        kind = "base" if tick == axis.ticks[0] else "grid"
        yield f'<path class="{kind}" d="M{LEFT} {top:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text class="y" x="{LEFT - 8}" y="{top + 4:.1f}">{escape(axis.show(tick))}</text>'


def _axis_labels(caption: Caption) -> Iterable[str]:
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    if caption.x_label:
        yield f'<text class="x axis" x="{middle}" y="{HEIGHT - 6}">{escape(caption.x_label)}</text>'


def bar_chart(caption: Caption, bars: Sequence[Bar], mark: float | None = None) -> str:
    """Return a figure with one row a bar, and a dashed line at ``mark``."""
    most = max([bar.amount for bar in bars] + [mark or 0.0]) or 1.0
    room = WIDTH - NAME_WIDTH - RIGHT - 56
    height = TOP + ROW * len(bars) + TOP
    parts: list[str] = []
    for index, bar in enumerate(bars):
        top = TOP + ROW * index
        width = max(1.0, bar.amount / most * room)
        parts.append(
            f"<g><title>{_name(bar.name)}: {escape(bar.text)}</title>"
            f'<text class="y" x="{NAME_WIDTH - 8}" y="{top + 16}">{_name(bar.name, 15)}</text>'
            f'<rect class="bar" x="{NAME_WIDTH}" y="{top + 4}" width="{width:.1f}" '
            f'height="{ROW - 8}" rx="2"/>'
            f'<text class="end" x="{WIDTH - RIGHT}" y="{top + 16}">'
            f"{escape(bar.text)}</text></g>"
        )
    if mark is not None:
        left = NAME_WIDTH + mark / most * room
        parts.append(f'<path class="mark" d="M{left:.1f} {TOP - 4}V{height - TOP + 4}"/>')
    return _figure(caption, parts, height, caption.y_label, "")


def _legend(drawn: Sequence[Line], lines: int) -> str:
    if lines < 2:  # noqa: PLR2004 - one line needs no legend
        return ""
    items = "".join(
        f'<li><svg width="28" height="10" aria-hidden="true"><path class="line s{style}" '
        f'd="M1 5H27"/></svg> {_name(line.name)}</li>'
        for style, line in enumerate(drawn)
    )
    if lines > len(drawn):
        items += f"<li>{lines - len(drawn)} more are in the tables only</li>"
    return f'<ul class="legend">{items}</ul>'


def _figure(caption: Caption, parts: Sequence[str], height: float, note: str, legend: str) -> str:
    key = escape(caption.key)
    unit = f' <span class="unit">{escape(note)}</span>' if note else ""
    return (
        f"<figure><figcaption>{escape(caption.title)}{unit}</figcaption>{legend}"
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-labelledby="{key}-title {key}-desc"><title id="{key}-title">'
        f'{escape(caption.title)}</title><desc id="{key}-desc">{escape(caption.description)}</desc>'
        f"{''.join(parts)}</svg></figure>"
    )


def _name(text: str, longest: int = label.LONGEST) -> str:
    return escape(label.foreign(text, longest))
