"""Two gates of sharing: what is technically equal, and what may be shared."""

from __future__ import annotations

import msgspec
import pytest

from sidecar.cache import PagedCache
from sidecar.scheduler import Scheduler
from sidecar.scope import Scopes
from sidecar.step import SchedulerLimits, Sequence
from state.model import ModelIdentity
from state.prefix import pack_tokens

PAGE_TOKENS = 4
IDENTITY = ModelIdentity(
    model="m",
    weights_revision="w",
    tokenizer="t",
    adapter="a",
    kv_parameters="float32",
    block_tokens=PAGE_TOKENS,
)
PUBLIC = list(range(10))  # two full pages and a half
PROMPT = [*PUBLIC, *range(100, 111)]


def _scopes(identity: ModelIdentity = IDENTITY, seed: int = 0, *public: list[int]) -> Scopes:
    scopes = Scopes(identity, seed)
    scopes.allow(pack_tokens(each) for each in public)
    return scopes


class Engine:
    """One cache and scheduler; ``ask`` runs a prompt to its end."""

    def __init__(self, pages: int = 64) -> None:
        self.scheduler = Scheduler(PagedCache(pages, PAGE_TOKENS), SchedulerLimits())
        self.steps: list[int] = []

    def ask(self, scopes: Scopes, tokens: list[int], salt: str | None = None) -> int:
        """Return the prompt's cached tokens; ``steps`` gets the tokens that each step computed."""
        sequence = self.start(scopes, tokens, salt)
        self.steps = []
        while self.scheduler.has_work:
            step = self.scheduler.schedule()
            self.steps.append(sum(work.new_tokens for work in step.works))
            for each in self.scheduler.complete(step):
                self.scheduler.append(each, 7)
                if each.output_tokens == each.max_output_tokens:
                    self.scheduler.end(each)
        assert sequence.cached_tokens is not None
        return sequence.cached_tokens

    def start(self, scopes: Scopes, tokens: list[int], salt: str | None = None) -> Sequence:
        packed = pack_tokens(tokens)
        table = self.scheduler.cache.open_table(packed, scopes.place(packed, salt), salt)
        return self.scheduler.submit(table, 2)


def test_the_same_engine_and_tokens_share() -> None:
    """Else the tests below would prove nothing."""
    engine = Engine()
    assert [engine.ask(_scopes(), PROMPT) for _ in range(2)] == [0, 20]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"weights_revision": "x"},
        {"tokenizer": "u"},
        {"adapter": "b"},
        {"adapter": ""},
        {"kv_parameters": "bfloat16"},
        {"model": "mw", "weights_revision": ""},
    ],
    ids=str,
)
@pytest.mark.parametrize("salt", [None, "s"])
def test_equal_tokens_under_another_identity_never_share(
    other: dict[str, str], salt: str | None
) -> None:
    engine = Engine()
    engine.ask(_scopes(IDENTITY, 0, PUBLIC), PROMPT, salt)
    changed = msgspec.structs.replace(IDENTITY, **other)
    assert engine.ask(_scopes(changed, 0, PUBLIC), PROMPT, salt) == 0


def test_equal_tokens_under_another_seed_never_share() -> None:
    engine = Engine()
    engine.ask(_scopes(), PROMPT)
    assert engine.ask(_scopes(IDENTITY, 1), PROMPT) == 0


@pytest.mark.parametrize(("one", "other"), [("s", "t"), ("s", None), (None, "s"), ("s", "S")])
def test_equal_tokens_under_another_salt_never_share(one: str | None, other: str | None) -> None:
    engine = Engine()
    assert [engine.ask(_scopes(), PROMPT, salt) for salt in (one, other, one)] == [0, 0, 20]


def test_an_empty_salt_is_no_salt() -> None:
    engine = Engine()
    assert [engine.ask(_scopes(), PROMPT, salt) for salt in (None, "")] == [0, 20]


def test_a_public_prefix_is_shared_by_all_up_to_its_last_full_page_and_nothing_after_it() -> None:
    engine, scopes = Engine(), _scopes(IDENTITY, 0, PUBLIC)
    assert engine.ask(scopes, PROMPT, "a") == 0
    assert engine.ask(scopes, PROMPT, "b") == 8
    assert engine.ask(scopes, PROMPT, None) == 8
    assert [engine.ask(scopes, PROMPT, salt) for salt in ("a", "b", None)] == [20, 20, 20]


def test_the_partial_last_page_of_a_public_prefix_is_private() -> None:
    engine, scopes = Engine(), _scopes(IDENTITY, 0, PUBLIC)
    engine.ask(scopes, [*PUBLIC, *range(100, 104)], "a")
    assert engine.ask(scopes, [*PUBLIC, *range(100, 104)], "b") == 8


def test_a_prompt_that_ends_within_the_public_prefix_is_private() -> None:
    """It does not begin with the whole of it, so nobody said that it may be shared."""
    engine, scopes = Engine(), _scopes(IDENTITY, 0, list(range(16)))
    short = [*range(9)]
    assert engine.ask(scopes, short, "a") == 0
    assert engine.ask(scopes, short, "b") == 0
    assert engine.ask(scopes, short, "a") == 8


def test_a_prompt_that_is_the_public_prefix_is_shared_but_for_its_last_token() -> None:
    engine, scopes = Engine(), _scopes(IDENTITY, 0, list(range(8)))
    assert [engine.ask(scopes, list(range(8)), salt) for salt in ("a", "b", None)] == [0, 4, 4]


def test_the_longest_public_prefix_counts_and_a_prompt_may_leave_it_for_a_shorter_one() -> None:
    short, long = list(range(8)), list(range(16))
    engine, scopes = Engine(), _scopes(IDENTITY, 0, long, short)
    assert scopes.public_prefixes == 2
    assert engine.ask(scopes, [*long, 50, 51], "a") == 0
    assert engine.ask(scopes, [*long, 50, 51], "b") == 16
    assert engine.ask(scopes, [*short, 60, 61, 62, 63, 64], "a") == 8
    assert engine.ask(scopes, [*short, 60, 61, 62, 63, 64], "b") == 8
    assert engine.ask(scopes, [*long, 50, 51], None) == 16


def test_a_public_prefix_shorter_than_a_page_makes_nothing_public() -> None:
    engine, scopes = Engine(), _scopes(IDENTITY, 0, [0, 1, 2])
    assert scopes.public_prefixes == 0
    assert [engine.ask(scopes, PROMPT, salt) for salt in ("a", "b")] == [0, 0]


def test_a_new_list_of_public_prefixes_replaces_the_old_one() -> None:
    engine, scopes = Engine(), _scopes(IDENTITY, 0, PUBLIC)
    engine.ask(scopes, PROMPT, "a")
    scopes.allow([])
    assert engine.ask(scopes, PROMPT, "b") == 0


def test_what_one_tenant_computed_privately_shows_in_nothing_that_another_can_measure() -> None:
    """Cached tokens, steps and tokens per step of b: the same whether a was there or not."""
    seen = []
    for prompts_of_a in ([], [PROMPT], [PROMPT, [*PROMPT, *range(200, 230)]]):
        engine, scopes = Engine(), _scopes(IDENTITY, 0, PUBLIC)
        engine.ask(scopes, [*PUBLIC, 99], "c")
        for prompt in prompts_of_a:
            engine.ask(scopes, prompt, "a")
        cached_tokens = engine.ask(scopes, [*PROMPT, *range(200, 230)], "b")
        seen.append((cached_tokens, engine.steps))
    assert seen == [seen[0]] * 3
    assert seen[0][0] == 8


def test_private_pages_carry_their_tenant_and_public_ones_nobodys_name() -> None:
    engine, scopes = Engine(), _scopes(IDENTITY, 0, PUBLIC)
    engine.ask(scopes, PROMPT, "a")
    engine.ask(scopes, PROMPT, "b")
    tenants = engine.scheduler.cache.pool.tenants()
    named = {scopes.place(b"", salt).tenant for salt in ("a", "b")}
    assert set(tenants) == {"", *named}
    assert sum(tenants[""].values()) == 2
    assert all(len(name) == 12 for name in named)


def test_the_salt_is_on_the_event_of_the_page_where_the_private_part_starts() -> None:
    engine, scopes = Engine(), _scopes(IDENTITY, 0, PUBLIC)
    engine.ask(scopes, PROMPT, "a")
    public, private, *_ = engine.scheduler.cache.drain_changes()
    assert [public.salt, private.salt] == [None, "a"]  # type: ignore[union-attr]
    assert len(public.keys) == 2  # type: ignore[union-attr]
    assert private.parent == public.keys[-1]  # type: ignore[union-attr]
