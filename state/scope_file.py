"""The epochs of scopes in a file of this router's own: what outlives a process and a lost store.

Only its owner may read it, as it holds half of what salts are derived from. It is replaced whole,
and never with an earlier epoch than it has: two routers that share a file do no harm.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct

from state.scope_epoch import MAX_COUNTER, NO_EPOCH, NONCE_BYTES, ScopeEpoch
from state.whole_file import replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_KIND: Final = "scope epochs"
_OTHERS: Final = 0o077
_MOST_BYTES: Final = 64 << 20
_Nonce = Annotated[str, Meta(pattern=rf"\A([0-9a-f]{{{2 * NONCE_BYTES}}})?\Z")]


class ScopeFileError(ValueError):
    """The file cannot be used; the text names it and says what was expected."""


class _Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    counter: Annotated[int, Meta(ge=0, le=MAX_COUNTER)]
    nonce: _Nonce
    previous: _Nonce | None = None


class _Content(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    warmroute: str = _KIND
    version: int = 1
    scopes: dict[str, _Row] = {}


_decoder = msgspec.json.Decoder(_Content)


class EpochFile:
    """Reads and writes block for as long as the disk does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, ScopeEpoch]:
        """Return what is kept; nothing where there is no file. Raises ScopeFileError."""
        try:
            with self._path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                raw = file.read(_MOST_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as error:
            message = f"{self._path}: {error.strerror}"
            raise ScopeFileError(message) from None
        if mode & _OTHERS:
            message = f"{self._path}: expected a file that only its owner may read (chmod 600)"
            raise ScopeFileError(message)
        try:
            content = _decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            message = f"{self._path}: expected epochs of scopes as the router wrote them: {error}"
            raise ScopeFileError(message) from None
        if content.warmroute != _KIND or content.version != 1:
            message = f"{self._path}: expected {_KIND!r} of version 1"
            raise ScopeFileError(message)
        return {scope: _epoch(row) for scope, row in content.scopes.items()}

    def write(self, epochs: Mapping[str, ScopeEpoch]) -> None:
        """Keep ``epochs`` until a later one of the same scope comes. Raises OSError.

        Also raises ScopeFileError for what is there and cannot be read: it might be later.
        """
        kept = self.read()
        for scope, epoch in epochs.items():
            if epoch.is_later(kept.get(scope, NO_EPOCH)):
                kept[scope] = epoch
        rows = {scope: _row(epoch) for scope, epoch in sorted(kept.items())}
        encoded = msgspec.json.format(msgspec.json.encode(_Content(scopes=rows)), indent=1)
        replace_file(self._path, encoded + b"\n")


def _epoch(row: _Row) -> ScopeEpoch:
    previous = None if row.previous is None else bytes.fromhex(row.previous)
    return ScopeEpoch(row.counter, bytes.fromhex(row.nonce), previous)


def _row(epoch: ScopeEpoch) -> _Row:
    previous = None if epoch.previous is None else epoch.previous.hex()
    return _Row(counter=epoch.counter, nonce=epoch.nonce.hex(), previous=previous)
