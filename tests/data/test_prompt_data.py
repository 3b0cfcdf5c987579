"""The real tokenizers, templates and conversations of the shared test data."""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from prompt.codec import Codec, load_codec
from prompt.model import TemplateFailureError
from prompt.reader import CHAT_PATH, COMPLETION_PATH, PromptReader
from prompt.request import decode_chat
from prompt.template import ChatTemplate
from support.data import data_file, json_lines, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.data

TEXTS = ("arena_hard_v2", "glaive_tools", "oasst1_en", "taubench_airline")
NOON_S = 1_767_268_800.0
SIZES = {"tiny-chat": 8192, "qwen3": 151_669, "gpt-oss": 200_019}
CHAT_DIGESTS = {
    "tiny-chat": "44e1bcc76d8d53b66de510164c51b6a9",
    "qwen3": "0d585e7b3f0218c612e087a550c407cc",
}
"""SHA-256, in part, of the packed ids of all prompts, in order."""
TEXT_DIGESTS = {
    "HuggingFaceTB-SmolLM3-3B": "6132ec81a4bcfbc3d3129964d4b40f60",
    "Qwen-Qwen2.5-7B-Instruct": "4e4e6487b2fbc070abf6ea91145a5a1e",
    "Qwen-Qwen3-0.6B": "808db90958d5cf7da76713d341cc5779",
    "llama-3-instruct.chujiezheng": "484cb82885aa455a6a9a9b8479fd07db",
    "microsoft-Phi-3.5-mini-instruct": "1ebe205a42d95a2feecd55ef7b24cb11",
    "openai-gpt-oss-120b": "2e39d471ee9f723134137f62bc8b7c2d",
}
"""The same of the rendered texts, on 2026-01-01."""
HELLO_IDS = {
    "tiny-chat": [1, 6190, 224, 65, 6231, 246, 2, 2152, 2, 224, 1, 853, 4787, 224],
    "qwen3": [151644, 872, 198, 9707, 220, 151645, 856, 151645, 198, 151644, 77091, 198],
}
GOLDEN_MARK = "\n__ggml_vocab_test__\n"


def write_real_tokenizer(name: str, folder: Path) -> Path:
    source = data_file(f"tokenizers/{name}")
    for path in source.glob("*.json"):
        shutil.copyfile(path, folder / path.name)
    if not (source / "tokenizer.json").exists():
        (folder / "tokenizer.json").write_bytes(unpacked(f"tokenizers/{name}/tokenizer.json.zst"))
    return folder


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Codec]:
    names = ("tiny-chat", "qwen3", "gpt-oss")
    folders = {name: write_real_tokenizer(name, tmp_path_factory.mktemp(name)) for name in names}
    return {name: load_codec(folder) for name, folder in folders.items()}


def conversations() -> Iterator[dict[str, Any]]:
    for name in TEXTS:
        yield from json_lines(f"text/{name}.jsonl.zst")


def ids_of(packed: bytes) -> list[int]:
    return list(array("I", packed))


def test_the_real_tokenizers_load(codecs: dict[str, Codec]) -> None:
    assert {name: codec.vocabulary_size for name, codec in codecs.items()} == SIZES
    assert all(codec.is_exact for codec in codecs.values())
    assert len({codec.digest for codec in codecs.values()}) == len(codecs)


def test_qwen3_gives_the_golden_ids_of_qwen2(codecs: dict[str, Codec]) -> None:
    """Qwen3 kept Qwen2's vocabulary and pre-tokenizer; its additions do not occur in the texts."""
    golden = data_file("tokenizers/golden/ggml-vocab-qwen2.gguf.inp").read_bytes().decode()
    expected = data_file("tokenizers/golden/ggml-vocab-qwen2.gguf.out").read_text()
    texts = golden.split(GOLDEN_MARK)
    lines = expected.split("\n")
    assert (len(texts), lines.pop()) == (47, "")
    for text, line in zip(texts[:-1], lines, strict=True):
        assert ids_of(codecs["qwen3"].text_tokens(text)) == [int(part) for part in line.split()]


@pytest.mark.parametrize("name", ["tiny-chat", "qwen3"])
def test_all_conversations_have_the_ids_of_transformers(
    codecs: dict[str, Codec], name: str
) -> None:
    """Transformers 5.24 gave these ids for all 5,028 prompts, with their normalised messages."""
    digest = hashlib.sha256()
    prompts = 0
    for conversation in conversations():
        for add_generation_prompt in (True, False):
            call = decode_chat(body_of(conversation, add_generation_prompt=add_generation_prompt))
            digest.update(codecs[name].chat_tokens(call.messages, call.tools, options=call.options))
            prompts += 1
    assert prompts == 5028
    assert digest.hexdigest()[:32] == CHAT_DIGESTS[name]


def test_special_tokens_of_a_user_have_the_ids_seen_in_transformers(
    codecs: dict[str, Codec],
) -> None:
    messages = [{"role": "user", "content": "Hello <|im_end|> x"}]
    for name, ids in HELLO_IDS.items():
        assert ids_of(codecs[name].chat_tokens(messages, None, options={})) == ids


@pytest.mark.parametrize(
    ("template", "refusals"),
    [
        ("HuggingFaceTB-SmolLM3-3B", 0),
        ("Qwen-Qwen2.5-7B-Instruct", 0),
        ("Qwen-Qwen3-0.6B", 0),
        ("llama-3-instruct.chujiezheng", 494),
        ("microsoft-Phi-3.5-mini-instruct", 0),
        ("openai-gpt-oss-120b", 2),
    ],
)
def test_every_template_renders_every_conversation_or_refuses_in_its_own_words(
    template: str, refusals: int
) -> None:
    """Transformers 5.24 gives the same texts and refuses the same conversations."""
    source = data_file(f"tokenizers/chat_templates/{template}.jinja").read_text()
    chat = ChatTemplate(
        source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, clock=lambda: NOON_S
    )
    digest = hashlib.sha256()
    outcomes: Counter[str] = Counter()
    for conversation in conversations():
        call = decode_chat(body_of(conversation))
        try:
            text = chat.render(call.messages, call.tools, options=call.options)
        except TemplateFailureError as error:
            outcomes[error.detail.partition(":")[0]] += 1
        else:
            outcomes["rendered"] += 1
            digest.update(text.encode())
    assert outcomes == Counter(
        {"rendered": 2514 - refusals} | ({"TemplateError": refusals} if refusals else {})
    )
    assert digest.hexdigest()[:32] == TEXT_DIGESTS[template]


def test_tools_are_shown_by_templates_that_know_them(codecs: dict[str, Codec]) -> None:
    """A69: tools on and off."""
    conversation = next(
        item for item in json_lines("text/glaive_tools.jsonl.zst") if "tools" in item
    )
    with_tools, without = (
        decode_chat(body_of(conversation)),
        decode_chat(body_of({"messages": conversation["messages"]})),
    )
    name = conversation["tools"][0]["function"]["name"]
    codec = codecs["qwen3"]
    shown = codec.chat_tokens(with_tools.messages, with_tools.tools, options=with_tools.options)
    hidden = codec.chat_tokens(without.messages, without.tools, options=without.options)
    assert f'"name": "{name}"' in codec.decode(ids_of(shown))
    assert len(shown) > len(hidden)


async def test_captured_requests_have_the_engines_ids(codecs: dict[str, Codec]) -> None:
    """Bodies that a vLLM server answered with its prompt_token_ids."""
    runs = json.loads(data_file("kv_events/kv_events_samples.json").read_text())["runs"]
    compared = 0
    async with PromptReader({}, codecs["tiny-chat"]) as reader:
        for scenario in (scenario for run in runs for scenario in run["scenarios"]):
            request = scenario.get("request", {})
            if request.get("path") != COMPLETION_PATH:
                continue
            read = await reader.read(COMPLETION_PATH, json.dumps(request["body"]).encode())
            assert ids_of(read.prompts[0].packed) == scenario["prompt_token_ids"]
            assert read.prompts[0].is_exact
            assert read.salt == request["body"].get("cache_salt", "")
            compared += 1
    assert compared == 112


async def test_long_conversations_are_read_in_threads_with_the_same_ids(
    codecs: dict[str, Codec],
) -> None:
    """A47: all airline conversations in one."""
    messages = [
        message
        for conversation in json_lines("text/taubench_airline.jsonl.zst")
        for message in conversation["messages"]
    ]
    body = body_of({"messages": messages[:2500]})
    codec = codecs["tiny-chat"]
    async with PromptReader({"tiny-chat": codec}, codec) as reader:
        read = await reader.read(CHAT_PATH, body)
    call = decode_chat(body)
    assert read.prompts[0].packed == codec.chat_tokens(
        call.messages, call.tools, options=call.options
    )
    assert read.prompts[0].count > 200_000


def body_of(conversation: dict[str, Any], **fields: object) -> bytes:
    named = {key: conversation[key] for key in ("messages", "tools") if key in conversation}
    return json.dumps({"model": "tiny-chat"} | named | fields).encode()
