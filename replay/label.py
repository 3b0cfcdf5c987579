"""How reports write figures and foreign strings for people."""

from __future__ import annotations

UNKNOWN = "–"  # noqa: RUF001 - what tables show for unknown
LONGEST = 80

_TIMES = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def foreign(text: str, longest: int = LONGEST) -> str:
    """Return a name from a trace without control and direction characters, cut to ``longest``."""
    clean = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def count(value: float | None) -> str:
    """Return a count with thousands apart."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    """Return a ratio as a percentage."""
    return UNKNOWN if value is None else f"{100 * value:.1f} %"


def factor(value: float | None) -> str:
    """Return a ratio as a factor: 1 is the same."""
    return UNKNOWN if value is None else f"{value:.2f}"


def times(value: float | None) -> str:
    """Return how many times as much something is."""
    return UNKNOWN if value is None else f"{value:.2f}×"  # noqa: RUF001 - the sign for times


def difference(value: float | None) -> str:
    """Return a time that is more (+) or less (-) than another one."""
    return seconds(value) if value is None or value <= 0 else f"+{seconds(value)}"


def seconds(value: float | None) -> str:
    """Return a time of three digits, in the unit that fits it."""
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0 s"
    for least, scale, unit in _TIMES:
        if abs(value) >= least:
            return f"{digits(value * scale)} {unit}"
    return UNKNOWN


def digits(value: float) -> str:
    """Return a number with three digits, or all before the point where those are more."""
    size = abs(value)
    places = 0 if size >= 99.95 else 1 if size >= 9.995 else 2  # noqa: PLR2004 - powers of ten
    return f"{value:,.{places}f}"


def rate(value: float | None) -> str:
    """Return something per second."""
    return UNKNOWN if value is None else f"{digits(value)}/s"


def size(value_bytes: float | None) -> str:
    """Return an amount of memory in the unit that fits it."""
    if value_bytes is None:
        return UNKNOWN
    for least, unit in _BYTES:
        if value_bytes >= least:
            return f"{digits(value_bytes / least)} {unit}"
    return f"{value_bytes:,.0f} B"


def tick(value: float) -> str:
    """Return a number of an axis, without needless digits."""
    return f"{value:,.10g}" if abs(value) < 1e4 else f"{value:,.0f}"  # noqa: PLR2004 - readable


def tick_share(value: float) -> str:
    """Return a ratio of an axis."""
    return f"{tick(round(100 * value, 6))} %"


def tick_seconds(value: float) -> str:
    """Return a time of an axis, without needless digits."""
    if value == 0:
        return "0"
    for least, scale, unit in _TIMES:
        if abs(value) >= least:
            return f"{tick(round(value * scale, 3))} {unit}"
    return UNKNOWN
