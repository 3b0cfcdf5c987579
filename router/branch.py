"""The chains of a request on replicas that are alike, and how much of them is public."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, structs

from router.shadow import approximate_identity
from state.model import BlockId, ModelIdentity, Overlap, ReplicaId
from state.prefix import salt_scope
from state.public import PublicMark

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prompt.model import PromptTokens
    from router.chooser import Routed
    from router.fleet import Member
    from router.outlook import Outlook
    from state.store import FleetReader


class PublicPart(Struct, frozen=True):
    """The full blocks of a public prefix: so many, their packed tokens, and what names them."""

    blocks: int
    packed: bytes
    mark: PublicMark

    def is_start_of(self, tokens: PromptTokens) -> bool:
        """Return whether a prompt begins with them, token for token."""
        return tokens.first(self.mark.tokens) == self.packed


class Branch(Struct, frozen=True):
    """The chains of a request's prompts on replicas that announce ``announced``.

    ``opens``: those that salt no more than what follows a public prefix. ``part`` is the prefix
    that the prompts begin with there, ``cuts`` the public blocks of each chain.
    """

    announced: ModelIdentity | None
    identity: ModelIdentity
    chains: tuple[tuple[BlockId, ...], ...]
    opens: bool = False
    part: PublicPart | None = None
    cuts: tuple[int, ...] = ()

    @property
    def mark(self) -> PublicMark | None:
        """What the replica is told of the public prefix."""
        return self.part.mark if self.part is not None else None

    def runs(self) -> Iterator[tuple[ModelIdentity, tuple[BlockId, ...]]]:
        """Yield the chains in pieces of one identity: what is public has no scope."""
        if self.part is None:
            for chain in self.chains:
                yield self.identity, chain
            return
        public = structs.replace(self.identity, scope="")
        for chain, cut in zip(self.chains, self.cuts, strict=True):
            yield public, chain[:cut]
            yield self.identity, chain[cut:]


def identity_of(routed: Routed, announced: ModelIdentity | None) -> ModelIdentity:
    """Return what the request's chain starts from on a replica that announces ``announced``."""
    if not routed.is_exact:
        return approximate_identity(routed.prompt)
    scope = salt_scope(routed.prompt.salt)
    if announced is None:
        return ModelIdentity(model=routed.prompt.model, scope=scope)
    return structs.replace(announced, scope=scope) if scope else announced


def branch_under(
    routed: Routed, announced: ModelIdentity | None, mark: PublicMark | None
) -> Branch | None:
    """Return the chains that were made for replicas that announce ``announced``.

    ``mark`` is what such a replica was told of a public prefix.
    """
    for branch in routed.branches:
        if branch.announced == announced and branch.mark == mark:
            return branch
    return None


def sharing(
    outlook: Outlook, routed: Routed, candidates: Sequence[Member]
) -> tuple[Branch, list[ReplicaId]]:
    """Return the chains by which a prefix may be hot, and who can hold it for whoever comes.

    Where some salt no more than what follows a public prefix, these alone can.
    """
    if outlook.public is not None:
        for member in candidates:
            branch = outlook.branch(routed, member)
            if branch.part is not None:
                alike = [one for one in candidates if outlook.branch(routed, one) is branch]
                return branch, [one.replica for one in alike]
    return outlook.branch(routed, candidates[0]), [member.replica for member in candidates]


def overlap_across(
    reader: FleetReader, chain: tuple[BlockId, ...], cut: int
) -> Mapping[ReplicaId, Overlap]:
    """Return the leading resident run of ``chain``, whose first ``cut`` blocks are public.

    A reader without an index was asked for the two pieces, which the store keeps apart.
    """
    if not 0 < cut < len(chain):
        return reader.overlap(chain)
    tails = reader.overlap(chain[cut:])
    joined: dict[ReplicaId, Overlap] = {}
    for replica, head in reader.overlap(chain[:cut]).items():
        tail = tails.get(replica)
        if tail is None or head.any_tier_blocks < cut:
            joined[replica] = head
            continue
        is_whole = head.gpu_blocks == cut
        joined[replica] = Overlap(
            gpu_blocks=head.gpu_blocks + (tail.gpu_blocks if is_whole else 0),
            any_tier_blocks=cut + tail.any_tier_blocks,
        )
    return joined
