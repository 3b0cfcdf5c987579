"""Who may share a page: the roots of chains, and prefixes that are public although salted.

Two gates. What is technically equal has equal keys: the root holds model, weights revision,
tokenizer, adapter and KV parameters. What is *allowed* to be shared is the scope: a prompt with a
``cache_salt`` shares with prompts of the same salt only. A public prefix (a system prompt on an
allow-list of the worker's or of the router's) is a chain of its own without a salt; the private
rest starts at its last full page: ``H(tag, last public key, scope)``. So all share the public
pages, and nobody the rest.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from state.model import BlockId
from state.prefix import TOKEN_BYTES, chain_of, chain_root, salt_scope

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from state.model import ModelIdentity
    from state.public import PublicMark

_TAIL_TAG: Final = b"warmroute private tail\0"
_TENANT_CHARACTERS: Final = 12


class Place(Struct, frozen=True):
    """Where a prompt's chain starts: ``root`` for the public pages, ``tail`` after them."""

    root: BlockId
    public_pages: int = 0
    tail: BlockId | None = None
    tenant: str = ""


class Scopes:
    """Chain roots of one engine. ``identity`` has no scope; ``seed`` is 64 bits."""

    def __init__(self, identity: ModelIdentity, seed: int) -> None:
        self._identity = identity
        self._seed = seed
        self._root = chain_root(identity, seed)
        self._public_ends: Mapping[BlockId, int] = {}
        self._longest_pages = 0

    def allow(self, prefixes: Iterable[bytes]) -> None:
        """Make the full pages of each packed prefix public; replaces what was allowed before."""
        page_tokens = self._identity.block_tokens
        ends = {}
        for packed in prefixes:
            chain = chain_of(self._root, packed, page_tokens, self._seed)
            if chain:
                ends[chain[-1]] = len(chain)
        self._public_ends = ends
        self._longest_pages = max(ends.values(), default=0)

    @property
    def public_prefixes(self) -> int:
        """Prefixes that all may share."""
        return len(self._public_ends)

    def place(
        self, packed_prompt: bytes, salt: str | None, mark: PublicMark | None = None
    ) -> Place:
        """Return where the chain of ``packed_prompt`` starts under ``salt``.

        Where there is a ``mark`` it alone says what is public, if the prompt begins with it.
        """
        if not salt:
            return Place(self._root)
        scope = salt_scope(salt)
        tenant = scope.removeprefix("salt:")[:_TENANT_CHARACTERS]
        pages, last = self._public_run(packed_prompt, mark)
        if last is None:
            salted = msgspec.structs.replace(self._identity, scope=scope)
            return Place(chain_root(salted, self._seed), tenant=tenant)
        seed = self._seed.to_bytes(8, "little")
        framed = _TAIL_TAG + seed + last + scope.encode()
        tail = BlockId(hashlib.blake2b(framed, digest_size=16).digest())
        return Place(self._root, pages, tail, tenant)

    def _public_run(
        self, packed_prompt: bytes, mark: PublicMark | None
    ) -> tuple[int, BlockId | None]:
        """Return the full pages of the prompt's public prefix, and the last one's key.

        Without a ``mark`` that is the longest one of those that were allowed.
        """
        page_tokens = self._identity.block_tokens
        if mark is not None:
            if not mark.is_start_of(packed_prompt):
                return 0, None
            marked = packed_prompt[: mark.tokens * TOKEN_BYTES]
            chain = chain_of(self._root, marked, page_tokens, self._seed)
            return (len(chain), chain[-1]) if chain else (0, None)
        if not self._longest_pages:
            return 0, None
        head = packed_prompt[: self._longest_pages * page_tokens * TOKEN_BYTES]
        chain = chain_of(self._root, head, page_tokens, self._seed)
        for pages in range(len(chain), 0, -1):
            if self._public_ends.get(chain[pages - 1]) == pages:
                return pages, chain[pages - 1]
        return 0, None
