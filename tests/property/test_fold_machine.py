"""Folding against a model that recomputes residency from nothing but the held copies."""

from __future__ import annotations

import hashlib
from collections import Counter

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sidecar.event import ClearedPages, KvEvent, RemovedPages, StoredPages
from sidecar.fold import PageFolder
from state.model import BlockId, ModelIdentity, NamespaceId, Tier
from state.prefix import chain_of, chain_root, namespace_of, pack_tokens, salt_scope

PAGE_TOKENS = 2
PAGES_PER_BLOCK = 2
IDENTITY = ModelIdentity(model="m", block_tokens=PAGE_TOKENS * PAGES_PER_BLOCK)
SPACES = (("", ""), ("a", ""), ("", "s"))

Path = tuple[int, ...]
"""The pages of a prompt, each named by the token that fills it."""

paths = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)
spaces = st.sampled_from(SPACES)
tiers = st.sampled_from([Tier.GPU, Tier.GPU, Tier.HOST])


def handle_of(space: tuple[str, str], path: Path) -> int:
    digest = hashlib.blake2b(repr((space, path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def tokens_of(path: Path) -> bytes:
    return pack_tokens([token for token in path for _ in range(PAGE_TOKENS)])


class FoldMachine(RuleBasedStateMachine):
    """Pages are stored under known parents, so the folder must know exactly what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = PageFolder(IDENTITY, PAGE_TOKENS)
        self.copies: Counter[tuple[Tier, tuple[str, str], Path]] = Counter()
        self.announced: dict[tuple[NamespaceId, Tier], set[BlockId]] = {}
        self.batch: list[KvEvent] = []

    def is_held(self, space: tuple[str, str], path: Path) -> bool:
        return any(self.copies[tier, space, path] for tier in Tier)

    def can_store(self, space: tuple[str, str], path: Path) -> bool:
        return not path or self.is_held(space, path)

    @rule(space=spaces, path=paths, start=st.integers(0, 6), tier=tiers)
    def store(self, space: tuple[str, str], path: Path, start: int, tier: Tier) -> None:
        start = min(start, len(path) - 1)
        if not self.can_store(space, path[:start]):
            return
        run = [path[: end + 1] for end in range(start, len(path))]
        self.batch.append(
            StoredPages(
                handles=tuple(handle_of(space, page) for page in run),
                parent=handle_of(space, path[:start]) if start else None,
                packed_tokens=tokens_of(path[start:]),
                page_tokens=PAGE_TOKENS,
                adapter=space[0],
                scope=salt_scope(space[1]) if space[1] and not start else None,
                tier=tier,
            )
        )
        is_report = not start and len(run) > 1 and all(self.copies[tier, space, p] for p in run)
        for page in run:
            if not is_report and (tier is Tier.GPU or not self.copies[tier, space, page]):
                self.copies[tier, space, page] += 1

    @rule(pick=st.randoms(use_true_random=False))
    def remove(self, pick: object) -> None:
        held = sorted(key for key, copies in self.copies.items() if copies)
        if held:
            self.remove_page(*held[pick.randrange(len(held))])  # type: ignore[attr-defined]

    @rule(space=spaces, path=paths, tier=tiers)
    def remove_any(self, space: tuple[str, str], path: Path, tier: Tier) -> None:
        self.remove_page(tier, space, path)

    def remove_page(self, tier: Tier, space: tuple[str, str], path: Path) -> None:
        self.batch.append(RemovedPages(handles=(handle_of(space, path),), tier=tier))
        if self.copies[tier, space, path]:
            self.copies[tier, space, path] -= 1

    @rule()
    def clear(self) -> None:
        self.batch.append(ClearedPages())
        self.copies.clear()

    @rule()
    def flush(self) -> None:
        fold = self.folder.apply(self.batch)
        self.batch = []
        if fold.is_clear:
            self.announced = {}
        for change in fold.changes:
            assert not set(change.stored) & set(change.removed)
            blocks = self.announced.setdefault((change.namespace, change.tier), set())
            assert blocks >= set(change.removed)
            assert not blocks & set(change.stored)
            blocks -= set(change.removed)
            blocks |= set(change.stored)
            if not blocks:
                del self.announced[change.namespace, change.tier]
        assert self.announced == self.folder.resident()
        self.compare(self.folder.resident())

    def expected(self) -> dict[tuple[NamespaceId, Tier], set[BlockId]]:
        found: dict[tuple[NamespaceId, Tier], set[BlockId]] = {}
        for (tier, space, path), copies in self.copies.items():
            if not copies or len(path) % PAGES_PER_BLOCK:
                continue
            pages = [path[: len(path) - back] for back in range(PAGES_PER_BLOCK)]
            if not all(self.copies.get((tier, space, page)) for page in pages):
                continue
            identity = msgspec.structs.replace(
                IDENTITY, adapter=space[0], scope=salt_scope(space[1])
            )
            chain = chain_of(chain_root(identity, 0), tokens_of(path), IDENTITY.block_tokens, 0)
            found.setdefault((namespace_of(identity), tier), set()).add(chain[-1])
        return found

    def compare(self, resident: object) -> None:
        assert resident == self.expected()

    @invariant()
    def nothing_is_kept_for_nothing(self) -> None:
        if not self.batch and not any(self.copies.values()):
            assert self.folder.known_pages() == 0

    def teardown(self) -> None:
        self.flush()


class OrphanMachine(FoldMachine):
    """Parents may be unknown: the folder may know less than is held, never more."""

    def can_store(self, space: tuple[str, str], path: Path) -> bool:
        del space, path
        return True

    def compare(self, resident: object) -> None:
        assert isinstance(resident, dict)
        expected = self.expected()
        for key, blocks in resident.items():
            assert blocks <= expected.get(key, set())


TestFold = FoldMachine.TestCase
TestFold.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestOrphans = OrphanMachine.TestCase
TestOrphans.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
