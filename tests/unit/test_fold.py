from __future__ import annotations

import msgspec
import pytest

from sidecar.event import ClearedPages, KvEvent, RemovedPages, StoredPages, decode_batch
from sidecar.fold import PageFolder, PageSizeError
from state.model import BlockId, ModelIdentity, NamespaceId, Tier
from state.prefix import chain_of, chain_root, namespace_of, pack_tokens, salt_scope
from state.secret import ChainKeys
from support.kv_engine import stored

IDENTITY = ModelIdentity(model="m", block_tokens=4)
SEED = 7


def folder(page_tokens: int = 2, capacity_pages: int | None = None) -> PageFolder:
    return PageFolder(IDENTITY, page_tokens, keys=ChainKeys(SEED), capacity_pages=capacity_pages)


def identity(adapter: str = "", salt: str = "") -> ModelIdentity:
    return msgspec.structs.replace(IDENTITY, adapter=adapter, scope=salt_scope(salt))


def chain(tokens: list[int], adapter: str = "", salt: str = "") -> tuple[BlockId, ...]:
    root = chain_root(identity(adapter, salt), SEED)
    return chain_of(root, pack_tokens(tokens), IDENTITY.block_tokens, SEED)


def store(  # noqa: PLR0913 - the fields of an event
    handles: list[int],
    tokens: list[int],
    parent: int | None = None,
    *,
    adapter: str = "",
    salt: str | None = None,
    tier: Tier | None = Tier.GPU,
    opaque_from: int | None = None,
    group: int | None = None,
) -> StoredPages:
    return StoredPages(
        handles=tuple(handles),
        parent=parent,
        packed_tokens=pack_tokens(tokens),
        page_tokens=len(tokens) // len(handles),
        adapter=adapter,
        scope=None if salt is None else salt_scope(salt),
        opaque_from=opaque_from,
        tier=tier,
        group=group,
    )


def remove(*handles: int, tier: Tier | None = Tier.GPU, group: int | None = None) -> RemovedPages:
    return RemovedPages(handles=handles, tier=tier, group=group)


def held(
    pages: PageFolder, tier: Tier = Tier.GPU, namespace: NamespaceId | None = None
) -> set[BlockId]:
    return set(pages.resident().get((namespace or namespace_of(IDENTITY), tier), ()))


def test_a_block_is_resident_once_all_its_pages_are() -> None:
    pages = folder()
    first = pages.apply([store([1, 2, 3], [1, 2, 3, 4, 5, 6])])
    assert [change.stored for change in first.changes] == [chain([1, 2, 3, 4])]
    second = pages.apply([store([4], [7, 8], 3)])
    assert [change.stored for change in second.changes] == [chain([1, 2, 3, 4, 5, 6, 7, 8])[1:]]


def test_small_pages_add_up_to_blocks() -> None:
    """B14, B55."""
    pages = folder(page_tokens=1)
    events: list[KvEvent] = [
        store([handle], [handle], handle - 1 if handle > 1 else None) for handle in range(1, 9)
    ]
    pages.apply(events)
    assert held(pages) == set(chain(list(range(1, 9))))


def test_branches_of_one_early_page_make_blocks_of_their_own() -> None:
    """B55."""
    pages = folder()
    pages.apply([store([1, 2], [1, 2, 3, 4]), store([3], [5, 6], 1)])
    assert held(pages) == {*chain([1, 2, 3, 4]), *chain([1, 2, 5, 6])}
    pages.apply([remove(3)])
    assert held(pages) == set(chain([1, 2, 3, 4]))


def test_an_early_page_takes_its_blocks_along_and_brings_them_back() -> None:
    """B26."""
    pages = folder()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    pages.apply([store([1, 2, 3, 4], tokens)])
    gone = pages.apply([remove(1)])
    assert gone.changes[0].removed == chain([1, 2, 3, 4])
    assert held(pages) == set(chain(tokens)[1:])
    back = pages.apply([store([1], [1, 2])])
    assert back.changes[0].stored == chain([1, 2, 3, 4])


def test_a_page_is_held_until_its_last_copy_is_gone() -> None:
    """A81, B24."""
    pages = folder(page_tokens=4)
    pages.apply([store([1], [1, 2, 3, 4]), store([1], [1, 2, 3, 4])])
    assert not pages.apply([remove(1)]).changes
    assert held(pages) == set(chain([1, 2, 3, 4]))
    assert pages.apply([remove(1)]).changes[0].removed == chain([1, 2, 3, 4])
    assert pages.known_pages() == 0


def test_a_report_of_known_pages_is_not_another_copy() -> None:
    """B24: a re-announced prefix does not become immortal."""
    pages = folder()
    run = store([1, 2], [1, 2, 3, 4])
    pages.apply([run, run, run])
    pages.apply([remove(2, 1)])
    assert not held(pages)
    assert pages.counts.reports == 2


def test_more_copies_than_the_pool_has_pages_are_corrected() -> None:
    pages = folder(page_tokens=4, capacity_pages=3)
    page = store([1], [1, 2, 3, 4])
    pages.apply([page, page, page, page])
    pages.apply([remove(1)])
    assert not held(pages)


def test_no_more_pages_than_the_pool_are_kept() -> None:
    pages = folder(page_tokens=4, capacity_pages=10)
    for handle in range(100):
        pages.apply([store([handle], [handle] * 4)])
    assert pages.known_pages() <= 10
    assert held(pages) >= {chain([99] * 4)[0]}


def test_a_block_that_came_and_went_in_one_call_is_no_change() -> None:
    pages = folder(page_tokens=4)
    assert not pages.apply([store([1], [1, 2, 3, 4]), remove(1)]).changes
    pages.apply([store([1], [1, 2, 3, 4])])
    assert not pages.apply([remove(1), store([1], [1, 2, 3, 4])]).changes


def test_a_clear_voids_everything_before_it() -> None:
    """B04, C32."""
    pages = folder()
    pages.apply([store([1, 2], [1, 2, 3, 4]), store([8], [1, 2], salt="t")])
    fold = pages.apply(
        [store([9], [1, 2], 2), ClearedPages(), store([5, 6], [5, 6, 7, 8]), store([7], [1, 2], 2)]
    )
    assert fold.is_clear
    assert [(change.stored, change.removed) for change in fold.changes] == [
        (chain([5, 6, 7, 8]), ())
    ]
    assert held(pages) == set(chain([5, 6, 7, 8]))


def test_a_copy_in_host_memory_outlives_the_one_on_the_gpu() -> None:
    """A82, B23."""
    pages = folder()
    tokens = [1, 2, 3, 4]
    pages.apply([store([1, 2], tokens), store([1, 2], tokens, tier=Tier.HOST)])
    moved = pages.apply([remove(1, 2)])
    assert [(change.tier, change.removed) for change in moved.changes] == [
        (Tier.GPU, chain(tokens))
    ]
    assert held(pages, Tier.HOST) == set(chain(tokens))
    pages.apply([remove(2, 1, tier=Tier.HOST)])
    assert not pages.resident()
    assert pages.known_pages() == 0


def test_an_offloaded_page_has_one_copy_however_often_it_is_told() -> None:
    pages = folder(page_tokens=4)
    on_host = store([1], [1, 2, 3, 4], tier=Tier.HOST)
    pages.apply([on_host, on_host, remove(1, tier=Tier.HOST)])
    assert not pages.resident()


def test_an_unknown_medium_earns_no_credit() -> None:
    """B22."""
    pages = folder()
    pages.apply([store([1, 2], [1, 2, 3, 4], tier=None), remove(1, tier=None)])
    assert not pages.resident()
    assert pages.counts.unknown_tier_events == 2


def test_a_placeholder_moves_known_pages_only() -> None:
    """B15."""
    pages = folder()
    pages.apply([store([1, 2], [1, 2, 3, 4])])
    placeholder = StoredPages(
        handles=(1, 2, 99), parent=None, packed_tokens=b"", page_tokens=0, tier=Tier.HOST
    )
    pages.apply([placeholder])
    assert held(pages, Tier.HOST) == set(chain([1, 2, 3, 4]))
    assert pages.counts.unknown_pages == 1


def test_adapters_and_salts_never_share() -> None:
    """A69, B16, B19."""
    pages = folder()
    tokens = [1, 2, 3, 4]
    pages.apply(
        [
            store([1, 2], tokens),
            store([3, 4], tokens, adapter="a"),
            store([5, 6], tokens, adapter="b"),
            store([7, 8], tokens, salt="t1"),
        ]
    )
    found = pages.resident()
    assert len(found) == 4
    assert found[namespace_of(identity("a")), Tier.GPU] == set(chain(tokens, "a"))
    assert found[namespace_of(identity(salt="t1")), Tier.GPU] == set(chain(tokens, salt="t1"))


def test_children_inherit_the_salt_through_their_parent() -> None:
    pages = folder()
    pages.apply([store([1, 2], [1, 2, 3, 4], salt="t1"), store([3, 4], [5, 6, 7, 8], 2)])
    namespace = namespace_of(identity(salt="t1"))
    expected = chain([1, 2, 3, 4, 5, 6, 7, 8], salt="t1")
    assert pages.resident() == {(namespace, Tier.GPU): set(expected)}


def test_one_handle_in_two_spaces_is_removed_from_both() -> None:
    """B18: a salt and an adapter of the same text have the same first hash."""
    pages = folder(page_tokens=4)
    tokens = [1, 2, 3, 4]
    pages.apply([store([12083517102536510777], tokens, salt="X")])
    pages.apply([store([12083517102536510777], tokens, adapter="X")])
    assert len(pages.resident()) == 2
    pages.apply([remove(12083517102536510777)])
    assert not pages.resident()


def test_a_child_of_a_shared_handle_goes_to_its_own_space_only() -> None:
    """B18."""
    pages = folder(page_tokens=4)
    first, rest = [1, 2, 3, 4], [5, 6, 7, 8]
    pages.apply([store([1], first, salt="X"), store([1], first, adapter="X")])
    pages.apply([store([2], rest, 1, adapter="X")])
    assert pages.resident()[namespace_of(identity("X")), Tier.GPU] == set(
        chain(first + rest, adapter="X")
    )
    assert pages.resident()[namespace_of(identity(salt="X")), Tier.GPU] == set(
        chain(first, salt="X")
    )


def test_a_child_whose_adapter_is_not_its_parents_is_not_indexed() -> None:
    pages = folder(page_tokens=4)
    pages.apply([store([1], [1, 2, 3, 4], adapter="X"), store([2], [5, 6, 7, 8], 1)])
    assert pages.resident() == {
        (namespace_of(identity("X")), Tier.GPU): set(chain([1, 2, 3, 4], "X"))
    }
    assert pages.counts.ambiguous_events == 1


def test_pages_with_images_and_what_follows_them_are_not_indexed() -> None:
    """A70."""
    pages = folder(page_tokens=4)
    pages.apply([store([1, 2], [1, 2, 3, 4, 5, 6, 7, 8], opaque_from=1)])
    pages.apply([store([3], [9, 9, 9, 9], 2)])
    assert held(pages) == set(chain([1, 2, 3, 4]))
    assert not pages.orphans
    pages.apply([remove(3, 2, 1)])
    assert pages.known_pages() == 0


def salted_from(page: int, handles: list[int], tokens: list[int], parent: int | None) -> KvEvent:
    """Return a store of whole pages as an engine publishes it, with a salt at ``page`` only."""
    fields = stored(handles, tokens, parent)
    fields["extra_keys"] = [["tenant"] if at == page else None for at in range(len(handles))]
    [event] = decode_batch(msgspec.msgpack.encode([0.0, [fields]])).events
    return event


@pytest.mark.parametrize("is_late", [False, True])
def test_a_private_tail_of_a_public_prefix_is_nobodys_block(*, is_late: bool) -> None:
    """B19: a salt in the middle of a prompt; whoever has none, or has it from the start, gets none.

    Also what follows the salted page, a copy of it in host memory, and a tail before its parent.
    """
    pages = folder()
    tokens = list(range(12))
    events = [
        store([1, 2], tokens[:4]),
        salted_from(0, [3, 4], tokens[4:8], 2),
        store([5, 6], tokens[8:], 4),
        store([3, 4], [], tier=Tier.HOST),
    ]
    pages.apply(events[1:3] + events[:1] + events[3:] if is_late else events)
    public = {(namespace_of(IDENTITY), Tier.GPU): set(chain(tokens[:4]))}
    assert pages.resident() == public
    assert pages.counts.opaque_pages == 4
    again = pages.apply([remove(6, 5, 4, 3)])
    assert not again.changes
    assert pages.resident() == public


def test_a_salt_within_one_run_of_pages_ends_what_is_public() -> None:
    pages = folder()
    pages.apply([salted_from(3, [1, 2, 3, 4, 5, 6], list(range(12)), None)])
    assert held(pages) == set(chain([0, 1, 2, 3]))
    assert len(pages.resident()) == 1


def test_a_child_waits_for_its_parent() -> None:
    """B30."""
    pages = folder(page_tokens=4)
    pages.apply([store([3], [9, 10, 11, 12], 2), store([2], [5, 6, 7, 8], 1)])
    assert not pages.resident()
    assert pages.orphans.pages == 2
    pages.apply([store([1], [1, 2, 3, 4])])
    assert held(pages) == set(chain(list(range(1, 13))))
    assert not pages.orphans


def test_a_removed_child_does_not_come_with_its_parent() -> None:
    pages = folder(page_tokens=4)
    pages.apply([store([2, 3, 4], [5, 6, 7, 8, 9, 9, 9, 9, 8, 8, 8, 8], 1), remove(3)])
    pages.apply([store([1], [1, 2, 3, 4])])
    assert held(pages) == set(chain([1, 2, 3, 4, 5, 6, 7, 8]))


def test_children_without_parents_are_bounded_and_counted() -> None:
    """B30."""
    pages = PageFolder(IDENTITY, 4, max_orphan_pages=10)
    for handle in range(100):
        pages.apply([store([1000 + handle], [1, 2, 3, 4], 2000 + handle)])
    assert pages.orphans.pages == 10
    assert pages.orphans.dropped == 90
    pages.apply([store(list(range(20)), [1, 2, 3, 4] * 20, 99)])
    assert pages.orphans.pages == 10


def test_a_long_chain_of_waiting_pages_resolves_without_recursion() -> None:
    pages = folder(page_tokens=4)
    events: list[KvEvent] = [store([n], [n] * 4, n - 1) for n in range(5000, 1, -1)]
    pages.apply(events)
    pages.apply([store([1], [1] * 4)])
    assert len(held(pages)) == 5000


def test_another_page_size_is_refused() -> None:
    """B14, C44."""
    pages = folder()
    with pytest.raises(PageSizeError) as caught:
        pages.apply([store([1], [1, 2, 3, 4])])
    assert caught.value.page_tokens == 4
    with pytest.raises(ValueError, match="pages"):
        PageFolder(IDENTITY, 3)


def test_a_short_page_between_whole_ones_is_no_other_page_size() -> None:
    pages = folder()
    pages.apply([store([1], [1, 2]), store([2], [3], 1)])
    assert pages.counts.short_pages == 1
    with pytest.raises(PageSizeError):
        folder().apply([store([2], [3])])


def test_one_group_stands_for_a_hybrid_model() -> None:
    window = StoredPages(
        handles=(1,),
        parent=None,
        packed_tokens=pack_tokens([1, 2, 3, 4]),
        page_tokens=2,
        group=0,
        is_prefix_group=False,
    )
    pages = folder()
    pages.apply([window, store([1, 2], [1, 2, 3, 4], group=1), remove(1, 2, group=0)])
    assert held(pages) == set(chain([1, 2, 3, 4]))
    pages.apply([remove(2, group=1)])
    assert not held(pages)


def test_the_same_page_under_two_handles_counts_until_both_are_gone() -> None:
    pages = folder(page_tokens=4)
    pages.apply([store([1], [1, 2, 3, 4]), store([2], [1, 2, 3, 4])])
    assert not pages.apply([remove(1)]).changes
    assert pages.apply([remove(2)]).changes[0].removed == chain([1, 2, 3, 4])


def test_salts_that_come_and_go_leave_nothing_behind() -> None:
    """B52."""
    pages = folder()
    for number in range(1000):
        pages.apply([store([1, 2], [1, 2, 3, 4], salt=f"s{number}"), remove(2, 1)])
    assert pages.known_pages() == 0
    assert not pages.resident()
    assert not pages._spaces
