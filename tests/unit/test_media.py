"""Chats with images: the ids before the first one, and a likeness of the whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompt.codec import load_codec
from prompt.likeness import LIKENESS_BYTES, media_prompt
from prompt.model import PromptTokens, ReadPrompt, Unroutable
from prompt.reader import CHAT_PATH, MESSAGE_PATH, RESPONSE_PATH, PromptReader
from prompt.request import decode_chat
from prompt.tokenizer_codec import TokenizerCodec
from router.outlook import BYTES_PER_TOKEN
from state.memory import MemoryState
from state.model import ChangeBatch, Generation, ReplicaId, ReplicaRecord, RouterId
from state.prefix import TOKEN_BYTES, namespace_of, pack_tokens
from support.choosing import IDENTITY, Choosing, chain_for, member_of, prompt_for
from support.sighted import IMAGE_MARK, write_sighted_tokenizer
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

Json = dict[str, Any]

CAT: Json = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
DOG: Json = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAB"}}
ASK: Json = {"type": "text", "text": "what is it?"}
SEAM_TOKENS = 6
"""Before an image: ids of a text that might have gone on."""
SYSTEM: Json = {"role": "system", "content": "You are a helpful assistant. " * 8}


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TokenizerCodec:
    loaded = load_codec(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    assert isinstance(loaded, TokenizerCodec)
    return loaded


def user(*parts: Json) -> Json:
    return {"role": "user", "content": list(parts)}


def body_of(*messages: Json, **fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": list(messages)} | fields).encode()


async def read(codec: TokenizerCodec, *messages: Json, **fields: Any) -> ReadPrompt:
    async with PromptReader({"tiny": codec}, load_codec(None)) as reader:
        return await reader.read(CHAT_PATH, body_of(*messages, **fields))


def likeness(prompt: ReadPrompt) -> bytes:
    [tokens] = prompt.prompts
    assert prompt.has_media
    assert not tokens.is_exact
    assert not prompt.is_rough
    return tokens.packed


def common(left: bytes, right: bytes) -> int:
    """Return the number of ids with which both begin."""
    pairs = zip(left, right, strict=False)
    equal = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    return (min(len(left), len(right)) if equal is None else equal) // TOKEN_BYTES


async def test_two_images_with_one_text_part_where_the_image_is(codec: TokenizerCodec) -> None:
    """A70, C48: and a third image, further back, only there."""
    cat, dog = [await read(codec, SYSTEM, user(each, ASK)) for each in (CAT, DOG)]
    both = await read(codec, SYSTEM, user(CAT, ASK, DOG))
    shared = common(likeness(cat), likeness(dog))
    assert shared < common(likeness(cat), likeness(both))
    assert common(likeness(cat), likeness(cat)) > shared + LIKENESS_BYTES
    assert cat.head is not None
    assert 0 < shared - len(cat.head.packed) < 40
    assert cat.head == dog.head == both.head


async def test_a_second_turn_goes_on_from_the_likeness_of_the_first(codec: TokenizerCodec) -> None:
    first = await read(codec, SYSTEM, user(CAT, ASK), add_generation_prompt=False)
    answer = {"role": "assistant", "content": "a cat"}
    second = await read(codec, SYSTEM, user(CAT, ASK), answer, {"role": "user", "content": "sure?"})
    assert likeness(second).startswith(likeness(first))
    assert second.head == first.head


@given(st.text(max_size=20), st.text(max_size=20))
def test_the_head_is_what_an_engine_computes_whatever_it_makes_of_an_image(
    codec: TokenizerCodec, placeholder: str, rest: str
) -> None:
    call = decode_chat(body_of(SYSTEM, user(ASK), user(CAT, ASK), {"role": "user", "content": "x"}))
    head = media_prompt(call, codec).head
    assert head is not None
    assert head.is_exact
    shown = [SYSTEM, user(ASK), {"role": "user", "content": placeholder + rest}]
    whole = codec.chat_tokens([*shown, {"role": "user", "content": "x"}], None, options={})
    assert whole.startswith(head.packed)
    before = codec.chat_tokens([SYSTEM, user(ASK)], None, options={"add_generation_prompt": False})
    assert head.count >= len(before) // TOKEN_BYTES


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> TokenizerCodec:
    """Return the codec of a model whose template is given parts."""
    loaded = load_codec(write_sighted_tokenizer(tmp_path_factory.mktemp("sighted")))
    assert isinstance(loaded, TokenizerCodec)
    return loaded


@given(st.text(max_size=20), st.integers(min_value=0, max_value=2))
def test_a_template_that_is_given_parts_has_its_head_up_to_the_image(
    sighted: TokenizerCodec, rest: str, turns: int
) -> None:
    """Whatever follows, also in the same message; the few ids at the seam are left out."""
    before = [SYSTEM, *turns * [user(ASK), {"role": "assistant", "content": "a cat"}]]
    asked = {"type": "text", "text": "The quick brown fox jumps over what? " * 9}
    call = decode_chat(body_of(*before, user(ASK, asked, CAT, {"type": "text", "text": rest})))
    head = media_prompt(call, sighted).head
    assert head is not None
    shown = user(ASK, asked, {"type": "text", "text": IMAGE_MARK + rest})
    whole = sighted.chat_tokens([*before, shown], None, options={})
    assert whole.startswith(head.packed)
    ids = memoryview(whole).cast("I").tolist()
    [mark] = memoryview(sighted.text_tokens(IMAGE_MARK, add_special_tokens=False)).cast("I")
    assert ids.index(mark) - SEAM_TOKENS <= head.count <= ids.index(mark)


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("image", CAT),
        ("video", {"type": "video_url", "video_url": {"url": "http://x/1"}}),
        ("audio", {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}),
    ],
)
def test_a_template_may_write_another_beginning_where_it_sees_media(
    tmp_path: Path, kind: str, part: Json
) -> None:
    """Some leave the rules out beside an image: then these are no part of the head."""
    source = (
        "{%- set found = namespace(media=false) %}"
        "{%- for m in messages %}{%- for part in m.content %}"
        f"{{%- if part.type == '{kind}' %}}{{%- set found.media = true %}}{{%- endif %}}"
        "{%- endfor %}{%- endfor %}"
        "{%- for m in messages %}{%- if m.role != 'system' or not found.media %}"
        "{{- '<|im_start|>you are asked by the ' + m.role }}"
        "{%- for part in m.content %}{{- part.text if part.type == 'text' else '[it]' }}"
        "{%- endfor %}{%- endif %}{%- endfor %}"
    )
    codec = load_codec(write_tokenizer(tmp_path, chat_template=source))
    head = media_prompt(decode_chat(body_of(SYSTEM, user(ASK, part))), codec).head
    assert head is not None
    shown = codec.chat_tokens([user(ASK)], None, options={})
    assert shown.startswith(head.packed)


async def test_without_a_tokenizer_there_is_a_likeness_and_no_head() -> None:
    async with PromptReader({}, load_codec(None)) as reader:
        rough, other = [
            await reader.read(CHAT_PATH, body_of(SYSTEM, user(each, ASK))) for each in (CAT, DOG)
        ]
    assert rough.head is None
    plain = load_codec(None).chat_tokens([SYSTEM, user()], None, options={})
    shared = common(likeness(rough), likeness(other))
    assert abs(shared - common(likeness(rough), plain)) < 40


@pytest.mark.parametrize("words", ["helpful assistant sentences ", "a b c d e f ", "你好世界 "])
async def test_of_a_text_before_an_image_no_more_is_guessed_than_is_known(
    codec: TokenizerCodec, sighted: TokenizerCodec, words: str
) -> None:
    """However many bytes its tokens have; images of the same text are told apart by its end."""
    long = {"role": "system", "content": words * 60}
    asked, thanked = [{"type": "text", "text": words * 30 + end} for end in ("it?", "it!")]
    for each in (codec, sighted):
        cat, dog = [await read(each, long, user(asked, one)) for one in (CAT, DOG)]
        other = await read(each, long, user(thanked, CAT))
        assert cat.head is not None
        guessed = common(likeness(cat), likeness(dog)) / BYTES_PER_TOKEN
        assert common(likeness(cat), likeness(other)) < guessed * BYTES_PER_TOKEN
        if each is sighted:
            assert cat.head.count <= guessed < cat.head.count + 1
        else:
            said = len((words * 30).encode()) / BYTES_PER_TOKEN
            assert cat.head.count <= guessed < cat.head.count + said + 10


@pytest.mark.parametrize(
    ("part", "same", "other"),
    [
        (CAT, {"type": "image_url", "image_url": CAT["image_url"] | {"detail": "low"}}, DOG),
        (
            {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
            {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
            {"type": "input_audio", "input_audio": {"data": "AB", "format": "wav"}},
        ),
        (
            CAT | {"uuid": "one"},
            {"type": "image_url", "image_url": None, "uuid": "one"},
            CAT | {"uuid": "two"},
        ),
        (
            {"type": "video_url", "video_url": {"url": "http://x/1"}},
            {"type": "video_url", "video_url": {"url": "http://x/1"}},
            {"type": "audio_url", "audio_url": {"url": "http://x/1"}},
        ),
    ],
)
async def test_media_are_known_by_what_was_sent_for_them(
    codec: TokenizerCodec, part: Json, same: Json, other: Json
) -> None:
    read_of = [likeness(await read(codec, user(each))) for each in (part, same, other)]
    assert read_of[0] == read_of[1] != read_of[2]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "image_url", "image_url": {"uri": "x"}},
        {"type": "image_url"},
        {"type": "image_url", "media": "0" * 32},
        {"type": "hologram", "media": "0" * 32},
        {"type": ["image_url"], "image_url": {"url": "x"}},
    ],
)
async def test_other_parts_are_routed_by_load(codec: TokenizerCodec, part: Json) -> None:
    """A70: also beside an image that is known."""
    for parts in ((part,), (CAT, part)):
        prompt = await read(codec, SYSTEM, user(*parts))
        assert (prompt.unroutable, prompt.prompts) == (Unroutable.MEDIA, ())
        assert not prompt.has_media


async def test_a_text_that_claims_to_be_media_is_a_text(codec: TokenizerCodec) -> None:
    claimed = await read(codec, user(ASK | {"media": "0" * 32, "image_url": {"url": "x"}}))
    assert claimed == await read(codec, user(ASK))
    assert not claimed.has_media


def response_of(*parts: Json) -> bytes:
    items = [{"role": "user", "content": list(parts)}]
    return json.dumps({"model": "tiny", "instructions": SYSTEM["content"], "input": items}).encode()


def messages_of(*blocks: Json) -> bytes:
    body = {"model": "tiny", "max_tokens": 5, "system": SYSTEM["content"]}
    return json.dumps(body | {"messages": [user(*blocks)]}).encode()


def block(picture: str) -> Json:
    source = {"type": "base64", "media_type": "image/png", "data": picture}
    return {"type": "image", "source": source}


async def test_an_image_is_the_same_in_all_three_ways_to_send_it(codec: TokenizerCodec) -> None:
    """A70: and as a block with a URL; responses add the special tokens that chats do not."""
    linked = {"type": "image_url", "image_url": {"url": "http://x/1"}}
    inputs = [{"type": "input_image", "image_url": one["image_url"]["url"]} for one in (CAT, DOG)]
    link = {"type": "image", "source": {"type": "url", "url": "http://x/1"}}
    async with PromptReader({"tiny": codec}, load_codec(None)) as reader:

        async def seen(path: str, body: bytes) -> ReadPrompt:
            return await reader.read(path, body)

        cat, dog, web = [
            await seen(CHAT_PATH, body_of(SYSTEM, user(each, ASK))) for each in (CAT, DOG, linked)
        ]
        assert len({likeness(one) for one in (cat, dog, web)}) == 3
        ask = {"type": "input_text", "text": ASK["text"]}
        for picture, chat in zip(inputs, (cat, dog), strict=True):
            response = await seen(RESPONSE_PATH, response_of(picture, ask))
            assert response.head is not None
            assert chat.head is not None
            special = codec.text_prompt("", add_special_tokens=True).packed
            assert response.head.packed == special + chat.head.packed
            assert likeness(response).endswith(
                likeness(chat)[len(chat.head.packed) * TOKEN_BYTES :]
            )
        for image, chat in ((block("AAAA"), cat), (block("AAAB"), dog), (link, web)):
            message = await seen(MESSAGE_PATH, messages_of(image, ASK))
            assert (likeness(message), message.head) == (likeness(chat), chat.head)


async def test_images_in_a_tools_result_are_said_after_it(codec: TokenizerCodec) -> None:
    shown = [{"type": "text", "text": "a shot"}, block("AAAA")]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": shown}
    talk = [SYSTEM, {"role": "tool", "tool_call_id": "c1", "content": "a shot"}, user(CAT)]
    async with PromptReader({"tiny": codec}, load_codec(None)) as reader:
        message = await reader.read(MESSAGE_PATH, messages_of(result))
        chat = await reader.read(CHAT_PATH, body_of(*talk))
    assert (likeness(message), message.head) == (likeness(chat), chat.head)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSE_PATH, response_of({"type": "input_image", "file_id": "f"})),
        (RESPONSE_PATH, response_of({"type": "input_image", "media": "0" * 32})),
        (RESPONSE_PATH, response_of({"type": "input_file", "media": "0" * 32})),
        (MESSAGE_PATH, messages_of({"type": "image", "source": {"type": "url"}})),
        (MESSAGE_PATH, messages_of({"type": "image"}, block("AAAA"))),
        (MESSAGE_PATH, messages_of({"type": "document", "source": {"data": "x"}})),
    ],
)
async def test_what_holds_no_known_image_is_routed_by_load(
    codec: TokenizerCodec, path: str, body: bytes
) -> None:
    """Digests that a client claims are none."""
    async with PromptReader({"tiny": codec}, load_codec(None)) as reader:
        prompt = await reader.read(path, body)
    assert (prompt.unroutable, prompt.prompts) == (Unroutable.MEDIA, ())


async def test_long_chats_with_images_are_read_in_a_thread_and_by_turns(
    codec: TokenizerCodec,
) -> None:
    """Bodies over 16 KiB; nothing of an image is kept but its digest."""
    image = {"type": "image_url", "image_url": {"url": "data:," + "A" * 60_000}}
    talk = [SYSTEM, user(image, ASK)]
    async with PromptReader({"tiny": codec}, load_codec(None)) as reader:
        first = await reader.read(CHAT_PATH, body_of(*talk, add_generation_prompt=False))
        talk += [{"role": "assistant", "content": "a cat"}, user(ASK)]
        second = await reader.read(CHAT_PATH, body_of(*talk, add_generation_prompt=False))
    assert likeness(second).startswith(likeness(first))
    assert len(likeness(second)) < 3 * LIKENESS_BYTES * TOKEN_BYTES


async def test_a_head_counts_where_events_tell_of_it_and_the_rest_where_it_was_sent() -> None:
    """A70: the other replica is predicted what it holds of the text, and no image."""
    state = MemoryState(clock=lambda: 100.0)
    names = [ReplicaId(name) for name in "ab"]
    records = [
        ReplicaRecord(
            replica=name,
            endpoint=f"http://127.0.0.1:{ord(name)}",
            generation=Generation("g"),
            identity=IDENTITY,
            page_tokens=16,
            sidecar="s",
        )
        for name in names
    ]
    for record in records:
        await state.register(record)
    head = range(640)
    batch = ChangeBatch(
        replica=names[1],
        generation=Generation("g"),
        namespace=namespace_of(IDENTITY),
        sequence=1,
        stored=chain_for(head),
    )
    await state.apply([batch])
    choosing = Choosing(state.reader(RouterId("me")))
    members = [member_of(record) for record in records]
    whole = PromptTokens(packed=pack_tokens(i % 256 for i in range(12_800)), is_exact=False)
    prompt = ReadPrompt(
        model="m",
        is_stream=True,
        prompts=(whole,),
        has_media=True,
        head=PromptTokens(packed=pack_tokens(head), is_exact=True),
    )
    choice = choosing.choose(prompt, members)
    assert choice.member.replica == names[1]
    assert choice.decision.predicted_cached_tokens == 639
    assert not choice.is_told
    choosing.choose(prompt_for(range(9_000, 9_100)), members[:1])
    again = choosing.choose(prompt, members)
    assert again.member.replica == names[1]
    assert 639 < again.decision.predicted_cached_tokens <= 3_200
    alone = choosing.choose(prompt, members[:1])
    assert alone.decision.predicted_cached_tokens == 0
