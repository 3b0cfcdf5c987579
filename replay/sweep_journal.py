"""The journal of a sweep: every trial that was evaluated, so that a sweep goes on where it ended.

JSON lines. The first one names the sweep by a digest of all that its figures depend on; a journal
of another sweep is refused.
"""

from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING, Final, Self

import msgspec
from msgspec import Struct

from replay.trial import Figures, Trial

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import IO

FORMAT: Final = 1
_BEGINNING: Final = b'{"format":'


class JournalError(Exception):
    """The journal cannot be used; the text says why and what to do."""


class _Head(Struct, frozen=True, kw_only=True):
    format: int
    sweep: str
    about: str = ""


class _Entry(Struct, frozen=True, kw_only=True):
    trial: Trial
    figures: Figures


class SweepJournal:
    """The known figures by trial, in memory and, where there is a file, on disk as they come."""

    def __init__(self) -> None:
        self._known: dict[Trial, Figures] = {}
        self._file: IO[bytes] | None = None

    @classmethod
    def opened(cls, path: Path, sweep: str, about: str = "") -> Self:
        """Return the journal at ``path``, begun where there is none; raises JournalError.

        A last line that was cut off is dropped.
        """
        journal = cls()
        try:
            file = path.open("a+b")
        except OSError as error:
            message = f"{path}: {error.strerror}"
            raise JournalError(message) from None
        journal._file = file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
            raw = file.read()
            whole = raw[: raw.rfind(b"\n") + 1]
            _check_begun(raw, path)
            journal._known.update(_entries(whole, path, sweep))
        except BlockingIOError:
            file.close()
            message = f"{path}: another sweep writes it now"
            raise JournalError(message) from None
        except JournalError:
            file.close()
            raise
        file.truncate(len(whole))
        if not whole:
            journal._write(_Head(format=FORMAT, sweep=sweep, about=about))
        return journal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def known(self) -> Mapping[Trial, Figures]:
        """Every trial that was evaluated, by this process or one before."""
        return self._known

    def record(self, trial: Trial, figures: Figures) -> None:
        """Remember one more."""
        self._known[trial] = figures
        self._write(_Entry(trial=trial, figures=figures))

    def _write(self, line: Struct) -> None:
        if self._file is not None:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()


def _check_begun(raw: bytes, path: Path) -> None:
    """Raise where a file without a whole line is no journal's beginning: it is somebody's."""
    if b"\n" not in raw and not raw.startswith(_BEGINNING) and not _BEGINNING.startswith(raw):
        message = f"{path}: not a sweep's journal"
        raise JournalError(message)


def _entries(whole: bytes, path: Path, sweep: str) -> dict[Trial, Figures]:
    lines = whole.splitlines()
    if not lines:
        return {}
    number = 1
    try:
        head = msgspec.json.decode(lines[0], type=_Head)
        if head.format != FORMAT or head.sweep != sweep:
            of_what = f" ({head.about})" if head.about else ""
            message = (
                f"{path}: the journal of another sweep{of_what}: its trace, fleet, policy or loads "
                f"differ. Name another file, or remove this one"
            )
            raise JournalError(message)
        known = {}
        for number, line in enumerate(lines[1:], start=2):  # noqa: B007 - told below
            entry = msgspec.json.decode(line, type=_Entry)
            known[entry.trial] = entry.figures
    except msgspec.DecodeError as error:
        message = f"{path}, line {number}: not a sweep's journal: {error}"
        raise JournalError(message) from None
    return known
