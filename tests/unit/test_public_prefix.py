"""S-01: what of a prompt is public, by the operator's word alone, in whole blocks, id for id."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from prompt.codec import Codec, load_codec
from prompt.model import PromptTokens, ReadPrompt
from prompt.reader import PromptReader
from router.config import ConfigError, decode_config
from router.header import public_line, request_lines
from router.public_prefix import READ_AGAIN_S, PublicPrefixes, open_public
from router.public_setting import PublicPrefixSettings
from sidecar.scope import Scopes
from state.model import ModelIdentity
from state.prefix import TOKEN_BYTES, pack_tokens
from state.public import PUBLIC_PREFIX_HEADER, mark_of, read_mark
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCK = 4
CODEC = load_codec(None)
KEY = {"name": "acme", "key_digests": ["0" * 64]}
TENANTS: dict[str, Any] = {"tenants": [KEY], "deployment_key_file": "deployment.key"}


def given(**ids: list[int]) -> PublicPrefixes:
    settings = [PublicPrefixSettings(name=name, prompt="as given") for name in ids]
    packed = {name: pack_tokens(one) for name, one in ids.items()}
    return PublicPrefixes(settings, lambda _: CODEC, packed)


def read(*prompts: list[int], model: str = "m") -> ReadPrompt:
    told = [PromptTokens(packed=pack_tokens(one), is_exact=True) for one in prompts]
    return ReadPrompt(model=model, is_stream=False, prompts=tuple(told), salt="a")


def blocks(prefixes: PublicPrefixes, *prompts: list[int], model: str = "m") -> int:
    part = prefixes.part_of(read(*prompts, model=model), BLOCK)
    return 0 if part is None else part.blocks


def ids(end: int) -> list[int]:
    return list(range(1, end + 1))


def test_only_whole_blocks_are_public() -> None:
    prefixes = given(clerk=ids(11))
    assert blocks(prefixes, [*ids(11), 99]) == 2
    assert blocks(prefixes, [*ids(8), 99]) == 2
    part = prefixes.part_of(read(ids(20)), BLOCK)
    assert part is not None
    assert part.packed == pack_tokens(ids(8))
    assert part.mark == mark_of(pack_tokens(ids(8)))


@pytest.mark.parametrize(
    "prompt",
    [ids(4), ids(7), [*ids(4), 99, *ids(20)], [99, *ids(20)], [*ids(7), 99], [], [99], ids(0)],
)
def test_a_prompt_that_has_not_the_whole_of_it_is_private(prompt: list[int]) -> None:
    assert blocks(given(clerk=ids(11)), prompt) == 0


def test_the_longest_prefix_counts_whatever_the_order() -> None:
    for prefixes in (given(one=ids(4), two=ids(12)), given(two=ids(12), one=ids(4))):
        assert blocks(prefixes, ids(20)) == 3
        assert blocks(prefixes, [*ids(9), 99]) == 1


def test_a_prefix_shorter_than_a_block_makes_nothing_public() -> None:
    assert blocks(given(short=ids(3)), ids(20)) == 0


def test_of_several_prompts_the_first_says_which_prefix_it_is() -> None:
    prefixes = given(one=ids(8))
    assert blocks(prefixes, ids(20), [99] * 8) == 2
    assert blocks(prefixes, [99] * 8, ids(20)) == 0
    assert prefixes.part_of(ReadPrompt(model="m", is_stream=False), BLOCK) is None


def test_the_part_follows_the_size_of_a_block() -> None:
    prefixes = given(one=ids(8))
    sizes = {size: prefixes.part_of(read(ids(20)), size) for size in (2, 3, 8, 16)}
    assert [part and part.mark.tokens for part in sizes.values()] == [8, 6, 8, None]


@pytest.fixture
def codec(tmp_path: Path) -> Codec:
    return load_codec(write_tokenizer(tmp_path / "tokenizer"))


SYSTEM = {"role": "system", "content": "You are the clerk of a small office. " * 4}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


def chat(codec: Codec, task: str, system: dict[str, str] = SYSTEM, **more: Any) -> ReadPrompt:
    messages = [system, {"role": "user", "content": task}]
    packed = codec.chat_tokens(messages, more.get("tools"), options={})
    told = PromptTokens(packed=packed, is_exact=True)
    return ReadPrompt(model="m", is_stream=False, prompts=(told,), salt="a")


def test_messages_are_public_up_to_the_task_in_the_tokens_of_the_model(codec: Codec) -> None:
    one = PublicPrefixSettings(name="clerk", messages=(SYSTEM,))
    prefixes = PublicPrefixes([one], lambda _: codec)
    asked = [chat(codec, task) for task in ("a secret", "another one")]
    first, other = (prefixes.part_of(each, BLOCK) for each in asked)
    assert first is not None
    assert first == other
    whole = [each.prompts[0].packed for each in asked]
    same = next(at for at, pair in enumerate(zip(*whole, strict=False)) if len({*pair}) > 1)
    assert first.mark.tokens == same // TOKEN_BYTES // BLOCK * BLOCK
    stranger = {"role": "system", "content": "You are the clerk of a large office. " * 4}
    assert prefixes.part_of(chat(codec, "a secret", stranger), BLOCK) is None
    assert prefixes.part_of(chat(codec, "a secret", tools=[TOOL]), BLOCK) is None


def test_tools_and_texts_are_public_in_their_tokens(codec: Codec) -> None:
    tools = PublicPrefixSettings(name="tools", messages=(SYSTEM,), tools=(TOOL,))
    text = PublicPrefixSettings(name="text", prompt="The quick brown fox jumps over a dog. " * 3)
    prefixes = PublicPrefixes([tools, text], lambda _: codec)
    assert prefixes.part_of(chat(codec, "task", tools=[TOOL]), BLOCK) is not None
    packed = codec.text_tokens((text.prompt or "") + "and a secret")
    told = PromptTokens(packed=packed, is_exact=True)
    part = prefixes.part_of(
        ReadPrompt(model="m", is_stream=False, prompts=(told,), salt="a"), BLOCK
    )
    assert part is not None
    assert packed.startswith(part.packed)


def test_a_prefix_of_one_model_is_none_of_another_s() -> None:
    settings = [PublicPrefixSettings(name="one", model="m", prompt="as given")]
    prefixes = PublicPrefixes(settings, lambda _: load_codec(None), {"one": pack_tokens(ids(8))})
    assert blocks(prefixes, ids(20)) == 2
    assert blocks(prefixes, ids(20), model="other") == 0


def test_a_text_without_a_tokenizer_or_a_template_is_not_shared_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = load_codec(write_tokenizer(tmp_path / "bare", chat_template=None))
    one = PublicPrefixSettings(name="clerk", messages=(SYSTEM,))
    for codec, why in ((load_codec(None), "no tokenizer here"), (bare, "no chat template")):
        caplog.clear()
        with caplog.at_level("INFO"):
            prefixes = PublicPrefixes([one], lambda _, codec=codec: codec)  # type: ignore[misc]
            assert [blocks(prefixes, ids(200)) for _ in range(3)] == [0, 0, 0]
        assert [why in line for line in caplog.messages] == [True]
        assert "clerk of" not in caplog.text


def test_a_prefix_is_read_again_when_its_model_is_read_otherwise_or_a_while_has_passed(
    codec: Codec,
) -> None:
    """A template may print the date; a tokenizer may be found later."""
    known: list[Any] = [load_codec(None)]
    now_s = [0.0]
    reads: list[int] = []

    class Counting:
        is_exact = True

        def chat_tokens(self, *arguments: Any, **options: Any) -> bytes:
            reads.append(1)
            return codec.chat_tokens(*arguments, **options)

    one = PublicPrefixSettings(name="clerk", messages=(SYSTEM,))
    prefixes = PublicPrefixes([one], lambda _: known[0], clock=lambda: now_s[0])
    asked = chat(codec, "task")
    assert prefixes.part_of(asked, BLOCK) is None
    known[0] = Counting()
    for _ in range(3):
        assert prefixes.part_of(asked, BLOCK) is not None
    assert len(reads) == 2
    now_s[0] += READ_AGAIN_S
    assert prefixes.part_of(asked, BLOCK) is not None
    assert len(reads) == 4


def test_who_serves_meanwhile_does_not_wait_for_texts_to_be_read(codec: Codec) -> None:
    """Until they are, prompts are private; while they are read again, what was known counts."""
    now_s, works = [0.0], list[Any]()
    one = PublicPrefixSettings(name="clerk", messages=(SYSTEM,))
    prefixes = PublicPrefixes([one], lambda _: codec, clock=lambda: now_s[0], run=works.append)
    asked = chat(codec, "task")
    for _ in range(3):
        assert prefixes.part_of(asked, BLOCK) is None
    assert len(works) == 1
    works.pop()()
    known = prefixes.part_of(asked, BLOCK)
    assert known is not None
    now_s[0] += READ_AGAIN_S
    for _ in range(3):
        assert prefixes.part_of(asked, BLOCK) == known
    assert len(works) == 1
    works.pop()()
    assert prefixes.part_of(asked, BLOCK) == known
    assert not works


def test_what_was_read_at_the_start_is_known_to_the_first_request(codec: Codec) -> None:
    works = list[Any]()
    one = PublicPrefixSettings(name="clerk", messages=(SYSTEM,))
    prefixes = PublicPrefixes([one], lambda _: codec, clock=lambda: 0.0, run=works.append)
    prefixes.prepare(["m"])
    assert prefixes.part_of(chat(codec, "task"), BLOCK) is not None
    assert not works


def test_a_text_that_breaks_its_template_is_not_shared_and_stops_nobody(
    codec: Codec, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        is_exact = True

        def chat_tokens(self, *_: Any, **__: Any) -> bytes:
            message = "the text itself"
            raise ZeroDivisionError(message)

    broken: Any = Broken()
    one = PublicPrefixSettings(name="clerk", messages=(SYSTEM,))
    prefixes = PublicPrefixes([one], lambda _: broken, clock=lambda: 0.0)
    for _ in range(3):
        assert prefixes.part_of(chat(codec, "task"), BLOCK) is None
    assert [each.getMessage() for each in caplog.records] == [
        "public prefixes: model='m' not shared: ZeroDivisionError"
    ]


def test_names_that_clients_choose_make_no_work_and_are_not_logged(
    codec: Codec, caplog: pytest.LogCaptureFixture
) -> None:
    """Where adapters are loaded on demand there is any number of them, read with one tokenizer."""
    reads: list[int] = []

    class Counting:
        is_exact = True

        def chat_tokens(self, *arguments: Any, **options: Any) -> bytes:
            reads.append(1)
            return codec.chat_tokens(*arguments, **options)

    one = PublicPrefixSettings(name="clerk", messages=(SYSTEM,))
    own = PublicPrefixSettings(name="own", model="lora-7", messages=(SYSTEM, SYSTEM))
    counting: Any = Counting()
    prefixes = PublicPrefixes([one, own], lambda _: counting, clock=lambda: 0.0)
    with caplog.at_level("INFO"):
        for number in range(600):
            asked = structs.replace(chat(codec, "task"), model=f"lora-{number}")
            assert prefixes.part_of(asked, BLOCK, "base") is not None
    assert len(reads) == 6
    assert [line.split("model=")[1].split()[0] for line in caplog.messages] == [
        "'base'",
        "'lora-7'",
        "'lora-7'",
    ]


async def test_a_file_of_token_ids_is_read_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(ids(8)))
    one = {"name": "ids", "model": "m", "token_ids_file": str(path)}
    config = decode_config(TENANTS | {"public_prefixes": [one]})
    async with PromptReader({}, load_codec(None)) as reader:
        prefixes = open_public(config, reader)
        assert prefixes is not None
        assert blocks(prefixes, ids(20)) == 2
        for wrong in ('{"ids": []}', "[-1]", "[4294967296]", "no JSON"):
            path.write_text(wrong)
            with pytest.raises(ConfigError, match=r"token_ids_file: .*a JSON list of token ids"):
                open_public(config, reader)
        path.unlink()
        with pytest.raises(ConfigError, match=r"\[0\]\.token_ids_file: .*No such file"):
            open_public(config, reader)
        assert open_public(decode_config(TENANTS), reader) is None


@pytest.mark.parametrize(
    ("prefixes", "expected"),
    [
        ([{"name": "a"}], r"\[0\]: expected one of messages, prompt and token_ids_file"),
        ([{"name": "a", "prompt": "x", "messages": [{}]}], "expected one of messages"),
        ([{"name": "a", "prompt": ""}], "prompt: .*length >= 1"),
        ([{"name": "a", "messages": []}], "messages: .*length >= 1"),
        ([{"name": "a", "prompt": "x", "tools": []}], "tools: expected messages, too"),
        ([{"name": "a", "token_ids_file": "x"}], "model: expected the model whose token ids"),
        ([{"name": "a", "prompt": "x"}, {"name": "a", "prompt": "y"}], "'a' occurs twice"),
        ([{"name": "-", "prompt": "x"}], r"\[0\]\.name: .*a name of up to"),
        ([{"name": "a", "text": "x"}], "text"),
        ([{"name": f"n{at}", "prompt": "x"} for at in range(65)], "public_prefixes: .*<= 64"),
    ],
)
def test_a_wrong_setting_is_named(prefixes: list[Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        decode_config(TENANTS | {"public_prefixes": prefixes})


def test_public_prefixes_without_tenants_are_refused() -> None:
    with pytest.raises(ConfigError, match="public_prefixes: expected tenants, too"):
        decode_config({"public_prefixes": [{"name": "a", "prompt": "x"}]})


def test_the_text_of_a_prefix_is_in_no_representation() -> None:
    assert "secret" not in repr(PublicPrefixSettings(name="a", prompt="secret"))


# The header, and the worker that reads it.


def test_a_mark_goes_over_a_header_and_comes_back() -> None:
    mark = mark_of(pack_tokens(ids(8)))
    name, value = public_line(mark).decode().rstrip("\r\n").split(": ")
    assert name == PUBLIC_PREFIX_HEADER
    assert read_mark(value) == mark


@pytest.mark.parametrize(
    "spell", [str, str.lower, str.upper, str.title, lambda name: name.replace("Public", "PUBLIC")]
)
def test_a_client_s_own_header_goes_no_further(spell: Callable[[str], str]) -> None:
    headers = [(spell(PUBLIC_PREFIX_HEADER).encode(), b"64 " + b"0" * 32), (b"Accept", b"a")]
    assert request_lines(headers) == b"Accept: a\r\n"


DIGEST = mark_of(pack_tokens(ids(8))).digest


@pytest.mark.parametrize(
    "form",
    [
        "",
        "8",
        "-8 {}",
        "0 {}",
        "8  {}",
        "08 {}",
        "8 {}0",
        "8 {}\n",
        "8e0 {}",
        "9999999999 {}",
        "٨ {}",
    ],
)
def test_what_is_no_mark_is_none(form: str) -> None:
    assert read_mark(form.format(DIGEST)) is None
    assert read_mark(f"8 {DIGEST[:-1]}") is None
    assert read_mark(None) is None


def test_a_worker_salts_all_of_a_prompt_that_begins_otherwise_than_the_mark_says() -> None:
    scopes = Scopes(ModelIdentity(model="m", block_tokens=BLOCK), 0)
    scopes.allow([pack_tokens(ids(12))])
    prompt = pack_tokens([*ids(12), 99])
    whole = scopes.place(pack_tokens([98, *ids(12)]), "a")
    assert scopes.place(prompt, "a").public_pages == 3
    good = mark_of(pack_tokens(ids(8)))
    assert scopes.place(prompt, "a", good).public_pages == 2
    for wrong in (mark_of(pack_tokens([*ids(7), 99])), read_mark(f"9 {DIGEST}"), mark_of(b"")):
        place = scopes.place(prompt, "a", wrong)
        assert (place.public_pages, place.root, place.tail) == (0, whole.root, None)
    longer = mark_of(pack_tokens([*ids(12), 99, 98]))
    assert scopes.place(prompt, "a", longer).public_pages == 0


def test_a_worker_has_no_page_in_common_that_the_mark_covers_in_part() -> None:
    scopes = Scopes(ModelIdentity(model="m", block_tokens=BLOCK), 0)
    prompt = pack_tokens([*ids(12), 99])
    assert scopes.place(prompt, "a", mark_of(pack_tokens(ids(10)))).public_pages == 2
    assert scopes.place(prompt, "a", mark_of(pack_tokens(ids(3)))).public_pages == 0
    assert scopes.place(prompt, None, mark_of(pack_tokens(ids(8)))).tail is None
