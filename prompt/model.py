"""What the router learns from a request's body, and how a body can fail to tell it."""

from __future__ import annotations

import enum
from typing import Final

from msgspec import Struct

from state.prefix import TOKEN_BYTES

MAX_TOKEN_ID: Final = 2**32 - 1
MAX_DEPTH: Final = 64
"""How deep JSON values may nest where they are decoded."""


class Unroutable(enum.StrEnum):
    """Why no tokens are known; the same label goes to metric, header and log."""

    MEDIA = "non-text content"
    TEMPLATE = "template error"
    NO_TEMPLATE = "no chat template"
    REQUEST_TEMPLATE = "template in request"
    REWRITTEN = "prompt rewritten by the engine"
    """Truncation and prompt embeddings: the engine computes other tokens than the text has."""
    TOO_COMPLEX = "too complex"
    BUSY = "tokenizer busy"
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


class CodecLoadError(Exception):
    """A tokenizer directory that cannot be used; names the file."""


class PromptTokens(Struct, frozen=True, kw_only=True):
    """One prompt: packed ids (see ``state.prefix.pack_tokens``).

    ``is_exact`` says that the engine computes exactly these ids, given the same tokenizer files.
    """

    packed: bytes
    is_exact: bool

    @property
    def count(self) -> int:
        """The number of tokens."""
        return len(self.packed) // TOKEN_BYTES


class ReadPrompt(Struct, frozen=True, kw_only=True):
    """What routing needs of one request.

    ``prompts`` is empty exactly when ``unroutable`` says why. ``salt`` is the client's cache salt,
    empty without one. ``choices`` is how many completions each prompt gets. ``max_output_tokens``
    is None where the client sets no limit.
    """

    model: str
    is_stream: bool
    prompts: tuple[PromptTokens, ...] = ()
    salt: str = ""
    choices: int = 1
    unroutable: Unroutable | None = None
    max_output_tokens: int | None = None
