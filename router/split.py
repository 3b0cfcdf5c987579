"""Which side of a canary a request is on: the same for every turn, in every router.

A hash of what the conversation began with, or of the tenant, under the canary's own seed. Half of
it says the side and half the group (``router.confidence``), so that neither tells of the other.
"""

from __future__ import annotations

import enum
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from router.canary_setting import CanarySettings

GROUPS: Final = 32
"""Of each side: enough for a variance, few enough to be told to other routers."""
POINTS: Final = 1 << 64
TENANT: Final = "tenant"


class Side(enum.StrEnum):
    """Whose policy decides."""

    CONTROL = "control"
    CANDIDATE = "candidate"


CONTROL: Final = Side.CONTROL
CANDIDATE: Final = Side.CANDIDATE


class Assigned(NamedTuple):
    """Where a request belongs."""

    side: Side
    group: int


class Splitter:
    """Assigns requests; a pure function of the settings."""

    def __init__(self, settings: CanarySettings) -> None:
        self._key = settings.seed.to_bytes(8, "big")
        self._below = int((settings.percent or 0.0) / 100.0 * POINTS)
        self.by_tenant = settings.split == TENANT
        self._named = frozenset(settings.tenants)

    def assign(self, opening: bytes | None, tenant: str | None) -> Assigned | None:
        """Return the side; None for a request that has nothing to be hashed: it takes no part."""
        if self.by_tenant:
            if tenant is None:
                return None
            opening = tenant.encode()
        elif opening is None:
            return None
        digest = blake2b(opening, digest_size=16, key=self._key).digest()
        point = int.from_bytes(digest[:8])
        is_candidate = tenant in self._named if self._named else point < self._below
        return Assigned(CANDIDATE if is_candidate else CONTROL, digest[8] % GROUPS)
