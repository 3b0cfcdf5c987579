"""Prompts by their bytes, for when their tokens are not known: chains that meet no chain of tokens.

Where an engine is asked for tokens, it may answer one turn of a conversation and not the next. So
the bytes of a prompt with tokens are placed too: the next turn finds them by bytes if it must.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from state.model import ModelIdentity
from state.prefix import salt_scope

if TYPE_CHECKING:
    from prompt.model import ReadPrompt
    from router.outlook import Outlook
    from state.model import ReplicaId
    from state.placement import Placement, Placements

APPROXIMATE_BLOCK_BYTES: Final = 256
APPROXIMATE: Final = "approximate"
"""The tokenizer field of chains over bytes: they never meet a chain of real tokens."""


def approximate_identity(prompt: ReadPrompt) -> ModelIdentity:
    """Return what the chains over a prompt's bytes start from."""
    return ModelIdentity(
        model=prompt.model,
        tokenizer=APPROXIMATE,
        scope=salt_scope(prompt.salt),
        block_tokens=APPROXIMATE_BLOCK_BYTES,
    )


def place_shadows(
    prompt: ReadPrompt,
    replica: ReplicaId,
    guessed: Placements,
    outlook: Outlook,
    now_s: float,
) -> list[tuple[Placements, Placement]]:
    """Let the bytes of a prompt with tokens count as resident."""
    if not prompt.shadows:
        return []
    identity = approximate_identity(prompt)
    root, key = outlook.root(identity), outlook.keys.of(identity.scope)
    chains = [tokens.chain(root, APPROXIMATE_BLOCK_BYTES, key) for tokens in prompt.shadows]
    return [(guessed, guessed.place(replica, chain, now_s)) for chain in chains]
