"""What became resident and what is gone: the changes that are published as KV events."""

from __future__ import annotations

from msgspec import Struct

from sidecar.journal import TierName
from state.model import BlockId


class PagesStored(Struct, frozen=True, tag=True):
    """A run of consecutive pages got content; ``parent`` is None where the run starts a prompt.

    ``token_ids`` covers all pages of the run. ``salt`` is set where the salted part of a prompt
    starts with the first page of the run.
    """

    keys: tuple[BlockId, ...]
    parent: BlockId | None
    token_ids: list[int]
    salt: str | None = None
    tier: TierName = "device"


class PagesRemoved(Struct, frozen=True, tag=True):
    """One physical copy of each of ``keys`` is gone."""

    keys: tuple[BlockId, ...]
    tier: TierName = "device"


class PagesCleared(Struct, frozen=True, tag=True):
    """All content is gone, in all tiers."""


PageChange = PagesStored | PagesRemoved | PagesCleared
