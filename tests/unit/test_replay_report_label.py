"""How figures are written for people."""

from __future__ import annotations

import pytest

from replay import label


@pytest.mark.parametrize(
    ("value_s", "shown"),
    [
        (None, label.UNKNOWN),
        (0.0, "0 s"),
        (0.0000123, "12.3 µs"),
        (0.00123, "1.23 ms"),
        (0.0999, "99.9 ms"),
        (0.09996, "100 ms"),
        (1.5, "1.50 s"),
        (12345.0, "12,345 s"),
        (-0.25, "-250 ms"),
    ],
)
def test_times_have_three_digits_and_a_unit(value_s: float | None, shown: str) -> None:
    assert label.seconds(value_s) == shown


def test_unknown_is_not_written_as_zero() -> None:
    shown = {
        show(None)
        for show in (
            label.count,
            label.share,
            label.factor,
            label.times,
            label.difference,
            label.seconds,
            label.rate,
            label.size,
        )
    }
    assert shown == {label.UNKNOWN}


def test_memory_comes_in_the_unit_that_fits() -> None:
    assert label.size(512) == "512 B"
    assert label.size(3 * 2**30) == "3.00 GiB"
    assert label.size(1.5 * 2**40) == "1.50 TiB"


def test_a_difference_has_its_sign() -> None:
    assert label.difference(0.25) == "+250 ms"
    assert label.difference(-0.25) == "-250 ms"
    assert label.difference(0.0) == "0 s"


def test_ticks_have_no_needless_digits() -> None:
    assert [label.tick_seconds(t) for t in (0, 0.1, 0.25, 1, 2.5, 2000)] == [
        "0",
        "100 ms",
        "250 ms",
        "1 s",
        "2.5 s",
        "2,000 s",
    ]
    assert label.tick_share(0.2 + 0.1) == "30 %"


def test_foreign_text_loses_control_and_direction_characters_and_its_excess() -> None:
    assert label.foreign("a\x1b[31m\u202eb\n\ud800") == "a�[31m�b��"
    assert label.foreign("x" * 100) == "x" * 79 + "…"
    assert label.foreign("Zürich 東京") == "Zürich 東京"
