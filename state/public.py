"""Public prefixes on their way from a router to an engine: which tokens all tenants may share.

A prompt of a tenant has a salt from its first token on. Where it begins with a prefix that the
operator made public, the router says so in a header, to engines that announced that they read it:
how many tokens are public, and their digest. The engine compares its own tokens with it and salts
what follows; where they differ it salts the whole. So two readings of one text share nothing, and
no token is shared that is not the operator's. A client's header of this name ends at the router.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from msgspec import Struct

from state.prefix import TOKEN_BYTES

PUBLIC_PREFIX_HEADER: Final = "X-Warmroute-Public-Prefix"
_DIGEST_BYTES: Final = 16
_VALUE: Final = re.compile(r"([1-9][0-9]{0,8}) ([0-9a-f]{32})")


class PublicMark(Struct, frozen=True):
    """The first ``tokens`` of a prompt, by their ``digest`` (BLAKE2b-128 of u32, in hex)."""

    tokens: int
    digest: str

    @property
    def value(self) -> str:
        """What the header says."""
        return f"{self.tokens} {self.digest}"

    def is_start_of(self, packed_prompt: bytes) -> bool:
        """Return whether a prompt begins with these tokens."""
        end = self.tokens * TOKEN_BYTES
        return len(packed_prompt) >= end and _digest(packed_prompt[:end]) == self.digest


def mark_of(packed: bytes) -> PublicMark:
    """Return the mark of packed tokens (see ``state.prefix.pack_tokens``)."""
    return PublicMark(len(packed) // TOKEN_BYTES, _digest(packed))


def read_mark(value: str | None) -> PublicMark | None:
    """Return what a header says; None where there is none, or one that cannot be read."""
    found = None if value is None else _VALUE.fullmatch(value)
    return None if found is None else PublicMark(int(found[1]), found[2])


def _digest(packed: bytes) -> str:
    return hashlib.blake2b(packed, digest_size=_DIGEST_BYTES).hexdigest()
