from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from prompt.codec import load_codec
from state.prefix import TOKEN_BYTES, pack_tokens
from warmroute.corpus import VOCABULARY_TOKENS, write_tokenizer
from warmroute.demo import PAGE_TOKENS, DemoSettings, pages_for
from warmroute.score import InfiniteCache
from warmroute.workload import WorkloadSize, build_sessions

if TYPE_CHECKING:
    from prompt.codec import Codec
    from warmroute.workload import Session

SIZE = WorkloadSize(sessions=9, turns=4, agents=3, open_sessions=4)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return load_codec(write_tokenizer(tmp_path_factory.mktemp("model"), seed=3))


def prompts_of(session: Session, codec: Codec) -> list[bytes]:
    """Return the packed prompt of each turn, with a stand-in for what the model says."""
    messages = [session.system]
    prompts = []
    for turn in session.turns:
        messages.append(turn.message)
        prompts.append(codec.chat_tokens(messages, None, options={}))
        messages.append({"role": "assistant", "content": "done"})
    return prompts


def test_a_seed_decides_the_workload() -> None:
    assert build_sessions(SIZE, 5) == build_sessions(SIZE, 5)
    assert build_sessions(SIZE, 5) != build_sessions(SIZE, 6)


def test_every_agent_type_has_its_share_of_the_sessions_and_one_system_prompt() -> None:
    sessions = build_sessions(SIZE, 1)
    assert Counter(session.agent for session in sessions) == {
        "agent-0": 3,
        "agent-1": 3,
        "agent-2": 3,
    }
    prompts = {(session.agent, session.system["content"]) for session in sessions}
    assert len(prompts) == len({text for _, text in prompts}) == 3


def test_a_session_begins_with_the_user_and_goes_on_with_tools() -> None:
    for session in build_sessions(SIZE, 1):
        assert [turn.message["role"] for turn in session.turns] == ["user", "tool", "tool", "tool"]


def test_no_two_sessions_are_about_the_same() -> None:
    contents = [
        turn.message["content"] for session in build_sessions(SIZE, 1) for turn in session.turns
    ]
    assert len(set(contents)) == SIZE.sessions * SIZE.turns


def test_the_first_sessions_arrive_one_after_another_and_later_ones_at_once() -> None:
    first_pauses_s = [session.turns[0].think_s for session in build_sessions(SIZE, 1)]
    assert first_pauses_s[3] > 0.4
    assert max(first_pauses_s[4:]) < 0.4


def test_prompts_are_a_few_thousand_tokens_and_each_continues_the_one_before(codec: Codec) -> None:
    for session in build_sessions(SIZE, 1):
        prompts = prompts_of(session, codec)
        system_tokens = len(codec.text_tokens(session.system["content"])) // TOKEN_BYTES
        assert 1_000 < system_tokens < 2_500
        assert len(prompts[0]) // TOKEN_BYTES > 1_500
        assert len(prompts[-1]) // TOKEN_BYTES < 8_000
        for before, after in pairwise(prompts):
            assert after.startswith(before)
            assert 150 < (len(after) - len(before)) // TOKEN_BYTES < 1_000


def test_the_tokenizer_is_small_exact_and_the_same_for_a_seed(
    codec: Codec, tmp_path_factory: pytest.TempPathFactory
) -> None:
    again = load_codec(write_tokenizer(tmp_path_factory.mktemp("again"), seed=3))
    assert again.digest == codec.digest
    assert codec.is_exact
    assert codec.vocabulary_size == VOCABULARY_TOKENS
    text = "Any text, even 漢字 🙂 that the corpus never had."
    packed = codec.text_tokens(text, add_special_tokens=False)
    ids = [
        int.from_bytes(packed[at : at + TOKEN_BYTES], "little")
        for at in range(0, len(packed), TOKEN_BYTES)
    ]
    assert pack_tokens(ids) == packed
    assert codec.decode(ids) == text


def test_a_long_output_is_cheap_in_tokens(codec: Codec) -> None:
    """A tokenizer that fell back to bytes would need a token for each character."""
    output = build_sessions(SIZE, 1)[0].turns[1].message["content"]
    assert len(codec.text_tokens(output)) // TOKEN_BYTES < len(output) / 3


def test_by_default_the_working_set_exceeds_all_pools_together(codec: Codec) -> None:
    settings = DemoSettings()
    sessions = build_sessions(WorkloadSize(), settings.seed)
    cache = InfiniteCache(PAGE_TOKENS)
    for session in sessions:
        cache.hold(prompts_of(session, codec)[-1])
    pool_tokens = pages_for(sessions, codec, settings.workers) * PAGE_TOKENS
    assert cache.held_tokens > 1.1 * settings.workers * pool_tokens
    assert (settings.sessions, settings.turns) == (WorkloadSize().sessions, WorkloadSize().turns)
