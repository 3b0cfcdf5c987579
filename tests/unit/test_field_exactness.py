"""Whose prefix a prompt shares: never another model's, nor one in the middle of another prompt."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from policies.hot import HeatMap, HotSettings
from policies.weighted import Weighted
from prompt.codec import load_codec
from prompt.model import PromptTokens, ReadPrompt
from prompt.reader import COMPLETION_PATH, PromptReader
from router.chooser import Chooser, Knowledge
from router.fleet import Member
from router.upstream import Endpoint
from state.lease import LeaseBook, Outcome
from state.memory import MemoryState
from state.model import ModelIdentity, ReplicaId, RouterId
from state.placement import Placements
from state.prefix import chain_of, chain_root, pack_tokens
from state.secret import ChainKeys
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

SEED = 3
ANY = ReplicaId("any")


def predicted(chooser: Chooser, model: str, *, is_exact: bool, tokens: range) -> int:
    """Send one prompt of ``model`` to the only replica; return what it is said to hold of it."""
    prompt = PromptTokens(packed=pack_tokens(tokens), is_exact=is_exact)
    read = ReadPrompt(model=model, is_stream=True, prompts=(prompt,))
    member = Member(replica=ANY, endpoint=Endpoint("127.0.0.1", 1))
    choice = chooser.choose(chooser.route(read), [member])
    assert choice is not None
    choice.first_byte(1.0)
    choice.finish(Outcome.DONE, had_first_byte=True)
    return choice.decision.predicted_cached_tokens


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_replica_with_two_models_is_warm_for_the_one_that_it_was_asked(*, is_exact: bool) -> None:
    """A73: of a replica without events, which may serve several models, own placements are kept."""
    know = Knowledge(
        reader=MemoryState(clock=lambda: 1.0).reader(RouterId("me")),
        leases=LeaseBook(),
        pending=Placements(2.0),
        guessed=Placements(600.0),
        heat=HeatMap(HotSettings()),
    )
    chooser = Chooser(know, Weighted(), keys=ChainKeys(SEED), seed=1, clock=lambda: 1.0)
    tokens = range(4_000)
    assert predicted(chooser, "one", is_exact=is_exact, tokens=tokens) == 0
    assert predicted(chooser, "one", is_exact=is_exact, tokens=tokens) > 900
    assert predicted(chooser, "two", is_exact=is_exact, tokens=tokens) == 0
    assert predicted(chooser, "two", is_exact=is_exact, tokens=tokens) > 900


@pytest.mark.parametrize(
    "other",
    [
        ModelIdentity(model="n"),
        ModelIdentity(model="m", weights_revision="2"),
        ModelIdentity(model="m", tokenizer="t"),
        ModelIdentity(model="m", adapter="a"),
        ModelIdentity(model="m", kv_parameters="fp8"),
        ModelIdentity(model="m", scope="s"),
        ModelIdentity(model="m", block_tokens=32),
        ModelIdentity(model="", weights_revision="m"),
    ],
    ids=str,
)
def test_no_block_is_shared_with_another_identity(other: ModelIdentity) -> None:
    """A73, A69: the whole kind: model, revision, tokenizer, adapter, parameters, scope, blocks."""
    packed = pack_tokens(range(640))
    chains = [
        set(chain_of(chain_root(identity, SEED), packed, identity.block_tokens, SEED))
        for identity in (ModelIdentity(model="m"), other)
    ]
    assert all(chains)
    assert not chains[0] & chains[1]


def test_a_block_in_the_middle_of_a_prompt_is_no_prefix_of_another() -> None:
    """B27: X then Y is stored; Y then Z shares nothing with it, X then Z one block."""
    root = chain_root(ModelIdentity(model="m"), SEED)

    def chain(*blocks: int) -> list[bytes]:
        tokens = [token for block in blocks for token in [block] * 64]
        return list(chain_of(root, pack_tokens(tokens), 64, SEED))

    stored = set(chain(1, 2))
    for unlike in (chain(2, 3), chain(2), chain(2, 2), chain(2, 1), chain(9, 2)):
        assert not stored & set(unlike)
    assert [block in stored for block in chain(1, 3)] == [True, False]


@pytest.mark.parametrize("repeats", [1, 400])
async def test_what_was_read_with_special_tokens_is_not_what_is_read_without(
    tmp_path: Path, repeats: int
) -> None:
    """A74: in turn, through whatever the reader remembers, short texts and long ones."""
    folder = write_tokenizer(tmp_path / "tokenizer")
    text = "the quick brown fox jumps " * repeats
    expected = {
        is_on: load_codec(folder).text_tokens(text, add_special_tokens=is_on)
        for is_on in (True, False)
    }
    assert len(expected[True]) == len(expected[False]) + 4
    reader = PromptReader({"tiny": load_codec(folder)}, load_codec(None))
    try:
        for is_on in (True, False, False, True, True, False):
            body = {"model": "tiny", "prompt": text, "add_special_tokens": is_on}
            read = await reader.read(COMPLETION_PATH, json.dumps(body).encode())
            assert [tokens.packed for tokens in read.prompts] == [expected[is_on]]
    finally:
        reader.close()
