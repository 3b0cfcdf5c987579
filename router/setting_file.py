"""The last settings that a router knew, kept beside it for a start without the state store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct

from state.schema import MALFORMED
from state.setting_book import SettingDocument
from state.whole_file import replace_file

if TYPE_CHECKING:
    from pathlib import Path

KIND: Final = "settings"


class KeptSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The version in force and the last versions, newest first."""

    warmroute: str = KIND
    format: int = 1
    in_force: Annotated[int, Meta(ge=0)] = 0
    versions: tuple[SettingDocument, ...] = ()


class SettingFileError(Exception):
    """The file is not one that a router wrote; the text names it."""


class SettingFile:
    """Reads and replaces one file; every call may block for as long as the disk does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> KeptSettings:
        """Return what is kept, nothing where there is no file; raises SettingFileError, OSError."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=KeptSettings)
        except FileNotFoundError:
            return KeptSettings()
        except MALFORMED as error:
            message = f"{self._path}: expected settings as the router wrote them: {error}"
            raise SettingFileError(message) from None
        if kept.warmroute != KIND or kept.format != 1:
            message = f"{self._path}: expected {KIND!r} of format 1"
            raise SettingFileError(message)
        return kept

    def write(self, kept: KeptSettings) -> None:
        """Replace the file as a whole; raises OSError."""
        text = msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n"
        replace_file(self._path, text)
