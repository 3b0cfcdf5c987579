"""A pool as sets, written apart from the audit: emits transitions, and says which are legal."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from sidecar.journal import Operation, PageRecord, PageState, TierName, Transition

if TYPE_CHECKING:
    import random

PAGES = 5
REQUESTS = ("a", "b", "c")
TENANTS = ("", "x")
WHY: dict[Operation, str] = {"evict": "lru", "end": "done", "release": "done"}
OPERATIONS: tuple[Operation, ...] = (
    *("release", "evict", "copy") * 40,
    *("create", "append", "reserve", "fill", "index", "move", "unpin", "end") * 12,
    *("share", "unindex", "pin") * 3,
    *("clear", "count"),
)
"""Weighted so that pages do not end up held or pinned by everybody."""


class ModelTier:
    """One tier: a page is what the sets say that hold its number."""

    def __init__(self) -> None:
        self.taken: set[int] = set()
        self.reserved: set[int] = set()
        self.filled: set[int] = set()
        self.indexed: set[int] = set()
        self.pinned: set[int] = set()
        self.leftover: set[int] = set()
        self.holds: Counter[tuple[int, str]] = Counter()
        self.tenant: dict[int, str] = {}

    def copy(self) -> ModelTier:
        other = ModelTier()
        for name, value in vars(self).items():
            setattr(other, name, value.copy())
        return other

    def holders(self, page: int) -> dict[str, int]:
        return {who: n for (held, who), n in sorted(self.holds.items()) if held == page and n}

    def state(self, page: int) -> PageState:
        if page not in self.taken:
            return "free"
        if page in self.reserved:
            return "reserved"
        if self.holders(page):
            return "used" if page in self.filled else "allocated"
        return "pinned" if page in self.pinned else "evictable"

    def forget(self, page: int) -> None:
        for pages in (self.taken, self.reserved, self.filled, self.indexed, self.pinned):
            pages.discard(page)

    def records(self) -> list[PageRecord]:
        return [
            PageRecord(
                page,
                self.state(page),
                self.holders(page),
                page in self.indexed,
                page in self.pinned,
                self.tenant[page],
            )
            for page in sorted(self.taken)
        ]

    def totals(self) -> dict[str, int]:
        return dict(Counter(self.state(page) for page in range(PAGES)))


class ModelPool:
    """Two tiers; ``apply`` changes them as a legal transition says."""

    def __init__(self) -> None:
        self.tiers: dict[TierName, ModelTier] = {"device": ModelTier(), "host": ModelTier()}

    def copy(self) -> ModelPool:
        other = ModelPool()
        other.tiers = {name: tier.copy() for name, tier in self.tiers.items()}
        return other

    def snapshot(self, why: str) -> Transition:
        return Transition(
            op="open",
            run=1,
            why=why,
            totals={name: tier.totals() for name, tier in self.tiers.items()},
            records={name: tier.records() for name, tier in self.tiers.items()},
        )

    def count(self) -> Transition:
        return Transition(
            op="count", totals={name: tier.totals() for name, tier in self.tiers.items()}
        )

    def end_step(self) -> None:
        """Forget what evicted pages had: the step that took them has run."""
        for tier in self.tiers.values():
            tier.leftover.clear()

    def guess(self, rng: random.Random) -> Transition:
        """Return a transition that may or may not be legal."""
        op = rng.choice(OPERATIONS)
        if op == "count":
            return self.count()
        pages = rng.sample(range(PAGES), 1 if rng.random() < 0.7 else 2)
        needs_request = op in {"create", "append", "share", "copy", "end"} or rng.random() < 0.7
        return Transition(
            op=op,
            tier="device" if op == "copy" or rng.random() < 0.7 else "host",
            pages=[] if op in {"clear", "end"} else pages,
            request=rng.choice(REQUESTS) if needs_request else None,
            why=WHY.get(op),
            tenant=rng.choice(TENANTS),
            targets=rng.sample(range(PAGES), len(pages)) if op in {"copy", "move"} else [],
            target_tier=rng.choice(["device", "host"]) if op == "move" else None,
        )

    def apply(self, transition: Transition) -> bool:
        """Do it and return True, or return False and do nothing that matters."""
        tier = self.tiers[transition.tier]
        match transition.op:
            case "count":
                return transition.totals == self.count().totals
            case "end":
                held = [who for each in self.tiers.values() for _, who in +each.holds]
                return transition.request not in held
            case "clear":
                for page in list(tier.taken):
                    _forget_content(tier, page)
                return True
            case "move":
                return self._can_move(transition)
            case "copy":
                pairs = zip(transition.pages, transition.targets, strict=True)
                return all(_copy(tier, *pair, transition.request or "") for pair in pairs)
            case _:
                return all(_step(tier, page, transition) for page in transition.pages)

    def _can_move(self, transition: Transition) -> bool:
        name = transition.target_tier
        if name is None or name == transition.tier:
            return False
        source, target = self.tiers[transition.tier], self.tiers[name]
        full = {"used", "evictable", "pinned"}
        return all(source.state(p) in full or p in source.leftover for p in transition.pages) and (
            all(target.state(p) == "reserved" for p in transition.targets)
        )


def _step(tier: ModelTier, page: int, transition: Transition) -> bool:
    if not 0 <= page < PAGES:
        return False
    op, state, request = transition.op, tier.state(page), transition.request
    if op in {"create", "append", "reserve"}:
        return _take(tier, page, transition)
    if op == "release" and request is None:
        is_legal = state == "reserved" and not tier.holders(page)
        tier.forget(page) if is_legal else None
        return is_legal
    if op == "release":
        return _release(tier, page, request or "")
    if op == "share":
        is_legal = state != "free" and not (state == "reserved" and not tier.holders(page))
        tier.holds[page, request or ""] += is_legal
        return is_legal
    return _mark(tier, page, op)


def _take(tier: ModelTier, page: int, transition: Transition) -> bool:
    if page in tier.taken:
        return False
    tier.taken.add(page)
    tier.tenant[page] = transition.tenant or ""
    if transition.op == "reserve":
        tier.reserved.add(page)
    if transition.request is not None:
        tier.holds[page, transition.request] += 1
    return True


def _release(tier: ModelTier, page: int, request: str) -> bool:
    if not tier.holds[page, request]:
        return False
    tier.holds[page, request] -= 1
    if not tier.holders(page):
        tier.reserved.discard(page)
        tier.filled.add(page)
        if page not in tier.indexed:
            tier.forget(page)
    return True


def _copy(tier: ModelTier, page: int, target: int, request: str) -> bool:
    is_used = tier.state(page) == "used" and tier.holds[page, request]
    if not is_used or tier.state(target) != "allocated" or not tier.holds[target, request]:
        return False
    tier.filled.add(target)
    tier.leftover.discard(target)
    return _release(tier, page, request)


def _mark(tier: ModelTier, page: int, op: Operation) -> bool:
    state = tier.state(page)
    legal = {
        "fill": state in {"allocated", "reserved"},
        "index": state != "free" and page not in tier.indexed,
        "unindex": page in tier.indexed,
        "pin": state != "free",
        "unpin": page in tier.pinned,
        "evict": state == "evictable",
    }[op]
    if not legal:
        return False
    if op == "fill":
        tier.leftover.discard(page)
        if tier.holders(page):
            tier.reserved.discard(page)
            tier.filled.add(page)
    elif op == "index":
        tier.indexed.add(page)
        if not tier.holders(page):
            tier.reserved.discard(page)
            tier.filled.add(page)
    elif op == "unindex":
        _forget_content(tier, page)
    elif op == "pin":
        tier.pinned.add(page)
    elif op == "unpin":
        tier.pinned.discard(page)
    else:
        tier.leftover.add(page)
        tier.forget(page)
    return True


def _forget_content(tier: ModelTier, page: int) -> None:
    was_kept = tier.state(page) in {"evictable", "pinned"}
    tier.indexed.discard(page)
    tier.pinned.discard(page)
    if was_kept:
        tier.forget(page)


def random_life(rng: random.Random, wanted: int) -> tuple[list[Transition], ModelPool]:
    """Return a log of legal transitions, first a snapshot, and the pool that it leads to."""
    pool = ModelPool()
    log = [pool.snapshot("started")]
    guess = Transition(op="create", pages=[0], request="a")
    for _ in range(wanted * 30):
        if len(log) > wanted:
            break
        after = pool.copy()
        if after.apply(guess):
            pool = after
            log.append(guess)
        guess = pool.guess(rng)
    return log, pool


def first_wrong(log: list[Transition]) -> int | None:
    """Return the index of the first transition of ``log`` that is not legal."""
    pool = ModelPool()
    for index, transition in enumerate(log[1:], start=1):
        if not pool.apply(transition):
            return index
    return None


def end_of(log: list[Transition]) -> ModelPool:
    """Return the pool that a legal ``log`` leads to."""
    pool = ModelPool()
    for transition in log[1:]:
        pool.apply(transition)
    return pool


def numbered(log: list[Transition]) -> list[Transition]:
    """Return ``log`` with the numbers that its lines would have."""
    return [msgspec.structs.replace(each, n=n) for n, each in enumerate(log, start=1)]


def mutate(log: list[Transition], rng: random.Random) -> list[Transition]:
    """Return ``log`` with one of its transitions lost, doubled, moved or altered."""
    changed = list(log)
    at = rng.randrange(1, len(log))
    kind = rng.choice(["drop", "double", "swap", "page", "request"])
    if kind == "drop":
        del changed[at]
    elif kind == "double":
        changed.insert(at, changed[at])
    elif kind == "swap":
        other = rng.randrange(1, len(log))
        changed[at], changed[other] = changed[other], changed[at]
    elif kind == "page" and changed[at].pages:
        pages = list(changed[at].pages)
        pages[0] = rng.randrange(-1, PAGES + 1)
        changed[at] = msgspec.structs.replace(changed[at], pages=pages)
    elif changed[at].request is not None:
        changed[at] = msgspec.structs.replace(changed[at], request=rng.choice(REQUESTS))
    return changed
