"""Token ids that prompts have in common, stored once, with their prefix chains.

A run only grows at its end, so that whoever remembers a run and a count remembers exact tokens for
ever. A conversation that goes on extends its run; one that turns off somewhere starts a run of its
own whose first tokens are those of its parent. Chains are hashed once per run: another prompt on
the same run adds the blocks that are new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from state.prefix import TOKEN_BYTES, chain_of

if TYPE_CHECKING:
    from state.model import BlockId
    from state.prefix import ChainKey

MAX_DEPTH: Final = 8
"""How many runs a run may stand on before it gets a copy of its own."""
MAX_CHAINS: Final = 4
"""Chains kept per run: one per model identity, so that many cache salts do not add up."""


class TokenRun:
    """Append-only packed ids. Growing is for one thread at a time; reading is for any."""

    __slots__ = ("_base", "_chains", "_depth", "_own", "_parent")
    kept_bytes: ClassVar[int] = TOKEN_BYTES
    """What one id takes up here."""

    def __init__(self, parent: TokenRun | None = None, base: int = 0) -> None:
        self._own = bytearray()
        self._depth: int = parent.depth + 1 if parent is not None else 0
        if parent is not None and self._depth > MAX_DEPTH:
            self._own += parent.kept(0, base)
            parent, base, self._depth = None, 0, 0
        self._parent = parent
        self._base = base
        self._chains: dict[tuple[BlockId, int, ChainKey], list[BlockId]] = {}

    @property
    def depth(self) -> int:
        """How many runs this one stands on."""
        return self._depth

    @property
    def count(self) -> int:
        """The number of tokens, those of the parent included."""
        return self._base + len(self._own) // self.kept_bytes

    def extended(self, count: int, kept: bytes) -> TokenRun:
        """Return a run of the first ``count`` tokens and ``kept`` ones: this one where it fits."""
        if count == self.count:
            run = self
        elif count <= self._base and self._parent is not None:
            return self._parent.extended(count, kept)
        else:
            run = type(self)(self, count)
        run._own += kept  # noqa: SLF001 - of the same class
        return run

    def kept(self, first: int, end: int) -> bytes:
        """Return tokens ``first`` to ``end`` as they are kept: packed, unless a kind says other."""
        own_first = max(first - self._base, 0) * self.kept_bytes
        own = bytes(self._own[own_first : max(end - self._base, 0) * self.kept_bytes])
        if self._parent is None or first >= self._base:
            return own
        return self._parent.kept(first, min(end, self._base)) + own

    def packed(self, first: int, end: int) -> bytes:
        """Return tokens ``first`` to ``end``, packed."""
        return self.kept(first, end)

    def chain(
        self, count: int, root: BlockId, block_tokens: int, chain_key: ChainKey, skipped: int = 0
    ) -> list[BlockId]:
        """Return the ids of the full blocks among the first ``count`` tokens; a new list.

        ``root`` is what comes before the first block, or after so many ``skipped`` ones.
        """
        first = max(self._base // block_tokens, skipped)
        key = (root, block_tokens, chain_key)
        known = self._chains.get(key)
        inherited: list[BlockId] = []
        if self._parent is not None:
            inherited = self._parent.chain(
                min(count, first * block_tokens), root, block_tokens, chain_key, skipped
            )
        if known is None:
            if len(self._chains) >= MAX_CHAINS:
                del self._chains[next(iter(self._chains))]
            known = self._chains[key] = []
        wanted = count // block_tokens - first
        if wanted > len(known):
            begin = (first + len(known)) * block_tokens
            parent = known[-1] if known else (inherited[-1] if inherited else root)
            packed = self.packed(begin, count // block_tokens * block_tokens)
            known += chain_of(parent, packed, block_tokens, chain_key)
        if not inherited:
            return known[:wanted] if wanted > 0 else []
        return inherited + known[: max(wanted, 0)]


class RunTokens:
    """One prompt: ``shared`` tokens of a run, and the rest of its own."""

    __slots__ = ("rest", "run", "shared")

    def __init__(self, run: TokenRun, shared: int, rest: bytes) -> None:
        self.run = run
        self.shared = shared
        self.rest = rest

    @property
    def count(self) -> int:
        """The number of tokens."""
        return self.shared + len(self.rest) // TOKEN_BYTES

    def packed(self) -> bytes:
        """Return all ids, packed."""
        return self.run.packed(0, self.shared) + self.rest

    def first(self, count: int) -> bytes:
        """Return the first ``count`` ids, packed; fewer where there are no more."""
        packed = self.run.packed(0, min(count, self.shared))
        return packed + self.rest[: max(0, count - self.shared) * TOKEN_BYTES]

    def chain(
        self, root: BlockId, block_tokens: int, chain_key: ChainKey, skipped: int = 0
    ) -> tuple[BlockId, ...]:
        """Return the ids of all full blocks but for the ``skipped`` first ones."""
        blocks = self.run.chain(self.shared, root, block_tokens, chain_key, skipped)
        begin = (skipped + len(blocks)) * block_tokens
        rest = self.rest[max(0, begin - self.shared) * TOKEN_BYTES :]
        rest = self.run.packed(begin, self.shared) + rest
        parent = blocks[-1] if blocks else root
        return (*blocks, *chain_of(parent, rest, block_tokens, chain_key))


class CountedTokens(RunTokens):
    """A prompt whose ids were let go: only their number is known any more."""

    __slots__ = ()

    def __init__(self, count: int) -> None:
        super().__init__(_NO_RUN, count, b"")

    def packed(self) -> bytes:
        """Raise LookupError."""
        raise LookupError(_LET_GO)

    def first(self, count: int) -> bytes:  # noqa: ARG002 - as of what has ids
        """Raise LookupError."""
        raise LookupError(_LET_GO)

    def chain(
        self,
        root: BlockId,  # noqa: ARG002 - as of what has ids
        block_tokens: int,  # noqa: ARG002
        chain_key: ChainKey,  # noqa: ARG002
        skipped: int = 0,  # noqa: ARG002
    ) -> tuple[BlockId, ...]:
        """Raise LookupError."""
        raise LookupError(_LET_GO)


_NO_RUN: Final = TokenRun()
_LET_GO: Final = "the ids of this prompt were let go"
