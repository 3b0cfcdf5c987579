"""Times as traces write them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

NANOSECONDS: Final = 1_000_000_000
"""In a second."""
_FRACTION_DIGITS: Final = 9
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DATE: Final = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))? ?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_NUMBER: Final = re.compile(r"(\d{1,12})(?:\.(\d{0,18}))?", re.ASCII)


def nanoseconds_of(text: str) -> int | None:
    """Return a date as nanoseconds since 1970, or seconds as nanoseconds; None for neither."""
    number = _NUMBER.fullmatch(text)
    if number is not None:
        return int(number[1]) * NANOSECONDS + _fraction(number[2])
    date = _DATE.fullmatch(text)
    if date is None:
        return None
    zone = "+00:00" if date[3] in {None, "Z"} else date[3]
    try:
        since = datetime.fromisoformat(date[1] + zone) - _EPOCH
    except ValueError:
        return None
    return since // timedelta(seconds=1) * NANOSECONDS + _fraction(date[2])


def _fraction(digits: str | None) -> int:
    return int((digits or "0")[:_FRACTION_DIGITS].ljust(_FRACTION_DIGITS, "0"))
