"""Prefix chains: fixed answers, framing, and what full blocks mean."""

from __future__ import annotations

import struct
from itertools import combinations
from typing import Any

import pytest
import xxhash
from msgspec.structs import replace

from state.model import BlockId, ModelIdentity
from state.prefix import (
    block_tokens_for,
    cached_tokens,
    chain_of,
    chain_root,
    common_blocks,
    namespace_of,
    next_block,
    pack_tokens,
    salt_scope,
)

_IDENTITY = ModelIdentity(model="m", adapter="a", scope="s", block_tokens=4)


def _root_by_hand(values: list[tuple[bytes, bytes]], seed: int) -> bytes:
    """Return the root as the docstring of the module describes it, written out anew."""
    framed = b"warmroute-chain" + struct.pack("<I", 1)
    for tag, value in values:
        framed += struct.pack("<I", len(tag)) + tag + struct.pack("<I", len(value)) + value
    return xxhash.xxh3_128(framed, seed=seed).digest()


def _chain_by_hand(root: bytes, tokens: list[int], block_tokens: int, seed: int) -> list[bytes]:
    ids, parent = [], root
    for number in range(len(tokens) // block_tokens):
        own = tokens[number * block_tokens : (number + 1) * block_tokens]
        packed = struct.pack(f"<{block_tokens}I", *own)
        parent = xxhash.xxh3_128(parent + packed, seed=seed).digest()
        ids.append(parent)
    return ids


def _chain(
    tokens: list[int], identity: ModelIdentity = _IDENTITY, seed: int = 0
) -> tuple[Any, ...]:
    root = chain_root(identity, seed)
    return chain_of(root, pack_tokens(tokens), identity.block_tokens, seed)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_chain_is_what_an_independent_construction_gives(seed: int) -> None:
    values = [(b"model", b"m"), (b"weights_revision", b""), (b"tokenizer", b"")]
    values += [(b"adapter", b"a"), (b"kv_parameters", b""), (b"scope", b"s")]
    values += [(b"block_tokens", b"4")]
    root = _root_by_hand(values, seed)
    assert chain_root(_IDENTITY, seed) == root
    tokens = [0, 1, 2**32 - 1, 7, 7, 7, 7, 7, 9]
    assert list(_chain(tokens, seed=seed)) == _chain_by_hand(root, tokens, 4, seed)


def test_the_names_of_prefixes_are_stable() -> None:
    """What routers and sidecars of different releases must agree on, as literal bytes."""
    identity = ModelIdentity(model="Qwen/Qwen3-8B", block_tokens=4)
    root = chain_root(identity, 0)
    chain = chain_of(root, pack_tokens([1, 2, 3, 4, 5, 6, 7, 8]), 4, 0)
    assert root.hex() == "f55f2a6742efbcc08af26576e96d407b"
    assert [block.hex() for block in chain] == [
        "bd27d6fe9079bdf9159c15365bb2479f",
        "618f08ea323d4578f28599f098dd91f6",
    ]
    assert namespace_of(identity) == "4d3a99c4ab005397"
    assert salt_scope("secret") == "salt:8f64bfc250ac98ecf5a0f6a52cde7ec5"


_FIELDS = ["model", "weights_revision", "tokenizer", "adapter", "kv_parameters", "scope"]


@pytest.mark.parametrize(("field", "other"), list(combinations(_FIELDS, 2)))
def test_the_same_value_in_another_field_is_another_root(field: str, other: str) -> None:
    """F10: an adapter "X" and a salt "X" never meet."""
    plain = ModelIdentity(model="")
    one, two = replace(plain, **{field: "X"}), replace(plain, **{other: "X"})
    assert chain_root(one, 0) != chain_root(two, 0)
    assert namespace_of(one) != namespace_of(two)


def test_moving_a_character_between_fields_is_another_root() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    roots = {
        chain_root(ModelIdentity(model="m", adapter=left, kv_parameters=right), 0)
        for left, right in pairs
    }
    assert len(roots) == len(pairs)


def test_block_size_and_seed_are_part_of_every_name() -> None:
    roots = {
        chain_root(ModelIdentity(model="m", block_tokens=size), seed)
        for size in (16, 64)
        for seed in (0, 1)
    }
    assert len(roots) == 4


def test_a_salt_never_appears_in_its_scope() -> None:
    assert salt_scope("") == ""
    assert "hunter2" not in salt_scope("hunter2")
    assert salt_scope("hunter2") != salt_scope("hunter3")


@pytest.mark.parametrize(("extra", "blocks"), [(-1, 2), (0, 3), (1, 3)])
def test_only_full_blocks_have_names(extra: int, blocks: int) -> None:
    """A63: k * block tokens and one token more or less."""
    tokens = list(range(3 * 4 + extra))
    assert len(_chain(tokens)) == blocks
    assert _chain(tokens)[:2] == _chain(tokens[:8])


def test_an_id_names_the_whole_prefix_and_not_its_own_tokens() -> None:
    """A61: cached "A B" and "C D"; the request "A D" shares one block, not two."""
    a, b, c, d = ([number] * 4 for number in range(4))
    cached = set(_chain(a + b)) | set(_chain(c + d))
    asked = _chain(a + d)
    assert [block in cached for block in asked] == [True, False]
    assert common_blocks(_chain(a + b), asked) == 1


def test_two_equal_turns_do_not_cancel() -> None:
    """A62: equal blocks in a row have different names, and differ from one of them."""
    turn = [5, 6, 7, 8]
    chain = _chain(turn * 4)
    assert len(set(chain)) == 4
    assert common_blocks(chain, _chain(turn * 2)) == 2


def test_prompts_of_equal_length_with_other_ids_share_nothing() -> None:
    """A65: token-id prompts are named by their ids, not by how many there are."""
    assert not set(_chain([1, 2, 3, 4])) & set(_chain([4, 3, 2, 1]))


def test_one_step_is_the_next_link_of_the_chain() -> None:
    chain = _chain(list(range(8)))
    assert next_block(chain[0], pack_tokens([4, 5, 6, 7]), 0) == chain[1]
    assert next_block(BlockId(bytes(16)), pack_tokens([4, 5, 6, 7]), 0) != chain[1]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_outside_of_32_bits_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token])


@pytest.mark.parametrize(("page", "block"), [(1, 64), (16, 64), (64, 64), (48, 48), (128, 128)])
def test_blocks_are_whole_pages(page: int, block: int) -> None:
    assert block_tokens_for(page) == block


def test_a_page_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="page_tokens"):
        block_tokens_for(0)


@pytest.mark.parametrize(("prompt", "cached"), [(128, 127), (129, 128), (130, 128), (0, 0)])
def test_a_full_match_still_leaves_one_token_to_compute(prompt: int, cached: int) -> None:
    assert cached_tokens(2, 64, prompt) == cached
