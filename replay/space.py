"""What of a policy can be tuned: its numbers, each over a range."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Struct
from msgspec.inspect import FloatType, IntType, StructType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Tunable = TypeVar("Tunable", bound=Struct)

Point: TypeAlias = tuple[float, ...]
"""One value per dimension, in the policy's own units."""

RANGES: Final[Mapping[str, Mapping[str, tuple[float, float]]]] = {
    # Only the ratios of the three weights matter, so w_queue stays and is the unit.
    "weighted": {"w_prefix": (0.1, 10.0), "w_recent": (0.02, 2.0)},
    "expected_ttft": {
        "w_active": (0.002, 0.2),
        "w_prefilling": (0.03, 3.0),
        "w_share": (0.04, 4.0),
        "w_copy": (0.05, 5.0),
        "active_ms": (1.6, 160.0),
    },
}
"""What is varied where nothing else is asked for, by the policy's kind."""

WIDE: Final = 10.0
"""A range whose ends are this far apart is walked by factors, not by steps."""

NARROW: Final = 1.0
"""A type that allows no more than this says all there is to try."""

DIGITS: Final = 4
"""A value is rounded to so many significant ones: people read and copy it."""

_VARIED: Final = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:=\s*([^:=]+?)\s*:\s*([^:=]+?)\s*)?")


class SpaceError(Exception):
    """A field cannot be varied so; the text names it and says what was expected."""


class Dimension(Struct, frozen=True, kw_only=True):
    """One field and its range, both ends included."""

    name: str
    low: float
    high: float
    is_log: bool
    is_whole: bool = False

    def value(self, place: float) -> float:
        """Return the value at ``place`` between the ends, which are 0 and 1."""
        place = min(max(place, 0.0), 1.0)
        if self.is_log:
            raw = self.low * (self.high / self.low) ** place
        else:
            raw = self.low + (self.high - self.low) * place
        rounded = float(round(raw)) if self.is_whole else float(f"{raw:.{DIGITS}g}")
        return min(max(rounded, self.low), self.high)

    def place(self, value: float) -> float:
        """Return where ``value`` is between the ends, which are 0 and 1; outside is an end."""
        inside = min(max(value, self.low), self.high)
        if self.is_log:
            return math.log(inside / self.low) / math.log(self.high / self.low)
        return (inside - self.low) / (self.high - self.low)


def kind_of(policy: Struct) -> str:
    """Return what the configuration calls this policy."""
    return str(policy.__struct_config__.tag)


def point_of(policy: Struct, space: Sequence[Dimension]) -> Point:
    """Return the policy's own values."""
    return tuple(float(getattr(policy, dimension.name)) for dimension in space)


def policy_at(policy: Tunable, space: Sequence[Dimension], point: Point) -> Tunable:
    """Return the policy with the values of ``point``, everything else as it is."""
    changes: dict[str, Any] = {
        dimension.name: int(value) if dimension.is_whole else value
        for dimension, value in zip(space, point, strict=True)
    }
    return msgspec.structs.replace(policy, **changes)


def parse_vary(text: str) -> dict[str, tuple[float, float] | None]:
    """Return the fields of ``w_prefix,w_queue=0.1:10``, and their ranges; raises SpaceError."""
    varied: dict[str, tuple[float, float] | None] = {}
    for part in text.split(","):
        found = _VARIED.fullmatch(part)
        if found is None:
            message = f"expected FIELD or FIELD=LOW:HIGH, got {part.strip()!r}"
            raise SpaceError(message)
        name = found[1]
        if name in varied:
            message = f"{name}: named twice"
            raise SpaceError(message)
        varied[name] = None if found[2] is None else _range_of(name, found[2], found[3])
    return varied


def space_of(
    policy: Struct, varied: Mapping[str, tuple[float, float] | None] | None = None
) -> tuple[Dimension, ...]:
    """Return the dimensions of ``varied``, of the policy's weights where it is None.

    Without a range of its own a field takes that of RANGES; else what its type allows, where that
    is no more than 1 wide; else a tenth to ten times its present value, as far as the type allows.
    Raises SpaceError.
    """
    numbers = _numbers_of(policy)
    if varied is None:
        varied = _default_varied(policy, numbers)
    dimensions = []
    for name, given in varied.items():
        if name not in numbers:
            known = ", ".join(numbers) or "none"
            message = f"{name}: not a number of policy {kind_of(policy)}, whose numbers are {known}"
            raise SpaceError(message)
        dimensions.append(_dimension(policy, name, given))
    return tuple(dimensions)


def _range_of(name: str, low_text: str, high_text: str) -> tuple[float, float]:
    try:
        low, high = float(low_text), float(high_text)
    except ValueError:
        message = f"{name}: expected two numbers LOW:HIGH, got {low_text}:{high_text}"
        raise SpaceError(message) from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        message = f"{name}: expected LOW below HIGH, got {low_text}:{high_text}"
        raise SpaceError(message)
    return low, high


def _numbers_of(policy: Struct) -> dict[str, FloatType | IntType]:
    described = msgspec.inspect.type_info(type(policy))
    if not isinstance(described, StructType):  # pragma: no cover - every policy is a struct
        return {}
    return {
        field.name: field.type
        for field in described.fields
        if isinstance(field.type, FloatType | IntType)
    }


def _default_varied(
    policy: Struct, numbers: Mapping[str, FloatType | IntType]
) -> dict[str, tuple[float, float] | None]:
    names = [name for name in RANGES.get(kind_of(policy), ()) if name in numbers]
    ranged = [name for name, number in numbers.items() if _has_range(policy, name, number)]
    names = names or [name for name in ranged if name.startswith("w_")] or ranged
    if not names:
        message = f"policy {kind_of(policy)} has no numbers to tune"
        raise SpaceError(message)
    return dict.fromkeys(names)


def _has_range(policy: Struct, name: str, number: FloatType | IntType) -> bool:
    try:
        _usual_range(policy, name, number)
    except SpaceError:
        return False
    return True


def _dimension(policy: Struct, name: str, given: tuple[float, float] | None) -> Dimension:
    number = _numbers_of(policy)[name]
    is_whole = isinstance(number, IntType)
    low, high = given or _usual_range(policy, name, number)
    for end in (low, high):
        if is_whole and end != round(end):
            message = f"{name}: expected whole numbers, got {low:g}:{high:g}"
            raise SpaceError(message)
        _check_allowed(policy, name, int(end) if is_whole else end)
    is_log = low > 0 and high / low >= WIDE
    return Dimension(name=name, low=low, high=high, is_log=is_log, is_whole=is_whole)


def _usual_range(policy: Struct, name: str, number: FloatType | IntType) -> tuple[float, float]:
    known = RANGES.get(kind_of(policy), {}).get(name)
    if known is not None:
        return known
    least, most = number.ge, number.le
    if least is not None and most is not None and most - least <= NARROW:
        return float(least), float(most)
    present = float(getattr(policy, name))
    if present <= 0:
        message = f"{name}: is {present:g} and has no range of its own, expected {name}=LOW:HIGH"
        raise SpaceError(message)
    low = present / WIDE if least is None else max(present / WIDE, least)
    high = present * WIDE if most is None else min(present * WIDE, most)
    if isinstance(number, IntType):
        return float(math.ceil(low)), float(math.floor(high))
    return float(f"{low:.{DIGITS}g}"), float(f"{high:.{DIGITS}g}")


def _check_allowed(policy: Struct, name: str, value: float) -> None:
    try:
        msgspec.convert({**msgspec.to_builtins(policy), name: value}, type(policy))
    except msgspec.ValidationError as error:
        what = str(error).partition(" - at `$.")[0]
        message = f"{name}: {what[0].lower()}{what[1:]}, got {value:g}"
        raise SpaceError(message) from None
