from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from prompt.byte import ByteCodec
from prompt.codec import Codec, load_codec
from prompt.model import (
    CodecLoadError,
    TemplateFailureError,
    Unroutable,
    UnroutablePromptError,
)
from support.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

BOS, START, END = 0, 1, 2
USER = [{"role": "user", "content": "the quick brown fox"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def ids_of(packed: bytes) -> list[int]:
    return list(array("I", packed))


def chat(
    codec: Codec,
    messages: list[dict[str, Any]] = USER,
    tools: list[dict[str, Any]] | None = None,
    **options: object,
) -> bytes:
    return codec.chat_tokens(messages, tools, options=options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def codec(folder: Path) -> Codec:
    return load_codec(folder)


@pytest.fixture(params=["tokenizer", "bytes"])
def any_codec(request: pytest.FixtureRequest, codec: Codec) -> Codec:
    return codec if request.param == "tokenizer" else load_codec(None)


def test_ids_are_those_of_the_tokenizer_over_the_rendered_text(codec: Codec, folder: Path) -> None:
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "<|im_start|>user\nthe quick brown fox<|im_end|>\n<|im_start|>assistant\n"
    expected = reference.encode(text, add_special_tokens=False).ids
    assert ids_of(chat(codec)) == expected
    assert expected[0] == START
    assert expected.count(END) == 1


def test_special_tokens_are_added_to_plain_text_only(codec: Codec) -> None:
    """A74: with and without are different prompts."""
    with_bos = ids_of(codec.text_tokens("the fox"))
    without = ids_of(codec.text_tokens("the fox", add_special_tokens=False))
    assert with_bos == [BOS, *without]
    assert BOS not in ids_of(chat(codec))
    assert ids_of(chat(codec, add_special_tokens=True)) == [BOS, *ids_of(chat(codec))]


def test_special_tokens_spelled_by_a_user_count_as_special(codec: Codec) -> None:
    """As Hugging Face tokenizes: the engine does the same, so routing must."""
    assert ids_of(codec.text_tokens("a<|im_end|>b", add_special_tokens=False)).count(END) == 1
    assert ids_of(chat(codec, [{"role": "user", "content": "<|im_end|>"}])).count(END) == 2


def test_tools_change_the_prompt(any_codec: Codec) -> None:
    """A69: tools on and off never share a key."""
    plain, with_tools = chat(any_codec), chat(any_codec, tools=[TOOL])
    assert plain != with_tools
    assert not with_tools.startswith(plain[:200])


def test_a_generation_prompt_extends_the_conversation(any_codec: Codec) -> None:
    closed = chat(any_codec, add_generation_prompt=False)
    assert chat(any_codec).startswith(closed)
    assert len(chat(any_codec)) > len(closed)


def test_a_turn_that_is_appended_keeps_the_prefix(any_codec: Codec) -> None:
    longer = [*USER, {"role": "assistant", "content": "jumps"}, {"role": "user", "content": "ok"}]
    assert chat(any_codec, longer).startswith(chat(any_codec, add_generation_prompt=False))


def test_a_final_message_is_continued_without_its_end(any_codec: Codec) -> None:
    messages = [*USER, {"role": "assistant", "content": "it jumps"}]
    closed = chat(any_codec, messages, add_generation_prompt=False)
    continued = chat(any_codec, messages, add_generation_prompt=False, continue_final_message=True)
    assert closed.startswith(continued)
    assert len(continued) < len(closed)


def test_empty_contents_are_prompts_too(any_codec: Codec) -> None:
    empty = chat(any_codec, [{"role": "user", "content": ""}])
    assert empty == chat(any_codec, [{"role": "user", "content": None}])
    assert empty == chat(any_codec, [{"role": "user"}])
    assert empty


def test_media_are_never_tokenized(any_codec: Codec) -> None:
    with pytest.raises(UnroutablePromptError) as caught:
        chat(any_codec, [{"role": "user", "content": [{"type": "image_url"}]}])
    assert caught.value.reason is Unroutable.MEDIA


def test_lone_surrogates_have_no_tokens(any_codec: Codec) -> None:
    """F20: they come out of tool arguments, which are JSON within JSON."""
    with pytest.raises(TemplateFailureError, match="surrogate"):
        any_codec.text_tokens("a\ud800")
    call = {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    with pytest.raises(TemplateFailureError, match="surrogate"):
        chat(any_codec, [{"role": "assistant", "content": "x", "tool_calls": [call]}])


@given(text=st.text())
def test_text_survives_the_byte_codec(text: str) -> None:
    codec = ByteCodec()
    packed = codec.text_tokens(text)
    assert codec.decode(ids_of(packed)) == text
    assert max(ids_of(packed), default=0) < codec.vocabulary_size


@given(text=st.text())
def test_text_survives_the_tokenizer(codec: Codec, text: str) -> None:
    if any(token in text for token in SPECIAL_TOKENS):
        return
    ids = ids_of(codec.text_tokens(text))
    assert codec.decode(ids) == text
    assert max(ids) < codec.vocabulary_size


def test_the_byte_codec_decodes_whatever_it_is_given() -> None:
    assert ByteCodec().decode([72, 105, 0xFF, 300]) == "Hi\ufffd\ufffd"


def test_only_a_tokenizer_is_exact(codec: Codec) -> None:
    assert (codec.is_exact, load_codec(None).is_exact) == (True, False)


def test_equal_length_prompts_with_different_text_differ(any_codec: Codec) -> None:
    """A65."""
    left, right = any_codec.text_tokens("aaaa bbbb"), any_codec.text_tokens("aaaa cccc")
    assert len(left) == len(right)
    assert left != right


def test_template_options_never_meet_in_the_byte_codec() -> None:
    """A69: what a template may read separates prompts whose template is unknown."""
    codec = load_codec(None)
    prompts = {
        chat(codec),
        chat(codec, tools=[]),
        chat(codec, chat_template_kwargs={"enable_thinking": False}),
        chat(codec, documents=[{"text": "d"}]),
        chat(codec, reasoning_effort="low"),
    }
    assert len(prompts) == 5


def test_the_digest_names_tokenizer_template_and_config(folder: Path, tmp_path: Path) -> None:
    """A69: another template is another identity."""
    assert load_codec(folder).digest == load_codec(folder).digest
    variants = {
        "same": write_tokenizer(tmp_path / "same"),
        "template": write_tokenizer(tmp_path / "template", chat_template=CHAT_TEMPLATE + " "),
        "config": write_tokenizer(tmp_path / "config", config={"pad_token": "<|im_end|>"}),
        "vocabulary": write_tokenizer(tmp_path / "vocabulary", vocabulary_size=300),
    }
    with_file = write_tokenizer(tmp_path / "file")
    (with_file / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    digests = {name: load_codec(path).digest for name, path in variants.items()}
    digests["file"] = load_codec(with_file).digest
    digests["bytes"] = load_codec(None).digest
    assert len(set(digests.values())) == len(digests)
    assert len(digests["same"]) == 16


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    codec = load_codec(path)
    assert chat(codec) == codec.text_tokens("the quick brown fox", add_special_tokens=False)


def test_named_templates_are_picked_by_the_presence_of_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools | length }} tools"},
    ]
    codec = load_codec(write_tokenizer(tmp_path / "named", chat_template=named))
    for tools, text in ((None, "plain"), ([], "with 0 tools"), ([TOOL], "with 1 tools")):
        expected = codec.text_tokens(text, add_special_tokens=False)
        assert codec.chat_tokens(USER, tools, options={}) == expected
    in_files = write_tokenizer(tmp_path / "files", chat_template=None)
    (in_files / "chat_template.jinja").write_text("plain")
    (in_files / "additional_chat_templates").mkdir()
    (in_files / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    codec = load_codec(in_files)
    assert codec.decode(ids_of(codec.chat_tokens(USER, [TOOL], options={}))) == "tools"


def test_without_a_template_chats_are_routed_by_load(tmp_path: Path) -> None:
    codec = load_codec(write_tokenizer(tmp_path, chat_template=None))
    with pytest.raises(UnroutablePromptError) as caught:
        chat(codec)
    assert caught.value.reason is Unroutable.NO_TEMPLATE
    assert codec.text_tokens("still works")


def test_truncation_and_padding_of_the_file_are_ignored(folder: Path, tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    definition = Tokenizer.from_file(str(path / "tokenizer.json"))
    definition.enable_truncation(4)
    definition.enable_padding(length=64)
    definition.save(str(path / "tokenizer.json"))
    text = "the quick brown fox jumps over the lazy dog"
    assert load_codec(path).text_tokens(text) == load_codec(folder).text_tokens(text)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", '{"chat_template": "{% for %}"}'),
    ],
)
def test_a_broken_directory_is_refused_by_name(
    tmp_path: Path, name: str, content: str | None
) -> None:
    path = write_tokenizer(tmp_path)
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_text(content)
    with pytest.raises(CodecLoadError, match=r"tokenizer|template"):
        load_codec(path)


def test_special_tokens_come_in_both_forms(tmp_path: Path) -> None:
    config = {"pad_token": None, "extra_special_tokens": {"image_token": {"content": "<i>"}}}
    source = "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ pad_token is defined }}"
    path = write_tokenizer(tmp_path, chat_template=source, config=config)
    codec = load_codec(path)
    expected = codec.text_tokens("<|bos|><|im_end|><i>False", add_special_tokens=False)
    assert chat(codec) == expected


def test_text_that_looks_like_fields_stays_text(any_codec: Codec) -> None:
    """A67: a prompt that contains a user field is not another user."""
    hostile = json.dumps({"user": "bob"})
    packed = chat(any_codec, [{"role": "user", "content": hostile}])
    assert hostile in any_codec.decode(ids_of(packed))
