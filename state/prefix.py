"""Prefix chains: the names under which cached prompt prefixes are known.

A prompt's tokens are cut into blocks of ``block_tokens``. Each block's id hashes its parent's id
and its own tokens, so an id names the whole prefix that ends there: equal ids mean equal prefixes,
and two prompts share exactly as many leading ids as they share leading full blocks. The parent of
the first block is the *root*, a hash of everything besides tokens that decides whether KV may be
shared (``ModelIdentity``). Every root field is tagged and length-framed, so that no value of one
field can be mistaken for another: an adapter "X" and a salt "X" never meet.

Only full blocks have ids. An engine always computes the last prompt token itself, so even a full
match saves at most ``prompt_tokens - 1`` tokens (``cacheable_tokens``).

H is chosen by the key. A number is the seed of xxh3-128: fast, and guessable by whoever can read
the state store and knows the seed, which suits one tenant. Bytes are the key of BLAKE2b-128:
without it nobody can tell which prompt an id stands for. ``state.secret`` says which key a scope
has.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from typing import TYPE_CHECKING, Final, cast

import xxhash

from state.model import BlockId, ModelIdentity, NamespaceId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_Chain = tuple[BlockId, ...]
ChainKey = int | bytes
"""A 64-bit seed of xxh3-128, or up to 64 bytes that are a key of BLAKE2b-128."""
CHAIN_VERSION: Final = 1
TOKEN_BYTES: Final = 4
ID_BYTES: Final = 16
_TAIL_TAG: Final = b"warmroute-tail\0\0"
_ROOT_FIELDS: Final = (
    "model",
    "weights_revision",
    "tokenizer",
    "adapter",
    "kv_parameters",
    "scope",
    "block_tokens",
)


def _framed_identity(identity: ModelIdentity) -> bytes:
    parts = [b"warmroute-chain", CHAIN_VERSION.to_bytes(4, "little")]
    for name in _ROOT_FIELDS:
        tag = name.encode()
        value = str(getattr(identity, name)).encode("utf-8", "surrogatepass")
        parts += [
            len(tag).to_bytes(4, "little"),
            tag,
            len(value).to_bytes(4, "little"),
            value,
        ]
    return b"".join(parts)


def block_id(data: bytes, key: ChainKey) -> BlockId:
    """Return H of ``data``."""
    if isinstance(key, int):
        return BlockId(xxhash.xxh3_128_digest(data, key))
    return BlockId(hashlib.blake2b(data, digest_size=ID_BYTES, key=key).digest())


def chain_root(identity: ModelIdentity, key: ChainKey) -> BlockId:
    """Return the parent id of every first block under ``identity``."""
    return block_id(_framed_identity(identity), key)


def tail_root(last: BlockId, scope: str, key: ChainKey) -> BlockId:
    """Return the parent id of what is private to ``scope`` after the public block ``last``.

    ``key`` is that of the scope; ``last`` names all that a root does, and the public tokens.
    """
    return block_id(_TAIL_TAG + last + scope.encode(), key)


def namespace_of(identity: ModelIdentity) -> NamespaceId:
    """Return the short digest that names ``identity`` in keys of the state store."""
    return NamespaceId(hashlib.blake2b(_framed_identity(identity), digest_size=8).hexdigest())


def salt_scope(salt: str) -> str:
    """Return the scope of a cache salt; the salt itself never reaches the state store."""
    if not salt:
        return ""
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16)
    return f"salt:{digest.hexdigest()}"


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Return token ids as consecutive little-endian u32; raises OverflowError outside of u32."""
    # A bytes object is an iterable of ids, but array() would take it for memory to copy.
    packed = array("I", list(token_ids) if isinstance(token_ids, bytes | bytearray) else token_ids)
    if packed.itemsize != TOKEN_BYTES:  # pragma: no cover - no supported platform
        packed = array("L", packed)
    if sys.byteorder == "big":  # pragma: no cover - exercised on big-endian machines only
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Return the ids that ``pack_tokens`` packed."""
    ids = array("I" if array("I").itemsize == TOKEN_BYTES else "L", packed)
    if sys.byteorder == "big":  # pragma: no cover - exercised on big-endian machines only
        ids.byteswap()
    return ids.tolist()


def chain_of(
    root: BlockId, packed_tokens: bytes, block_tokens: int, key: ChainKey
) -> tuple[BlockId, ...]:
    """Return the ids of all full blocks of ``packed_tokens`` (see ``pack_tokens``)."""
    block_bytes = block_tokens * TOKEN_BYTES
    ends = range(block_bytes, len(packed_tokens) + 1, block_bytes)
    parent: bytes = root
    chain: list[bytes] = []  # naming each of them a block would cost a call
    if isinstance(key, int):
        xxh3 = xxhash.xxh3_128_digest
        for end in ends:
            parent = xxh3(parent + packed_tokens[end - block_bytes : end], key)
            chain.append(parent)
        return cast(_Chain, tuple(chain))
    keyed = hashlib.blake2b(digest_size=ID_BYTES, key=key)
    for end in ends:
        block = keyed.copy()
        block.update(parent + packed_tokens[end - block_bytes : end])
        parent = block.digest()
        chain.append(parent)
    return cast(_Chain, tuple(chain))


def next_block(parent: BlockId, packed_block: bytes, key: ChainKey) -> BlockId:
    """Return the id of one full block under ``parent``: one step of ``chain_of``."""
    return block_id(parent + packed_block, key)


def block_tokens_for(page_tokens: int, preferred: int = 64) -> int:
    """Return the index granularity for an engine page: a whole number of pages, >= one page.

    ``preferred`` where it is a multiple of the page, else the page itself. Raises ValueError for a
    page size below 1.
    """
    if page_tokens < 1:
        message = f"page_tokens: expected at least 1, got {page_tokens}"
        raise ValueError(message)
    return preferred if preferred % page_tokens == 0 else page_tokens


def cacheable_tokens(prompt_tokens: int) -> int:
    """Return how many prompt tokens a cache can save at most: all but the last one."""
    return max(0, prompt_tokens - 1)


def cached_tokens(overlap_blocks: int, block_tokens: int, prompt_tokens: int) -> int:
    """Return the prompt tokens that ``overlap_blocks`` leading blocks save, in whole tokens."""
    return min(overlap_blocks * block_tokens, cacheable_tokens(prompt_tokens))


def common_packed(left: bytes, right: bytes) -> bytes:
    """Return the packed tokens with which both begin."""
    low, high = 0, min(len(left), len(right)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * TOKEN_BYTES
        if left[:end] == right[:end]:
            low = middle
        else:
            high = middle - 1
    return left[: low * TOKEN_BYTES]


def common_blocks(left: Sequence[BlockId], right: Sequence[BlockId]) -> int:
    """Return the number of leading ids that two chains share."""
    shared = 0
    for ours, theirs in zip(left, right, strict=False):
        if ours != theirs:
            break
        shared += 1
    return shared
