"""Whose policy decides: the one in force, or for a part of the requests the candidate of a canary.

A ``Trial`` is one comparison: a split, two policies, and what was counted of both sides. It begins
anew with each change of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from router.burst import Burst
from router.canary_sums import Counter
from router.split import TENANT, Splitter

if TYPE_CHECKING:
    from policies.model import Policy
    from router.canary_setting import CanarySettings
    from router.chooser import Routed
    from router.split import Assigned


class DecidedBy(NamedTuple):
    """A rule, and the version of the settings that it is of (0: the file's)."""

    policy: Policy
    settings_version: int


class Trial:
    """One comparison. ``decided_by`` is the candidate, by the version of the settings in force."""

    def __init__(self, settings: CanarySettings, epoch: str, version: int) -> None:
        self.epoch = epoch
        self.counter = Counter()
        self.burst = Burst(by_tenant=settings.split == TENANT)
        self.follow(settings, version)
        self._splitter = Splitter(settings)

    def follow(self, settings: CanarySettings, version: int) -> None:
        """Go on by settings of the same split and policies."""
        self.settings = settings
        self.decided_by = DecidedBy(settings.policy, version)

    def assign(self, routed: Routed) -> Assigned | None:
        """Return the side of a request; None for one that takes no part."""
        return self._splitter.assign(routed.opening, routed.tenant)
