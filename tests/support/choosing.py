"""A chooser without a router around it: on any view of the fleet, with a clock of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.hot import HeatMap, HotSettings
from policies.weighted import Weighted
from prompt.model import PromptTokens, ReadPrompt
from router.chooser import Chooser, Knowledge
from router.fleet import Member, registered_member
from router.kv_source import KvTransferSettings
from state.lease import LeaseBook
from state.model import ModelIdentity, ReplicaState
from state.placement import Placements
from state.prefix import chain_of, chain_root, pack_tokens
from state.secret import ChainKeys

if TYPE_CHECKING:
    from policies.union import AnyPolicy
    from router.chooser import Choice
    from state.model import BlockId, ReplicaRecord
    from state.store import FleetReader

SEED = 7
IDENTITY = ModelIdentity(model="m", block_tokens=64)


def chain_for(tokens: range, identity: ModelIdentity = IDENTITY) -> tuple[BlockId, ...]:
    """Return the blocks of a prompt."""
    return chain_of(chain_root(identity, SEED), pack_tokens(tokens), identity.block_tokens, SEED)


def prompt_for(*prompts: range, is_exact: bool = True) -> ReadPrompt:
    """Return a request with these prompts."""
    read = tuple(PromptTokens(packed=pack_tokens(tokens), is_exact=is_exact) for tokens in prompts)
    return ReadPrompt(model="m", is_stream=True, prompts=read)


def member_of(record: ReplicaRecord) -> Member:
    """Return the member that a router makes of a record."""
    member = registered_member(ReplicaState(record=record))
    assert member is not None
    return member


class Choosing:
    """A chooser on ``reader``; ``now_s`` is its clock, ``members`` whom a test lets it choose."""

    def __init__(
        self,
        reader: FleetReader,
        policy: AnyPolicy | None = None,
        kv_transfer: KvTransferSettings | None = None,
    ) -> None:
        self.now_s = 100.0
        self.members: list[Member] = []
        self.know = Knowledge(
            reader=reader,
            leases=LeaseBook(),
            pending=Placements(2.0),
            guessed=Placements(600.0),
            heat=HeatMap(HotSettings()),
        )
        self.chooser = Chooser(
            self.know,
            policy or Weighted(),
            keys=ChainKeys(SEED),
            seed=1,
            clock=lambda: self.now_s,
            kv_transfer=kv_transfer or KvTransferSettings(),
        )

    def choose(self, prompt: ReadPrompt, members: list[Member]) -> Choice:
        """Return the choice; the lease is taken."""
        choice = self.chooser.choose(self.chooser.route(prompt), members)
        assert choice is not None
        return choice
