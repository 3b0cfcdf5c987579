"""Tails behind public prefixes in the sidecar: whose blocks they are, and when nobody's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from sidecar.event import ClearedPages, RemovedPages, decode_batch
from sidecar.fold import PageFolder
from sidecar.pagechange import PagesStored
from sidecar.publisher import EventFormat
from state.model import BlockId, ModelIdentity, NamespaceId, Tier
from state.prefix import (
    chain_of,
    chain_root,
    namespace_of,
    pack_tokens,
    salt_scope,
    tail_root,
)
from state.secret import ChainKeys

if TYPE_CHECKING:
    from sidecar.event import KvEvent
    from sidecar.publisher import EventEncoding

IDENTITY = ModelIdentity(model="m", block_tokens=4)
KEYS = ChainKeys(0, b"a deployment key of thirty-two bytes")
PUBLIC = list(range(8))
TASK = list(range(100, 108))


def key(number: int) -> BlockId:
    return BlockId(number.to_bytes(16, "big"))


def events(
    first: int,
    tokens: list[int],
    parent: int | None = None,
    salt: str | None = None,
    encoding: EventEncoding = "map",
) -> list[KvEvent]:
    """Return what the worker tells of pages of two tokens, as it arrives."""
    keys = tuple(key(first + at) for at in range(len(tokens) // 2))
    change = PagesStored(keys, None if parent is None else key(parent), tokens, salt)
    return list(
        decode_batch(EventFormat(page_tokens=2, encoding=encoding).batch([change], 0)).events
    )


def folder() -> PageFolder:
    return PageFolder(IDENTITY, 2, keys=KEYS)


def public_chain(tokens: list[int]) -> tuple[BlockId, ...]:
    return chain_of(chain_root(IDENTITY, KEYS.of("")), pack_tokens(tokens), 4, KEYS.of(""))


def tail_chain(tokens: list[int], salt: str, public: list[int] = PUBLIC) -> tuple[BlockId, ...]:
    scope = salt_scope(salt)
    root = tail_root(public_chain(public)[-1], scope, KEYS.of(scope))
    return chain_of(root, pack_tokens(tokens), 4, KEYS.of(scope))


def namespace(salt: str = "") -> str:
    return namespace_of(msgspec.structs.replace(IDENTITY, scope=salt_scope(salt)))


def held(pages: PageFolder) -> dict[str, set[BlockId]]:
    return {name: blocks for (name, tier), blocks in pages.resident().items() if blocks}


@pytest.mark.parametrize("encoding", ["map", "array"])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_tail_is_its_scope_s_and_what_is_public_everybody_s(
    *, is_late: bool, encoding: EventEncoding
) -> None:
    pages = folder()
    told = [
        events(1, PUBLIC, encoding=encoding),
        events(11, TASK[:4], 4, "a", encoding),
        events(13, TASK[4:], 12, encoding=encoding),
        events(21, TASK, 4, "b", encoding),
    ]
    for batch in told[1:] + told[:1] if is_late else told:
        pages.apply(batch)
    assert held(pages) == {
        namespace(): set(public_chain(PUBLIC)),
        namespace("a"): set(tail_chain(TASK, "a")),
        namespace("b"): set(tail_chain(TASK, "b")),
    }
    assert not pages.counts.opaque_pages


def test_tails_behind_two_public_prefixes_are_two() -> None:
    pages = folder()
    pages.apply(events(1, PUBLIC))
    pages.apply(events(11, TASK[:4], 2, "a"))
    pages.apply(events(21, TASK[:4], 4, "a"))
    tails = {*tail_chain(TASK[:4], "a", PUBLIC[:4]), *tail_chain(TASK[:4], "a")}
    assert held(pages)[namespace("a")] == tails
    assert len(tails) == 2


def test_a_tail_and_a_prompt_of_the_same_salt_and_tokens_never_meet() -> None:
    pages = folder()
    pages.apply(events(1, PUBLIC))
    pages.apply(events(11, TASK, 4, "a"))
    pages.apply(events(31, PUBLIC + TASK, None, "a"))
    identity = msgspec.structs.replace(IDENTITY, scope=salt_scope("a"))
    own = KEYS.of(salt_scope("a"))
    whole = chain_of(chain_root(identity, own), pack_tokens(PUBLIC + TASK), 4, own)
    tail = tail_chain(TASK, "a")
    assert held(pages)[namespace("a")] == {*whole, *tail}
    assert not set(whole) & set(tail)


@pytest.mark.parametrize("parent", [1, 3])
def test_a_tail_that_begins_within_a_block_is_nobody_s(parent: int) -> None:
    pages = folder()
    pages.apply(events(1, PUBLIC))
    pages.apply(events(11, TASK, parent, "a"))
    assert held(pages) == {namespace(): set(public_chain(PUBLIC))}
    assert pages.counts.opaque_pages == 4


def test_a_text_that_the_event_does_not_call_a_salt_begins_no_tail() -> None:
    """Engines list what an image is by a text, too."""
    fields = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": 4,
        "token_ids": TASK[:4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "extra_keys": [["a"], None],
    }
    pages = folder()
    pages.apply(events(1, PUBLIC))
    pages.apply(decode_batch(msgspec.msgpack.encode([0.0, [fields]])).events)
    pages.apply(decode_batch(msgspec.msgpack.encode([0.0, [fields | {"cache_salt": "b"}]])).events)
    assert held(pages) == {namespace(): set(public_chain(PUBLIC))}


def test_a_removed_tail_is_gone_and_its_public_prefix_stays() -> None:
    pages = folder()
    pages.apply(events(1, PUBLIC))
    pages.apply(events(11, TASK, 4, "a"))
    pages.apply([RemovedPages(handles=(14, 13, 12, 11), tier=Tier.GPU)])
    assert held(pages) == {namespace(): set(public_chain(PUBLIC))}
    assert pages.known_pages() == 4
    pages.apply(events(11, TASK, 4, "a"))
    assert held(pages)[namespace("a")] == set(tail_chain(TASK, "a"))
    pages.apply([ClearedPages()])
    assert not held(pages)


def test_a_tail_stays_known_when_the_public_pages_before_it_went() -> None:
    """They come back with the next prompt of whomever, and the tail behind them is what it was."""
    pages = folder()
    pages.apply(events(1, PUBLIC))
    pages.apply(events(11, TASK, 4, "a"))
    pages.apply([RemovedPages(handles=(4, 3, 2, 1), tier=Tier.GPU)])
    assert held(pages) == {namespace("a"): set(tail_chain(TASK, "a"))}
    pages.apply(events(1, PUBLIC))
    assert held(pages)[namespace()] == set(public_chain(PUBLIC))


def test_a_copy_in_host_memory_is_the_same_tail_s() -> None:
    pages = folder()
    pages.apply(events(1, PUBLIC))
    pages.apply(events(11, TASK[:4], 4, "a"))
    moved = [
        PagesStored((key(11),), key(4), TASK[:2], "a", "host"),
        PagesStored((key(12),), key(11), TASK[2:4], None, "host"),
    ]
    pages.apply(decode_batch(EventFormat(page_tokens=2).batch(moved, 0)).events)
    pages.apply([RemovedPages(handles=(12, 11), tier=Tier.GPU)])
    name = NamespaceId(namespace("a"))
    assert pages.resident()[name, Tier.HOST] == set(tail_chain(TASK[:4], "a"))
    assert not pages.resident().get((name, Tier.GPU))
