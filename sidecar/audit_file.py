"""Reading the audit's files back: line by line, oldest file first, however large they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from sidecar.audit import AuditFault
from sidecar.journal import Transition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from sidecar.audit import AuditReplay

LINE_BYTES: Final = 256 << 20
"""The longest line: a snapshot of some million pages."""
_DECODER: Final = msgspec.json.Decoder(Transition)


class AuditReadError(Exception):
    """A file is no audit log; the text names file, line and field."""


def replay_files(replay: AuditReplay, paths: Iterable[Path]) -> list[Path]:
    """Feed all files to ``replay`` in the order they were written.

    Returns the files whose last line is torn: their process died while it wrote. Raises AuditFault,
    with ``file`` and ``line`` set, at the first transition that cannot be true, and AuditReadError.
    """
    torn_files = []
    for path in sorted(paths, key=_age):
        line = 0
        try:
            for line, content in _lines(path):
                if content is None:
                    torn_files.append(path)
                else:
                    replay.feed(_decode(path, line, content))
        except AuditFault as fault:
            fault.file, fault.line = path, line
            raise
    if replay.transitions == 0:
        message = "expected lines of an audit, found none"
        raise AuditReadError(message)
    return torn_files


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield the numbered lines of a file; None in the place of one without an end."""
    try:
        with path.open("rb") as file:
            number = 0
            while content := file.readline(LINE_BYTES):
                number += 1
                if len(content) == LINE_BYTES and content[-1:] != b"\n":
                    message = f"{path}:{number}: expected lines of at most {LINE_BYTES} bytes"
                    raise AuditReadError(message)
                yield number, content if content[-1:] == b"\n" else None
    except OSError as error:
        message = f"{path}: {error.strerror or error}"
        raise AuditReadError(message) from None


def _decode(path: Path, line: int, content: bytes) -> Transition:
    try:
        transition = _DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`")
        told = text if text.startswith("JSON") else f"{text[0].lower()}{text[1:]}"
        message = f"{path}:{line}: {f'{field}: ' if field else ''}{told}"
        raise AuditReadError(message) from None
    if transition.n < 1:
        message = f"{path}:{line}: n: expected the line's number, got {transition.n}"
        raise AuditReadError(message)
    return transition


def _age(path: Path) -> tuple[float, int]:
    """Return where a file belongs: by run and line number; one that is torn at once comes last."""
    for line, content in _lines(path):
        if content is None:
            break
        first = _decode(path, line, content)
        return first.run, first.n
    return float("inf"), 0
