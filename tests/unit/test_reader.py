from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from prompt.codec import Codec, PrefixCodec, load_codec
from prompt.model import BadPromptError, PromptTokens, Unroutable
from prompt.reader import CHAT_PATH, COMPLETION_PATH, PromptReader
from router.process import SWITCH_S
from state.model import ModelIdentity
from state.prefix import chain_of, chain_root, pack_tokens
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

LONG_TEXT = "".join(f"the quick {number:x} fox " for number in range(22_000))
"""400 kB."""


def chat_body(content: object = "hello", **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "tiny", "messages": messages} | fields).encode()


def completion_body(prompt: object = "hello", **fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": prompt} | fields).encode()


class GatedCodec:
    """A codec whose work ends when the test says so."""

    vocabulary_size = 256
    digest = "gated"
    is_exact = True

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.started = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)

    def chat_tokens(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        options: Mapping[str, object],
    ) -> bytes:
        del messages, tools, options
        self.started.release()
        assert self.gate.wait(20)
        self.ended.release()
        return pack_tokens([7])

    def text_tokens(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return load_codec(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
async def reader(codec: Codec) -> AsyncIterator[PromptReader]:
    async with PromptReader({"tiny": codec}, load_codec(None)) as opened:
        yield opened


async def test_a_chat_is_read_with_its_models_codec(reader: PromptReader, codec: Codec) -> None:
    body = chat_body(stream=True, n=2, max_tokens=5, cache_salt="s")
    read = await reader.read(CHAT_PATH, body)
    expected = codec.chat_tokens([{"role": "user", "content": "hello"}], None, options={})
    assert read.prompts == (PromptTokens(packed=expected, is_exact=True),)
    assert read.prompts[0].count == len(array("I", expected))
    assert (read.model, read.is_stream, read.choices) == ("tiny", True, 2)
    assert (read.salt, read.max_output_tokens, read.unroutable) == ("s", 5, None)


async def test_an_unknown_model_is_read_by_bytes_and_says_so(reader: PromptReader) -> None:
    body = completion_body("hello", model="other")
    (tokens,) = (await reader.read(COMPLETION_PATH, body)).prompts
    assert tokens == PromptTokens(packed=pack_tokens(list(b"hello")), is_exact=False)


async def test_all_forms_of_prompt_are_read(reader: PromptReader, codec: Codec) -> None:
    """A66: one entry per prompt; token ids are exact whatever the codec."""
    texts = await reader.read(COMPLETION_PATH, completion_body(["a", "b"]))
    assert [tokens.packed for tokens in texts.prompts] == [
        codec.text_tokens("a"),
        codec.text_tokens("b"),
    ]
    for prompt, expected in (([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])):
        for model in ("tiny", "other"):
            read = await reader.read(COMPLETION_PATH, completion_body(prompt, model=model))
            assert read.prompts == tuple(
                PromptTokens(packed=pack_tokens(ids), is_exact=True) for ids in expected
            )


async def test_equal_length_ids_have_different_chains(reader: PromptReader) -> None:
    """A65: the ids are the key, not their number."""
    root = chain_root(ModelIdentity(model="tiny", block_tokens=16), 0)
    chains = set()
    for first in (1, 2):
        body = completion_body([first] + [9] * 63)
        (tokens,) = (await reader.read(COMPLETION_PATH, body)).prompts
        chains.add(chain_of(root, tokens.packed, 16, 0))
    assert len(chains) == 2


async def test_special_tokens_on_and_off_are_different_prompts(reader: PromptReader) -> None:
    """A74."""
    on = await reader.read(COMPLETION_PATH, completion_body("a b"))
    off = await reader.read(COMPLETION_PATH, completion_body("a b", add_special_tokens=False))
    assert on.prompts[0].count == off.prompts[0].count + 1


async def test_fields_quoted_in_the_text_or_unknown_do_not_change_the_key(
    reader: PromptReader,
) -> None:
    """A67: neither a "user" inside of the text nor the field itself is part of the key."""
    quoted = 'say "user":"bob" and "model":"x", "cache_salt":"y"'
    plain = await reader.read(CHAT_PATH, chat_body(quoted))
    tagged = await reader.read(CHAT_PATH, chat_body(quoted, user="bob", session="1"))
    assert (plain.model, plain.salt) == ("tiny", "")
    assert plain == tagged


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (chat_body([{"type": "image_embeds", "image_embeds": "AAAA"}]), Unroutable.MEDIA),
        (chat_body([{"type": "image_url", "image_url": {"uri": "data:"}}]), Unroutable.MEDIA),
        (chat_body(chat_template="x"), Unroutable.REQUEST_TEMPLATE),
        (chat_body(truncate_prompt_tokens=1), Unroutable.REWRITTEN),
        (chat_body(continue_final_message=True), Unroutable.TEMPLATE),
        (chat_body(tools=[{"type": "web_search"}]), Unroutable.TEMPLATE),
    ],
)
async def test_what_has_no_known_tokens_has_no_tokens_at_all(
    reader: PromptReader, body: bytes, reason: Unroutable
) -> None:
    """A70, B42: routed by load and counted, never by wrong tokens."""
    read = await reader.read(CHAT_PATH, body)
    assert (read.unroutable, read.prompts, read.model) == (reason, (), "tiny")


async def test_bad_bodies_are_the_clients_fault(reader: PromptReader) -> None:
    """A41."""
    for path, body in ((CHAT_PATH, b"{}"), (COMPLETION_PATH, b"null"), (CHAT_PATH, b"\xff")):
        with pytest.raises(BadPromptError):
            await reader.read(path, body)


@pytest.fixture(name="switch")
def switch_of_a_router() -> Iterator[None]:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    yield
    sys.setswitchinterval(usual_s)


@pytest.mark.usefixtures("switch")
async def test_long_prompts_leave_the_event_loop_running(codec: Codec) -> None:
    """A47: the loop turns all the while; with the interpreter held it would stand nearly always.

    The machine itself may stand still, but hardly so in each of three readings.
    """
    shares: list[float] = []
    while not shares or (shares[-1] >= 0.5 and len(shares) < 3):
        async with PromptReader({"tiny": codec}, codec) as reader:
            reading = asyncio.create_task(reader.read(CHAT_PATH, chat_body(LONG_TEXT)))
            times_s = [time.perf_counter()]
            while not reading.done():
                await asyncio.sleep(0)
                times_s.append(time.perf_counter())
            read = await reading
        longest_s = max(after - before for before, after in pairwise(times_s))
        shares.append(longest_s / (times_s[-1] - times_s[0]))
    assert shares[-1] < 0.5, shares
    messages = [{"role": "user", "content": LONG_TEXT}]
    assert read.prompts[0].packed == codec.chat_tokens(messages, None, options={})


async def test_short_prompts_do_not_change_threads() -> None:
    codec = ThreadNamingCodec()
    async with PromptReader({"tiny": codec}, codec, inline_body_bytes=1000) as reader:
        await reader.read(CHAT_PATH, chat_body("x"))
        await reader.read(CHAT_PATH, chat_body("x" * 1000))
    assert codec.threads[0] is threading.current_thread()
    assert codec.threads[1] is not threading.current_thread()


class ThreadNamingCodec(GatedCodec):
    def __init__(self) -> None:
        super().__init__()
        self.gate.set()
        self.threads: list[threading.Thread] = []

    def chat_tokens(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        options: Mapping[str, object],
    ) -> bytes:
        self.threads.append(threading.current_thread())
        return super().chat_tokens(messages, tools, options=options)


async def test_a_full_pool_routes_by_load_instead_of_waiting() -> None:
    codec = GatedCodec()
    async with PromptReader({}, codec, inline_body_bytes=0, max_threads=1, max_waiting=1) as reader:
        waiting = [asyncio.create_task(reader.read(CHAT_PATH, chat_body())) for _ in range(2)]
        await asyncio.to_thread(codec.started.acquire)
        refused = await reader.read(CHAT_PATH, chat_body())
        assert (refused.unroutable, refused.prompts) == (Unroutable.BUSY, ())
        codec.gate.set()
        for read in await asyncio.gather(*waiting):
            assert read.unroutable is None
        again = await reader.read(CHAT_PATH, chat_body())
        assert again.prompts == (PromptTokens(packed=pack_tokens([7]), is_exact=True),)


async def test_a_client_that_leaves_frees_its_place_when_the_work_ends() -> None:
    """The result is dropped; running work still counts, waiting work is not started."""
    codec = GatedCodec()
    async with PromptReader({}, codec, inline_body_bytes=0, max_threads=1, max_waiting=1) as reader:
        reads = [asyncio.create_task(reader.read(CHAT_PATH, chat_body())) for _ in range(2)]
        await asyncio.to_thread(codec.started.acquire)
        for read in reads:
            read.cancel()
        results = await asyncio.gather(*reads, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        running = asyncio.create_task(reader.read(CHAT_PATH, chat_body()))
        await asyncio.sleep(0)
        assert (await reader.read(CHAT_PATH, chat_body())).unroutable is Unroutable.BUSY
        codec.gate.set()
        assert (await running).unroutable is None
    assert codec.ended.acquire(blocking=False)
    assert codec.ended.acquire(blocking=False)
    assert not codec.ended.acquire(blocking=False)


async def test_a_codec_that_fails_does_not_keep_its_place(codec: Codec) -> None:
    body = chat_body("x", continue_final_message=True)
    async with PromptReader({}, codec, inline_body_bytes=0, max_threads=1, max_waiting=0) as reader:
        for _ in range(3):
            assert (await reader.read(CHAT_PATH, body)).unroutable is Unroutable.TEMPLATE


async def test_a_short_chat_has_the_ids_of_a_remembered_one(codec: Codec) -> None:
    """A conversation outgrows the short way of reading: its chain must go on where it was."""
    turns = [{"role": "user", "content": f"turn {number}: " + "words " * 40} for number in range(8)]
    codecs = {"tiny": codec}
    async with (
        PromptReader(codecs, codec) as both,
        PromptReader(codecs, codec, short_body_bytes=0) as remembering,
    ):
        for count in range(1, 9):
            body = json.dumps({"model": "tiny", "messages": turns[:count]}).encode()
            (short,) = (await both.read(CHAT_PATH, body)).prompts
            (known,) = (await remembering.read(CHAT_PATH, body)).prompts
            assert short.packed == known.packed
            assert short.is_exact == known.is_exact


async def test_bodies_are_kept_up_to_a_bound_and_forgotten_when_told(codec: Codec) -> None:
    bound_bytes = 1 << 20
    async with PromptReader({"tiny": codec}, codec, kept_bytes=bound_bytes) as reader:
        assert reader.used_bytes == codec_bytes(codec)  # of the tests before
        seen = []
        for number in range(120):
            text = f"{number} " * 5_000
            await reader.read(CHAT_PATH, chat_body(text))
            await reader.read(COMPLETION_PATH, completion_body(text))
            seen.append(reader.used_bytes - codec_bytes(codec))
        assert seen[10] > 10 * 5_000
        assert bound_bytes < max(seen) <= 2 * bound_bytes
        reader.forget()
        assert reader.used_bytes == 0


def codec_bytes(codec: Codec) -> int:
    """Return what a codec keeps of texts."""
    assert isinstance(codec, PrefixCodec)
    return codec.used_bytes
