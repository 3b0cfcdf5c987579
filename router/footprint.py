"""What requests in flight take up on each replica, and what that leaves of its cache.

An engine evicts what nobody uses to run what waits. A prompt that does not fit beside the requests
ahead of it waits for them, and then finds no more of its cached prefix than they left room for. No
event tells of that before it happens, but it follows from what is in flight: each request holds its
prompt and, by its end, its output. Shared blocks count once, and stay for as long as they are used.

Blocks are counted only while the plain sum of all claims could exceed a replica's cache: on a fleet
whose requests fit, a request costs two additions here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from state.model import BlockId, ReplicaId

Chains = tuple[tuple["BlockId", ...], ...]
"""The chains of a request's prompts."""
_NEWEST_WEIGHT: Final = 0.05
"""How much the last answer counts in the mean length of answers."""


@dataclass(slots=True)
class _Taken:
    """What is in flight on one replica.

    ``claimed_tokens`` counts shared blocks once per request: at most so much is taken. ``users``
    counts the requests per block; it is None while the claims fit easily and nobody asked.
    """

    open: set[Footprint] = field(default_factory=set)
    claimed_tokens: int = 0
    other_tokens: int = 0
    users: dict[BlockId, int] | None = None
    eased_tokens: int = 0


class Footprint:
    """What one request takes up until ``end``."""

    __slots__ = ("_book", "_is_open", "chains", "claimed_tokens", "other_tokens", "replica")

    def __init__(
        self,
        book: Footprints,
        replica: ReplicaId,
        chains: Chains,
        *,
        claimed_tokens: int,
        other_tokens: int,
    ) -> None:
        self._book = book
        self.replica = replica
        self.chains = chains
        self.claimed_tokens = claimed_tokens
        self.other_tokens = other_tokens
        self._is_open = True

    def end(self, output_tokens: int | None) -> bool:
        """Give it back; the length of the answer, where known, teaches. False the second time."""
        if not self._is_open:
            return False
        self._is_open = False
        self._book.give_back(self)
        if output_tokens is not None:
            self._book.learn(output_tokens)
        return True


class Footprints:
    """The requests that this router has in flight, by what they take up."""

    def __init__(self) -> None:
        self._taken: dict[ReplicaId, _Taken] = {}
        self._mean_output_tokens: float | None = None

    def expected_output_tokens(self, max_output_tokens: int | None) -> int:
        """Return the mean length of answers so far, at most what the request allows."""
        mean_tokens = round(self._mean_output_tokens or 0)
        return mean_tokens if max_output_tokens is None else min(mean_tokens, max_output_tokens)

    def take(
        self,
        replica: ReplicaId,
        chains: Chains,
        block_tokens: int,
        prompt_tokens: int,
        output_tokens: int,
    ) -> Footprint:
        """Note a request that goes to ``replica`` now."""
        blocks_tokens = sum(len(chain) for chain in chains) * block_tokens
        claimed_tokens = prompt_tokens + output_tokens
        footprint = Footprint(
            self,
            replica,
            chains,
            claimed_tokens=claimed_tokens,
            other_tokens=claimed_tokens - blocks_tokens,
        )
        taken = self._taken.setdefault(replica, _Taken())
        taken.open.add(footprint)
        taken.claimed_tokens += claimed_tokens
        taken.other_tokens += footprint.other_tokens
        if taken.users is not None:
            _count(taken.users, chains)
        return footprint

    def room_tokens(
        self,
        replica: ReplicaId,
        capacity_tokens: int,
        chains: Chains,
        block_tokens: int,
        prompt_tokens: int,
    ) -> int | None:
        """Return how much of a prompt's cache outlasts what is in flight; None when all does."""
        taken = self._taken.get(replica)
        if taken is None:
            return None
        if taken.claimed_tokens + prompt_tokens <= capacity_tokens:
            return None
        users = taken.users
        if users is None:
            users = taken.users = {}
            for footprint in taken.open:
                _count(users, footprint.chains)
        taken.eased_tokens = capacity_tokens // 2
        taken_tokens = len(users) * block_tokens + taken.other_tokens
        if taken_tokens + prompt_tokens <= capacity_tokens:
            return None
        shared_tokens = sum(_used(users, chain) for chain in chains) * block_tokens
        if taken_tokens + prompt_tokens - shared_tokens <= capacity_tokens:
            return None
        return shared_tokens + max(0, capacity_tokens - taken_tokens)

    def claimed_tokens(self, replica: ReplicaId) -> int:
        """Return what is in flight on a replica, blocks that requests share once for each."""
        taken = self._taken.get(replica)
        return taken.claimed_tokens if taken is not None else 0

    def give_back(self, footprint: Footprint) -> None:
        """Take an ended request off the book; called by footprints."""
        taken = self._taken[footprint.replica]
        taken.open.discard(footprint)
        if not taken.open:
            del self._taken[footprint.replica]
            return
        taken.claimed_tokens -= footprint.claimed_tokens
        taken.other_tokens -= footprint.other_tokens
        if taken.users is None:
            return
        if taken.claimed_tokens < taken.eased_tokens:
            taken.users = None
        else:
            _discount(taken.users, footprint.chains)

    def learn(self, output_tokens: int) -> None:
        """Let one more answer count in the mean; called by footprints."""
        mean_tokens = self._mean_output_tokens
        if mean_tokens is None:
            self._mean_output_tokens = float(output_tokens)
        else:
            self._mean_output_tokens = mean_tokens + _NEWEST_WEIGHT * (output_tokens - mean_tokens)


def _count(users: dict[BlockId, int], chains: Chains) -> None:
    for chain in chains:
        for block in chain:
            users[block] = users.get(block, 0) + 1


def _discount(users: dict[BlockId, int], chains: Chains) -> None:
    for chain in chains:
        for block in chain:
            if users[block] == 1:
                del users[block]
            else:
                users[block] -= 1


def _used(users: dict[BlockId, int], chain: Sequence[BlockId]) -> int:
    """Return how many leading blocks of ``chain`` are in use."""
    run = 0
    for block in chain:
        if block not in users:
            break
        run += 1
    return run
