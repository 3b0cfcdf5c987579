"""What of prompts is kept in memory: shared beginnings of those that may be kept, and no more."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from policies.hot import HeatMap, HotSettings
from prompt.model import PromptTokens, ReadPrompt
from router.branch import Branch
from router.chooser import Routed
from router.warm_setting import LEAST_KEPT_BYTES, WarmUpSettings
from router.warm_text import PrefixTexts
from state.model import ModelIdentity, ReplicaId
from state.prefix import chain_of, chain_root, pack_tokens, salt_scope

BLOCK = 64
REPLICAS = [ReplicaId("a"), ReplicaId("b")]


def tokens_of(name: str, count: int) -> list[int]:
    draw = random.Random(name)
    return [draw.randrange(30_000) for _ in range(count)]


class Keeping:
    """A heat map and what is kept beside it; ``salts`` are those of scopes now."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 100.0
        self.salts: dict[str, str] = {}
        self.heat = HeatMap(HotSettings(min_prefix_tokens=BLOCK))
        self.texts = PrefixTexts(
            WarmUpSettings(enabled=True, **settings),
            self.heat,
            lambda: self.now_s,
            salt_of=lambda scope: self.salts.get(scope, ""),
            min_tokens=2 * BLOCK,
        )

    def serve(self, tokens: list[int], **fields: Any) -> Routed:
        """Let a prompt arrive and be served."""
        scope, salt = fields.pop("scope", ""), fields.pop("salt", "")
        read = PromptTokens(packed=pack_tokens(tokens), is_exact=fields.pop("is_exact", True))
        prompt = ReadPrompt(model="m", is_stream=True, prompts=(read,), salt=salt)
        prompt = msgspec.structs.replace(prompt, **fields)
        identity = ModelIdentity(model="m", scope=salt_scope(salt), block_tokens=BLOCK)
        chain = chain_of(chain_root(identity, 0), read.packed, BLOCK, 0)
        routed = Routed(prompt, 1, read.is_exact, read.count)
        routed.scope, routed.tenant = scope, scope or None
        routed.branches = [Branch(identity, identity, (chain,) * len(prompt.prompts))]
        self.heat.observe(chain, read.count, REPLICAS, self.now_s, BLOCK)
        self.texts.note(routed)
        return routed

    def kept(self) -> list[list[int]]:
        """Return the tokens that may be used now."""
        found = [memoryview(one.tokens.packed).cast("I").tolist() for one in self.texts]
        return sorted(found, key=len)


@pytest.fixture
def keeping() -> Keeping:
    return Keeping()


def test_what_several_prompts_share_is_kept_and_what_is_a_requests_own_is_not(
    keeping: Keeping,
) -> None:
    shared = tokens_of("shared", 5 * BLOCK)
    for index in range(8):
        keeping.serve(shared + tokens_of(f"own {index}", 3 * BLOCK))
        if index < 2:
            assert keeping.kept() == []
    assert keeping.kept() == [shared]


def test_a_prompt_that_comes_again_and_again_is_kept_in_whole_blocks(keeping: Keeping) -> None:
    prompt = tokens_of("same", 4 * BLOCK + 10)
    for _ in range(3):
        keeping.serve(prompt)
    assert keeping.kept() == [prompt[: 4 * BLOCK]]
    assert keeping.texts.kept_bytes == 4 * BLOCK * 4 + 4 * 100


@pytest.mark.parametrize(
    "fields", [{"is_exact": False}, {"has_media": True}, {"prompts": ()}], ids=str
)
def test_what_cannot_be_sent_as_tokens_is_not_kept(
    keeping: Keeping, fields: dict[str, Any]
) -> None:
    for _ in range(8):
        keeping.serve(tokens_of("same", 4 * BLOCK), **fields)
    assert keeping.kept() == []


def test_short_prefixes_are_not_kept(keeping: Keeping) -> None:
    for _ in range(8):
        keeping.serve(tokens_of("short", 2 * BLOCK - 1))
        keeping.serve(tokens_of("one block", BLOCK) + tokens_of(str(keeping.now_s), 3 * BLOCK))
        keeping.now_s += 0.1
    assert keeping.kept() == []


def test_memory_is_bounded_and_the_least_frequent_goes() -> None:
    keeping = Keeping(kept_bytes=LEAST_KEPT_BYTES)
    often = tokens_of("often", 100 * BLOCK)
    for _ in range(20):
        keeping.serve(often)
    for index in range(60):
        for _ in range(4):
            keeping.serve(tokens_of(f"other {index}", 100 * BLOCK))
        assert keeping.texts.kept_bytes <= LEAST_KEPT_BYTES
    assert keeping.texts.kept_bytes > LEAST_KEPT_BYTES // 2
    assert often in keeping.kept()


def test_one_prefix_takes_a_part_of_the_memory_at_most() -> None:
    keeping = Keeping(kept_bytes=LEAST_KEPT_BYTES)
    for _ in range(4):
        keeping.serve(tokens_of("large", 1_000 * BLOCK))
    assert keeping.kept() == []


def test_what_nobody_brings_goes_after_its_time(keeping: Keeping) -> None:
    for _ in range(4):
        keeping.serve(tokens_of("same", 4 * BLOCK))
    keeping.now_s += 600.0
    assert len(keeping.kept()) == 1
    keeping.now_s += 0.1
    assert keeping.kept() == []
    keeping.texts.tick()
    assert (len(keeping.texts), keeping.texts.kept_bytes) == (0, 0)


def test_a_scope_that_is_deleted_leaves_nothing_and_takes_nothing_of_others(
    keeping: Keeping,
) -> None:
    keeping.salts = {"tenant:a": "salt a", "tenant:b": "salt b"}
    mine, others = tokens_of("a", 4 * BLOCK), tokens_of("b", 5 * BLOCK)
    for _ in range(4):
        keeping.serve(mine, scope="tenant:a", salt="salt a")
        keeping.serve(others, scope="tenant:b", salt="salt b")
    assert keeping.kept() == [mine, others]
    assert keeping.texts.forget("tenant:a") == 1
    assert keeping.kept() == [others]


def test_nothing_is_kept_or_used_under_a_salt_that_is_not_its_scopes_present_one(
    keeping: Keeping,
) -> None:
    """A rotation, a request that ends after one, and a user that a tenant keeps apart."""
    keeping.salts = {"tenant:a": "first"}
    prompt = tokens_of("a", 4 * BLOCK)
    for _ in range(4):
        keeping.serve(prompt, scope="tenant:a", salt="of a user")
    assert len(keeping.texts) == 0
    for _ in range(4):
        keeping.serve(prompt, scope="tenant:a", salt="first")
    [text] = list(keeping.texts)
    assert keeping.texts.is_good(text)
    keeping.salts["tenant:a"] = "second"
    assert not keeping.texts.is_good(text)
    assert keeping.kept() == []
    keeping.serve(prompt, scope="tenant:a", salt="first")
    assert keeping.kept() == []
    keeping.texts.tick()
    assert len(keeping.texts) == 0


def test_what_is_sent_has_the_salt_of_its_tenant_and_the_tokens_asked_for(
    keeping: Keeping,
) -> None:
    keeping.salts = {"tenant:a": "first"}
    prompt = tokens_of("a", 4 * BLOCK)
    for _ in range(4):
        keeping.serve(prompt, scope="tenant:a", salt="first")
    [text] = list(keeping.texts)
    routed = text.routed(2 * BLOCK)
    assert (routed.prompt.salt, routed.scope, routed.prompt_tokens) == ("first", "tenant:a", 128)
    assert routed.prompt.prompts[0].packed == pack_tokens(prompt[: 2 * BLOCK])
    assert routed.prompt.max_output_tokens == 1
    assert text.whole.prompt_tokens == 4 * BLOCK


def test_neither_tokens_nor_salts_show_in_what_may_be_logged(keeping: Keeping) -> None:
    keeping.salts = {"tenant:a": "a secret salt"}
    for _ in range(4):
        keeping.serve([4_711] * (4 * BLOCK), scope="tenant:a", salt="a secret salt")
    [text] = list(keeping.texts)
    for shown in (repr(text), str(text), repr(keeping.texts)):
        assert "4711" not in shown
        assert "secret" not in shown


def test_a_trail_tells_the_forks_of_a_way_and_counts_nothing() -> None:
    heat = HeatMap(HotSettings())
    assert heat.trail((), 0.0) == []
    root = chain_root(ModelIdentity(model="m"), 0)

    def chain(*names: str) -> Any:
        tokens = [token for name in names for token in tokens_of(name, 4 * BLOCK)]
        return chain_of(root, pack_tokens(tokens), BLOCK, 0)

    for _ in range(12):
        heat.observe(chain("system", "x"), 8 * BLOCK, REPLICAS, 1.0, BLOCK)
    for _ in range(4):
        heat.observe(chain("system", "y"), 8 * BLOCK, REPLICAS, 1.0, BLOCK)
    way = heat.trail(chain("system", "x", "more"), 1.0)
    assert [(step.blocks, step.arrivals) for step in way] == [(4, 16.0), (8, 12.0)]
    assert heat.trail(chain("system", "x", "more"), 1.0) == way
    assert [step.blocks for step in heat.trail(chain("system", "y")[:6], 1.0)] == [4, 6]
    later = heat.trail(chain("system"), 31.0)
    assert [step.arrivals for step in later] == [pytest.approx(8.0)]
    assert heat.trail(chain("other"), 1.0) == []
