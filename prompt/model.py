"""What the router learns from a request's body, and how a body can fail to tell it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, NoReturn

from msgspec import Struct, structs

from prompt.run import CountedTokens
from state.prefix import TOKEN_BYTES, chain_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from prompt.run import RunTokens
    from state.model import BlockId
    from state.prefix import ChainKey

MAX_TOKEN_ID: Final = 2**32 - 1
MAX_DEPTH: Final = 64
"""How deep JSON values may nest where they are decoded."""
STEP_BLOCKS: Final = 4_096
"""Blocks that are hashed without a pause."""


class Unroutable(enum.StrEnum):
    """Why no tokens are known; the same label goes to metric, header and log."""

    MEDIA = "non-text content"
    TEMPLATE = "template error"
    NO_TEMPLATE = "no chat template"
    REQUEST_TEMPLATE = "template in request"
    REWRITTEN = "prompt rewritten by the engine"
    """Truncation and prompt embeddings: the engine computes other tokens than the text has."""
    UNCONVERTED = "no known conversion to chat"
    """The engine makes a chat of it in a way that is not followed here."""
    TOO_COMPLEX = "too complex"
    BUSY = "tokenizer busy"
    NO_TOKENIZER = "no tokenizer"
    WRONG_TOKENS = "wrong tokens from the engine"
    """The engine's answer cannot be right: nothing is known of the prompt."""
    LOAD_ONLY = "path without a prefix"
    """The prompts of this path are not read."""


class BadPromptError(Exception):
    """The client's body is wrong. ``field`` is a path such as ``messages[0].content``."""

    def __init__(self, field: str, expected: str) -> None:
        super().__init__(f"{field}: expected {expected}")
        self.field = field
        self.expected = expected


class UnroutablePromptError(Exception):
    """The body may be fine, but its tokens cannot be known here: route by load."""

    def __init__(self, reason: Unroutable, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class TemplateFailureError(UnroutablePromptError):
    """The chat template refused the conversation or failed; the engine's answer tells why."""

    def __init__(self, detail: str) -> None:
        super().__init__(Unroutable.TEMPLATE, detail)


def refuse_conversion(detail: str) -> NoReturn:
    """Raise what says that a body is no chat whose text is known here."""
    raise UnroutablePromptError(Unroutable.UNCONVERTED, detail)


class CodecLoadError(Exception):
    """A tokenizer directory that cannot be used; names the file."""


class PromptTokens:
    """One prompt: packed ids (see ``state.prefix.pack_tokens``), or a run that others share.

    ``is_exact`` says that the engine computes exactly these ids, given the same tokenizer files.
    Immutable; equal when ids and exactness are.
    """

    __slots__ = ("_packed", "_run", "is_exact")

    def __init__(
        self, *, packed: bytes | None = None, run: RunTokens | None = None, is_exact: bool
    ) -> None:
        self._packed = b"" if packed is None and run is None else packed
        self._run = run
        self.is_exact = is_exact

    @property
    def packed(self) -> bytes:
        """All ids; put together when first asked for."""
        if self._packed is None:
            self._packed = self._run.packed() if self._run is not None else b""
        return self._packed

    @property
    def count(self) -> int:
        """The number of tokens."""
        return self._run.count if self._run is not None else len(self.packed) // TOKEN_BYTES

    def first(self, count: int) -> bytes:
        """Return the first ``count`` ids, packed; fewer where there are no more."""
        if self._run is not None:
            return self._run.first(count)
        return self.packed[: count * TOKEN_BYTES]

    def chain(
        self, root: BlockId, block_tokens: int, chain_key: ChainKey, skipped: int = 0
    ) -> tuple[BlockId, ...]:
        """Return the ids of all full blocks (see ``state.prefix.chain_of``).

        ``root`` is what comes before the first block, or after so many ``skipped`` ones. Blocks
        that other prompts had before are not hashed again.
        """
        if self._run is not None:
            return self._run.chain(root, block_tokens, chain_key, skipped)
        packed = self.packed[skipped * block_tokens * TOKEN_BYTES :] if skipped else self.packed
        return chain_of(root, packed, block_tokens, chain_key)

    def chain_steps(
        self, root: BlockId, block_tokens: int, chain_key: ChainKey, skipped: int = 0
    ) -> Generator[None, None, tuple[BlockId, ...]]:
        """Return what ``chain`` does, with a pause after some milliseconds of work each."""
        run = self._run
        if run is not None:
            for end in range(0, run.shared, STEP_BLOCKS * block_tokens):
                run.run.chain(end, root, block_tokens, chain_key, skipped)
                yield
            return run.chain(root, block_tokens, chain_key, skipped)
        step_bytes = STEP_BLOCKS * block_tokens * TOKEN_BYTES
        chain: list[BlockId] = []
        first_byte = skipped * block_tokens * TOKEN_BYTES
        for at in range(first_byte, len(self.packed), step_bytes):
            part = self.packed[at : at + step_bytes]
            chain += chain_of(chain[-1] if chain else root, part, block_tokens, chain_key)
            yield
        return tuple(chain)

    def counted(self) -> PromptTokens:
        """Return what knows the number of the ids alone: for a prompt that is routed already."""
        return PromptTokens(run=CountedTokens(self.count), is_exact=self.is_exact)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PromptTokens):
            return NotImplemented
        return self.is_exact is other.is_exact and self.packed == other.packed

    def __hash__(self) -> int:
        return hash((self.packed, self.is_exact))

    def __repr__(self) -> str:
        return f"PromptTokens(count={self.count}, is_exact={self.is_exact})"


class ReadPrompt(Struct, frozen=True, kw_only=True):
    """What routing needs of one request.

    ``prompts`` is empty exactly when ``unroutable`` says why. ``shadows`` are the same prompts as
    bytes, where an engine was asked for the ids of ``prompts``: another time it may not answer, and
    then bytes are all that is known. ``salt`` is the client's cache salt,
    empty without one. ``choices`` is how many completions each prompt gets. ``max_output_tokens``
    is None where the client sets no limit. With ``has_media`` the prompt is a likeness in bytes,
    and ``head`` are the ids before the first image, None where they are not known.
    """

    model: str
    is_stream: bool
    prompts: tuple[PromptTokens, ...] = ()
    shadows: tuple[PromptTokens, ...] = ()
    salt: str = ""
    choices: int = 1
    unroutable: Unroutable | None = None
    max_output_tokens: int | None = None
    has_media: bool = False
    head: PromptTokens | None = None

    @property
    def is_rough(self) -> bool:
        """Whether a prompt is known by its bytes alone, and an engine may know more."""
        return not self.has_media and any(not tokens.is_exact for tokens in self.prompts)

    def counted(self) -> ReadPrompt:
        """Return the same without any ids: how many there are of them stays known."""
        return structs.replace(
            self,
            prompts=tuple([tokens.counted() for tokens in self.prompts]),
            shadows=tuple([tokens.counted() for tokens in self.shadows]),
            head=self.head.counted() if self.head is not None else None,
        )
