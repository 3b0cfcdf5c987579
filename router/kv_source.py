"""From which replica the chosen one shall fetch KV pages of a prompt that it does not hold itself.

Only engines that announce it take part; the engine asked decides by its own figures whether to
fetch, and computes what does not arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.model import ReplicaView
    from router.fleet import Member


class KvTransferSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether a request names a source of KV pages, and how many tokens more it has to hold."""

    enabled: bool = True
    min_tokens: Annotated[int, Meta(ge=1)] = 512


def kv_source(
    chosen: Member, candidates: Sequence[Member], views: Sequence[ReplicaView], min_tokens: int
) -> Member | None:
    """Return the candidate that holds most of the prompt; None where that is not worth a transfer.

    It holds at least ``min_tokens`` more than ``chosen``, by what its engine told: a prompt that is
    still being computed there cannot be fetched. Among equal ones it is the least busy.
    ``candidates`` and ``views`` have the same order.
    """
    own_tokens = 0
    best: Member | None = None
    most = (0, 0)
    for member, view in zip(candidates, views, strict=True):
        if member is chosen:
            own_tokens = view.cached_tokens + view.lower_tier_tokens
        elif member.can_fetch and member.endpoint.is_plain and member.identity == chosen.identity:
            held_tokens = view.cached_tokens - view.pending_tokens + view.lower_tier_tokens
            rank = (held_tokens, -view.inflight)
            if best is None or rank > most:
                best, most = member, rank
    return best if most[0] - own_tokens >= min_tokens else None
