"""Reads single fields of a model's JSON files; what does not fit is a ModelError."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JSON_MAX_BYTES: Final = 64 * 1024 * 1024
TOKEN_MAX_COUNT: Final = 1 << 31
SHOWN_CHARACTERS: Final = 120


class ModelError(ValueError):
    """A model's files cannot be served; names the ``field`` and what was ``expected`` there."""

    def __init__(self, field: str, expected: str, found: object = None) -> None:
        self.field = field
        self.expected = expected
        shown = "" if found is None else f", found {_shown(found)}"
        super().__init__(f"{field}: expected {expected}{shown}")


def _shown(found: object) -> str:
    text = found if isinstance(found, str) else repr(found)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def read_table(path: Path) -> Fields:
    """Return the JSON object in ``path``; raises ModelError."""
    try:
        if path.stat().st_size > JSON_MAX_BYTES:
            raise ModelError(path.name, f"at most {JSON_MAX_BYTES} bytes")
        table = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ModelError(path.name, "a readable file", error.strerror or error) from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(path.name, "JSON", str(error)) from error
    if not isinstance(table, dict):
        raise ModelError(path.name, "a JSON object", type(table).__name__)
    return Fields(table)


class Fields:
    """The fields of one JSON object. A null counts as absent. All readers raise ModelError.

    Each reader returns its ``default`` for an absent field; without one the field is required.
    """

    def __init__(self, table: dict[str, Any], prefix: str = "") -> None:
        self._table = table
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self._table.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def value(self, name: str) -> object:
        """Return what stands there as it is; None where nothing does."""
        found: object = self._table.get(name)
        return found

    def refuse(self, name: str, expected: str, found: object = None) -> NoReturn:
        """Raise the ModelError that a field is not what was ``expected``."""
        raise ModelError(self._prefix + name, expected, found)

    def count(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = TOKEN_MAX_COUNT
    ) -> int:
        """Return an integer between ``least`` and ``most``."""
        found = self._table.get(name)
        if found is None and default is not None:
            return default
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
            expected = f"an integer from {least} to {most}"
            self.refuse(name, expected, "nothing" if found is None else found)
        return found

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        """Return a finite number greater than ``above``."""
        found = self.optional_number(name, above=above)
        if found is None and default is None:
            self.refuse(name, f"a number greater than {above:g}", "nothing")
        return default if found is None and default is not None else float(found or 0.0)

    def optional_number(self, name: str, *, above: float = 0.0) -> float | None:
        """Return a finite number greater than ``above``, or None where there is none."""
        found = self._table.get(name)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int | float):
            self.refuse(name, f"a number greater than {above:g}", found)
        try:
            number = float(found)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number <= above:
            self.refuse(name, f"a number greater than {above:g}", found)
        return number

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean."""
        found = self._table.get(name)
        if found is None:
            return default
        if not isinstance(found, bool):
            self.refuse(name, "true or false", found)
        return found

    def text(self, name: str) -> str | None:
        """Return a string, or None where there is none."""
        found = self._table.get(name)
        if found is not None and not isinstance(found, str):
            self.refuse(name, "a string", found)
        return found

    def required_text(self, name: str) -> str:
        """Return a string."""
        found = self.text(name)
        if found is None:
            self.refuse(name, "a string", "nothing")
        return found

    def texts(self, name: str) -> list[str] | None:
        """Return a list of strings, or None where there is none."""
        found = self._table.get(name)
        if found is None:
            return None
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            self.refuse(name, "a list of strings", found)
        return found

    def token_ids(self, name: str, vocabulary_size: int) -> tuple[int, ...]:
        """Return one token id or a list of them as a tuple, empty where there is none."""
        found = self._table.get(name)
        if found is None:
            return ()
        listed = found if isinstance(found, list) else [found]
        for token in listed:
            is_id = isinstance(token, int) and not isinstance(token, bool)
            if not is_id or not 0 <= token < vocabulary_size:
                self.refuse(name, f"token ids below {vocabulary_size}", token)
        return tuple(listed)

    def inner(self, name: str) -> Fields | None:
        """Return the fields of an object within, or None where there is none."""
        found = self._table.get(name)
        if found is None:
            return None
        if not isinstance(found, dict):
            self.refuse(name, "a JSON object", found)
        return Fields(found, f"{self._prefix}{name}.")
