"""What the operators' paths for settings take and answer, as types."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import UNSET, Meta, Struct, UnsetType

from router.settings import FIXED, Change, LiveSettings

_LINE: Final = r"\A(?=.*\S)[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z"

Author = Annotated[
    str, Meta(max_length=128, pattern=_LINE, description="a line of up to 128 characters")
]
Reason = Annotated[
    str, Meta(max_length=500, pattern=_LINE, description="a line of up to 500 characters")
]
Version = Annotated[int, Meta(ge=0)]


class SetBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change: ``patch`` is a JSON merge patch of the document, null gives a key back."""

    patch: dict[str, Any]
    author: Author
    reason: Reason
    expected_version: Version
    dry_run: bool = False


class RollbackBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Back to what an earlier ``version`` had; 0: to the configuration file alone."""

    version: Version
    author: Author
    reason: Reason
    expected_version: Version | None = None
    dry_run: bool = False


class DrainBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who drains a replica, and why. ``hand_over``: what it alone holds goes to others first."""

    author: Author
    reason: Reason
    hand_over: bool = False


class SettingsView(Struct, frozen=True, kw_only=True):
    """What is in force here. ``version`` 0: the file alone, which nobody signed.

    ``sources`` tells of each key whether its value is the document's or the file's. ``fault``: why
    ``stored_version``, which the store has, is not in force; empty where it is.
    """

    version: int
    stored_version: int
    author: str | None
    reason: str | None
    unix_s: float | None
    previous: int | None
    values: LiveSettings
    sources: dict[str, str]
    document: dict[str, Any]
    fault: str = ""
    needs_start: tuple[str, ...] = FIXED


class SettingsChange(Struct, frozen=True, kw_only=True):
    """The answer to a change, made or only tried; ``verdict``: of the canary that it ends."""

    version: int
    previous: int
    dry_run: bool
    changes: list[Change]
    verdict: dict[str, Any] | UnsetType = UNSET


class HistoryRow(Struct, frozen=True, kw_only=True):
    """One version, and what it changed against the one before it, where that is known.

    ``verdict``: of the canary that it ended (``router.canary_verdict``).
    """

    version: int
    previous: int
    author: str
    reason: str
    unix_s: float
    changes: list[Change] | None
    verdict: dict[str, Any] | None = None


class VersionView(Struct, frozen=True, kw_only=True):
    """One version with its document and, where both are known, its changes."""

    row: HistoryRow
    document: dict[str, Any]
