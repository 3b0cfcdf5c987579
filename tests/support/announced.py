"""What a sidecar announces in tests of the shared state: pages of one token, in one chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.event import StoredPages
from state.model import Generation, ModelIdentity, ReplicaRecord
from state.prefix import chain_of, chain_root, pack_tokens
from support.fleet_state import A

if TYPE_CHECKING:
    from state.model import BlockId

IDENTITY = ModelIdentity(model="m", block_tokens=1)
BASE = ReplicaRecord(
    replica=A,
    endpoint="http://127.0.0.1:8000",
    generation=Generation(""),
    identity=IDENTITY,
    page_tokens=1,
    sidecar="s1",
)


def page(handle: int) -> StoredPages:
    """Return the page of the token ``handle``, behind those of 1 to ``handle - 1``."""
    return StoredPages(
        handles=(handle,),
        parent=handle - 1 or None,
        packed_tokens=pack_tokens([handle]),
        page_tokens=1,
    )


def chain(last: int) -> tuple[BlockId, ...]:
    """Return the blocks of the pages 1 to ``last``."""
    return chain_of(chain_root(IDENTITY, 0), pack_tokens(range(1, last + 1)), 1, 0)
