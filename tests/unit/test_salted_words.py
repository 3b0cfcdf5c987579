"""What else the router remembers of prompts, besides whole prefixes, is not shared by salts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from prompt.codec import load_codec
from prompt.engine import Engine
from prompt.passage import Passages
from prompt.reader import CHAT_PATH, COMPLETION_PATH, PromptReader
from prompt.turn import ChatTurns
from sidecar.assembly import assemble
from sidecar.setting import WorkerSettings
from support.tokenizer import write_tokenizer
from warmroute.audit_probe import fresh_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATHS = [CHAT_PATH, COMPLETION_PATH]
SIZES = [(CHAT_PATH, 40), *((path, words) for path in PATHS for words in (180, 800))]
"""Words: a short body, one of a kept prompt, and one that is read by its turns or marks."""


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the texts of which words are looked up among those that anybody brought."""
    texts: list[str] = []

    def watch(name: str) -> None:
        packed = getattr(Engine, name)

        def noted(engine: Engine, text: str) -> bytes:
            texts.append(text)
            found: bytes = packed(engine, text)
            return found

        monkeypatch.setattr(Engine, name, noted)

    watch("packed_short")
    watch("packed_again")
    return texts


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[PromptReader]:
    made = PromptReader({"m": load_codec(write_tokenizer(tmp_path))}, load_codec(None))
    yield made
    made.close()


def body_of(path: str, text: str, *, before: str = "", behind: str = "") -> bytes:
    """Return a body with a salt before its prompt, or behind it."""
    prompt = {"messages": [{"role": "user", "content": text}]}
    fields: dict[str, Any] = {"cache_salt": before} if before else {}
    fields |= {"model": "m"} | (prompt if path == CHAT_PATH else {"prompt": text})
    return json.dumps(fields | ({"cache_salt": behind} if behind else {})).encode()


@pytest.mark.parametrize(("path", "words"), SIZES)
async def test_words_that_another_tenant_brought_are_not_looked_up(
    reader: PromptReader, looked_up: list[str], path: str, words: int
) -> None:
    """S-05: a known word takes a tenth of the time of a new one."""
    text = fresh_prompt(words)
    plain = await reader.read(path, body_of(path, text))
    assert looked_up
    looked_up.clear()
    for more in ("", " " + fresh_prompt(20)):  # and as it goes on
        for salt in ("acme", "other"):
            salted = await reader.read(path, body_of(path, text + more, before=salt))
            if not more:
                assert salted.prompts[0].packed == plain.prompts[0].packed
    assert looked_up == []


async def test_a_short_text_is_not_left_to_a_library_that_remembers_words(
    reader: PromptReader, looked_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-05: special tokens go around it here, too."""
    text = fresh_prompt(40)
    plain = await reader.read(COMPLETION_PATH, body_of(COMPLETION_PATH, text))

    def refused(*_: object, **__: object) -> list[int]:
        raise AssertionError

    monkeypatch.setattr(Engine, "slow_ids", refused)
    salted = await reader.read(COMPLETION_PATH, body_of(COMPLETION_PATH, text, before="acme"))
    assert salted.prompts[0].packed == plain.prompts[0].packed
    assert looked_up == []


async def test_turns_that_go_on_look_no_words_up(
    reader: PromptReader, looked_up: list[str]
) -> None:
    messages = [{"role": "user", "content": fresh_prompt(400)}]
    for _ in range(8):
        body = {"cache_salt": "acme", "model": "m", "messages": messages}
        read = await reader.read(CHAT_PATH, json.dumps(body).encode())
        assert read.prompts[0].is_exact
        messages += [
            {"role": "assistant", "content": fresh_prompt(30)},
            {"role": "user", "content": fresh_prompt(30)},
        ]
    assert looked_up == []


def test_a_worker_s_codec_looks_no_words_up_and_gives_the_same_ids(
    tmp_path: Path, looked_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-05: a worker is asked by all tenants, and reads each text as if it were the first."""
    folder = write_tokenizer(tmp_path)
    text = f"<|im_start|>user\n{fresh_prompt(300)} naïve 你好\n\n  {'x ' * 3000}"
    chat = [{"role": "user", "content": text}]
    plain = load_codec(folder)
    expected = [plain.text_tokens(text, add_special_tokens=added) for added in (False, True)]
    expected_chat = plain.chat_tokens(chat, None, options={})
    settings = WorkerSettings(compute="synthetic", tokenizer=str(folder), page_tokens=16)
    built = assemble(settings, lambda _: None)
    looked_up.clear()
    codec = built.codec
    ascii_text = fresh_prompt(50)
    words = plain.text_tokens(ascii_text, add_special_tokens=True)
    assert expected == [
        codec.text_tokens(text, add_special_tokens=added) for added in (False, True)
    ]
    assert codec.chat_tokens(chat, None, options={}) == expected_chat
    looked_up.clear()
    codec.chat_tokens([{"role": "user", "content": ascii_text}], None, options={})
    monkeypatch.setattr(Engine, "slow_ids", None)
    assert codec.text_tokens(ascii_text, add_special_tokens=True) == words
    assert looked_up == []


@pytest.mark.parametrize("path", PATHS)
def test_a_body_whose_salt_is_behind_the_prompt_is_read_whole(path: str) -> None:
    """S-05: it begins like others' bodies; what is known of these must not make it fast."""
    decode = ChatTurns().decode if path == CHAT_PATH else Passages().decode
    text = fresh_prompt(800)
    grown = text if path == CHAT_PATH else text + " and on"  # what a known mark is gone on from
    decode(body_of(path, text, behind="acme"))
    for salts in ({"behind": "other"}, {}, {"behind": "other"}):
        body = body_of(path, grown, **salts)
        assert decode(body).fresh_bytes == len(body)
    decode(body_of(path, text, before="acme"))
    known = body_of(path, grown, before="acme")
    assert decode(known).fresh_bytes < len(known) / 2
