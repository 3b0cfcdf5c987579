"""What the life of an engine's cache is called, so that a sidecar that starts again says the same.

A cache lives as long as the engine's process, which tells when it started, unless it is voided
before. An engine that does not tell has lives that only its sidecar knows, and that end with it.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from sidecar.metrics import RenewalReason
from sidecar.subscriber import ResetReason

if TYPE_CHECKING:
    from sidecar.profile import EngineProfile

RENEWAL_OF_RESET: Final = {
    ResetReason.CONNECTED: RenewalReason.START,
    ResetReason.RESTARTED: RenewalReason.RESTARTED,
    ResetReason.LOST: RenewalReason.LOST,
    ResetReason.REQUESTED: RenewalReason.RESTARTED,
}
_VOIDING: Final = frozenset({RenewalReason.WEIGHTS, RenewalReason.ASKED})
"""What empties a cache within one process; other renewals only lose what was known of it."""


class CacheLife:
    """The name of the current life; empty where it is not known."""

    def __init__(self) -> None:
        self._process = ""
        self.name = ""

    def begin(self, profile: EngineProfile, reason: RenewalReason, *, is_known: bool) -> None:
        """Follow a renewal of what is known of the cache.

        ``is_known`` is False where the engine began another life and was not asked of it yet.
        """
        process = _process_of(profile)
        if not is_known:
            self._process = self.name = ""
        elif process != self._process:
            self._process = self.name = process
        elif process and reason in _VOIDING:
            self.name = f"{process}.{secrets.token_hex(3)}"

    def settled(self, profile: EngineProfile) -> str:
        """Return the name, now that the engine was asked."""
        if not self.name:
            self._process = self.name = _process_of(profile)
        return self.name


def _process_of(profile: EngineProfile) -> str:
    """Return what only this process with these weights is called; empty where it cannot be told."""
    if profile.started_at_s is None:
        return ""
    told = f"{profile.started_at_s!r} {profile.identity.weights_revision}"
    return blake2b(told.encode(), digest_size=6).hexdigest()
