"""Prompts of every kind of chat are those of a real vLLM, with templates that do what they like.

``make test-vllm WARMROUTE_VLLM=/path/to/vllm``.
"""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from prompt.codec import load_codec
from prompt.question import RENDER_SUFFIX, TOKENIZE_PATH, question_of, rendered, tokenized
from prompt.reader import CHAT_PATH, PromptReader
from support.data import data_file
from support.exact_case import CASES, digest_of, known_answers
from support.exact_stand import body_of, heard, write_styled, wrong_cases
from support.exact_template import STYLES, TEMPLATES
from support.vllm import MODEL, vllm_command, write_model
from support.vllm_stand import MARKS, PAGES, open_stand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from support.vllm_stand import Stand

pytestmark = [*MARKS, pytest.mark.data]

SWITCHES: Final = (
    "--enable-scale-out",  # serves /render
    "--trust-request-chat-template",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
)
REAL: Final = (
    "HuggingFaceTB-SmolLM3-3B",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "llama-3-instruct.chujiezheng",
    "microsoft-Phi-3.5-mini-instruct",
    "openai-gpt-oss-120b",
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def styled(tmp_path_factory: pytest.TempPathFactory, vllm: Path) -> AsyncIterator[Stand]:
    """Two engines whose template has a style for every request, before one router."""
    folder = tmp_path_factory.mktemp("styled")
    model = write_styled(write_model(folder / "model", vllm))
    command = vllm_command(vllm, model, PAGES, *SWITCHES)
    async with open_stand(folder, command, model) as stand:
        yield stand


def reader_with(stand: Stand, folder: Path, source: str) -> PromptReader:
    """Return a reader of the engines' tokenizer with another template."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((stand.model / name).read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = source
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return PromptReader({MODEL: load_codec(folder)}, load_codec(None))


class Engine:
    """Asks the first engine of a stand."""

    def __init__(self, stand: Stand) -> None:
        self._http = stand.fleet.http
        self._url = stand.engines.engines[0].url

    async def answer(self, target: str, body: Any) -> bytes | None:
        """Return what ``target`` answers, None when it refuses."""
        async with self._http.post(self._url + target, json=body) as answer:
            assert answer.status in {200, 400}, await answer.text()
            return await answer.read() if answer.status == 200 else None

    async def prompt(self, body: dict[str, Any], source: str) -> bytes | None:
        """Return the ids of a chat with the template ``source``, None when it is refused."""
        asked = {**body, "chat_template": source}
        raw = await self.answer(CHAT_PATH + RENDER_SUFFIX, asked)
        return None if raw is None else rendered(raw, CHAT_PATH)

    async def tokenized(self, body: dict[str, Any], source: str) -> bytes | None:
        """Return the same by ``/tokenize``, asked as a router does that has no tokenizer."""
        question = question_of(CHAT_PATH, json.dumps(body).encode())
        assert question is not None
        assert question.body is not None
        raw = await self.answer(
            TOKENIZE_PATH, {**json.loads(question.body), "chat_template": source}
        )
        is_empty = raw is None or not json.loads(raw)["tokens"]
        return None if raw is None or is_empty else tokenized(raw)

    async def text(self, packed: bytes) -> str:
        """Return the text of ids, special tokens and all."""
        tokens = memoryview(packed).cast("I").tolist()
        raw = await self.answer("/detokenize", {"model": MODEL, "tokens": tokens})
        assert raw is not None
        return str(json.loads(raw)["prompt"])


async def compared(
    stand: Stand, folder: Path, source: str
) -> tuple[list[str], dict[str, str | None]]:
    """Return what is not as the engine has it, and digests of the engine's prompts by case."""
    engine = Engine(stand)
    wrong = []
    digests: dict[str, str | None] = {}
    async with reader_with(stand, folder, source) as reader:
        for case, fields in CASES.items():
            body = {"model": MODEL, **fields}
            expected = await engine.prompt(body, source)
            digests[case] = None if expected is None else digest_of(await engine.text(expected))
            read = await reader.read(CHAT_PATH, json.dumps(body).encode())
            ours = [tokens.packed for tokens in read.prompts if tokens.packed]
            if ours != ([] if expected is None else [expected]):
                wrong.append(f"{case}: {read.unroutable}")
            if await engine.tokenized(body, source) != expected:
                wrong.append(f"{case}: /tokenize")
    return wrong, digests


@pytest.mark.parametrize("name", TEMPLATES)
async def test_chats_have_the_prompts_of_the_engine_and_those_that_are_on_record(
    styled: Stand, tmp_path: Path, name: str
) -> None:
    wrong, digests = await compared(styled, tmp_path / "model", TEMPLATES[name])
    assert not wrong, "\n".join(wrong)
    assert digests == known_answers().get(name), json.dumps(digests)


@pytest.mark.parametrize("name", REAL)
async def test_chats_have_the_prompts_of_the_engine_with_templates_of_models(
    styled: Stand, tmp_path: Path, name: str
) -> None:
    source = data_file(f"tokenizers/chat_templates/{name}.jinja").read_text()
    wrong, digests = await compared(styled, tmp_path / "model", source)
    assert not wrong, "\n".join(wrong)
    assert sum(digest is not None for digest in digests.values()) > len(CASES) // 3


async def test_every_kind_of_chat_is_predicted_to_the_page(styled: Stand) -> None:
    wrong, refused = await wrong_cases(styled, product(CASES, STYLES))
    assert not wrong, "\n".join(wrong)
    assert 0 < refused < len(CASES)


@pytest.mark.parametrize("style", STYLES)
async def test_a_salt_changes_nothing_but_who_shares(styled: Stand, style: str) -> None:
    body = body_of("a call and its result", style, 1_000 + STYLES.index(style))
    plain = [await heard(styled, body) for _ in range(2)]
    salted = [await heard(styled, {**body, "cache_salt": f"s-{style}"}) for _ in range(2)]
    other = await heard(styled, {**body, "cache_salt": f"t-{style}"})
    assert all(one.is_right for one in (*plain, *salted, other))
    assert [one.cached_tokens for one in (salted[0], other)] == [0, 0]
    assert plain[1].cached_tokens == salted[1].cached_tokens > 0
