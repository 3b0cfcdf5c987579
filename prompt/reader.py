"""Request bodies to token ids without stalling the event loop.

Decoding holds the interpreter wherever it runs, and is bounded; that of large bodies is done in
steps (``prompt.lane``). Rendering and tokenizing of long bodies move to a small thread pool. A pool
that is full makes a prompt unroutable instead of making requests wait.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, Self, TypeVar

from prompt.anthropic import decode_messages
from prompt.codec import PrefixCodec
from prompt.lane import LARGE_BODY_BYTES, Lane, call_soon, refuse_dense
from prompt.likeness import media_prompt
from prompt.model import PromptTokens, ReadPrompt, Unroutable, UnroutablePromptError
from prompt.passage import Passage, Passages
from prompt.request import decode_chat, decode_completion
from prompt.response import decode_response
from prompt.turn import DEFAULT_BODY_BYTES, ChatTurns, Turn
from state.prefix import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from prompt.codec import Codec
    from prompt.likeness import MediaPrompt
    from prompt.request import ChatCall, CompletionCall

_T = TypeVar("_T")

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETION_PATH: Final = "/v1/completions"
RESPONSE_PATH: Final = "/v1/responses"
MESSAGE_PATH: Final = "/v1/messages"
INLINE_BODY_BYTES: Final = 16 * 1024
"""About 4,000 tokens, 4 ms; a change of threads costs 0.1 ms."""
SHORT_BODY_BYTES: Final = 2 * 1024
"""Up to here a chat is read afresh: 0.1 ms, less than finding and keeping what is known costs."""
MAX_WAITING: Final = 32


class PromptReader:
    """Reads prompts with the codec of their model, or the fallback for unknown models.

    ``base_of`` names the model whose codec reads the prompts of another one: an adapter's.
    ``kept_bytes`` bounds the bodies that are kept: of chats and of completions, and large ones.
    Owns its threads: use it as an asynchronous context manager, or close it.
    """

    def __init__(  # noqa: PLR0913 - bounds, each by its name
        self,
        codecs: Mapping[str, Codec],
        fallback: Codec,
        *,
        base_of: Callable[[str], str | None] = lambda _: None,
        kept_bytes: int = DEFAULT_BODY_BYTES,
        short_body_bytes: int = SHORT_BODY_BYTES,
        inline_body_bytes: int = INLINE_BODY_BYTES,
        max_threads: int = 2,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._codecs = dict(codecs)
        self._base_of = base_of
        self._fallback = fallback
        self._adopted: dict[int, Codec] = {}
        # Looked at once: asking a type for a protocol costs more than a short prompt.
        named = {id(codec): codec for codec in (*self._codecs.values(), fallback)}
        self._prefix_codecs = {
            key: codec for key, codec in named.items() if isinstance(codec, PrefixCodec)
        }
        self._short_body_bytes = short_body_bytes
        self._inline_body_bytes = inline_body_bytes
        self._max_pending = max_threads + max_waiting
        self._pending = 0
        self._kept_bytes = kept_bytes
        self._turns = ChatTurns(kept_bytes)
        self._passages = Passages(kept_bytes)
        self.lane = Lane()
        self._large = (ChatTurns(kept_bytes), Passages(kept_bytes))
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix="prompt")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def adopt(self, model: str, codec: Codec | None) -> None:
        """Read prompts of ``model`` with ``codec`` from now on; None: with the fallback again.

        A codec stays known: conversations remember which one read them.
        """
        if codec is None:
            self._codecs.pop(model, None)
            return
        self._codecs[model] = codec
        self._adopted[id(codec)] = codec
        if isinstance(codec, PrefixCodec):
            self._prefix_codecs[id(codec)] = codec

    def codec_of(self, model: str) -> Codec:
        """Return what prompts of ``model`` are read with."""
        codec = self._codecs.get(model)
        if codec is None:
            codec = self._codecs.get(self._base_of(model) or "", self._fallback)
        return codec

    def digests(self) -> dict[str, str]:
        """Return the digest of each model's own codec."""
        return {model: codec.digest for model, codec in self._codecs.items()}

    def close(self) -> None:
        """Drop what waits; running work ends by itself and its result is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.lane.close()

    @property
    def used_bytes(self) -> int:
        """What is kept of bodies and texts, in bytes; what was decoded of them weighs as much."""
        turns, passages = self._large
        bodies = self._turns.used_bytes + self._passages.used_bytes
        large = turns.used_bytes + passages.used_bytes
        return bodies + large + sum(one.used_bytes for one in self._prefix_codecs.values())

    def forget(self) -> None:
        """Forget every prompt: what comes next is read and tokenized anew."""
        self._turns.forget()
        self._passages.forget()
        # What the lane reads now is not kept.
        self._large = (ChatTurns(self._kept_bytes), Passages(self._kept_bytes))
        for codec in self._prefix_codecs.values():
            codec.forget()

    async def read(self, path: str, body: bytes) -> ReadPrompt:
        """Return what routing needs; raises BadPromptError, and KeyError for other paths.

        Raises LaneFullError where a large body would have to wait for too many others.
        """
        if len(body) > LARGE_BODY_BYTES:
            read = await self.lane.run(partial(_large_read, path, body, *self._large))
        elif path == CHAT_PATH and len(body) <= self._short_body_bytes:
            read = _short_turn(body)
        else:
            read = _read(path, body, self._turns, self._passages)
        call = read.call
        codec = self.codec_of(call.model)
        unroutable = call.unroutable
        prompts: tuple[PromptTokens, ...] = ()
        media: MediaPrompt | None = None
        if unroutable is None:
            try:
                prompts = await self._tokens(read, codec, len(body))
            except UnroutablePromptError as error:
                unroutable = error.reason
                if unroutable is Unroutable.MEDIA:
                    media = await self._media(read, codec, len(body))
        if media is not None:
            prompts, unroutable = (media.likeness,), None
        return ReadPrompt(
            model=call.model,
            is_stream=call.is_stream,
            prompts=prompts,
            head=media.head if media is not None else None,
            has_media=media is not None,
            salt=call.salt,
            choices=call.choices,
            unroutable=unroutable,
            max_output_tokens=call.max_output_tokens,
        )

    async def _tokens(
        self, read: Turn | Passage, codec: Codec, body_bytes: int
    ) -> tuple[PromptTokens, ...]:
        # Short chats may take words that were seen before: not where salts keep those apart.
        is_short = isinstance(read, Turn) and body_bytes <= self._short_body_bytes
        is_short = is_short and not read.call.salt
        known = None if is_short else self._prefix_codecs.get(id(codec))
        if known is not None and read.fresh_bytes <= self._inline_body_bytes:
            if isinstance(read, Turn):
                tail = known.turn_tail(read)
                if tail is not None:
                    return (tail,)
            elif read.marks and known.is_known(read):
                return (known.passage_prompt(read),)
        return await self._worked(body_bytes, partial(_tokens_of, read, codec, known))

    async def _media(
        self, read: Turn | Passage, codec: Codec, body_bytes: int
    ) -> MediaPrompt | None:
        """Return what is known of a chat with images; None where that is nothing."""
        if not isinstance(read, Turn):
            return None
        try:
            return await self._worked(body_bytes, partial(media_prompt, read.call, codec))
        except UnroutablePromptError:
            return None

    async def _worked(self, body_bytes: int, work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns: done here for a short body, else in a thread."""
        if body_bytes <= self._inline_body_bytes:
            return work()
        if self._pending >= self._max_pending:
            raise UnroutablePromptError(Unroutable.BUSY)
        loop = asyncio.get_running_loop()
        # Pending until the thread is done, not until the client is gone: the work is what counts.
        self._pending += 1
        working = self._threads.submit(work)
        working.add_done_callback(lambda _: call_soon(loop, self._release))
        return await asyncio.wrap_future(working, loop=loop)

    def _release(self) -> None:
        self._pending -= 1


_CONVERTERS: Final[Mapping[str, Callable[[bytes], ChatCall]]] = {
    RESPONSE_PATH: decode_response,
    MESSAGE_PATH: decode_messages,
}


def _read(path: str, body: bytes, turns: ChatTurns, passages: Passages) -> Turn | Passage:
    if path == CHAT_PATH:
        return turns.decode(body)
    if path == COMPLETION_PATH:
        return passages.decode(body)
    return Turn(call=_CONVERTERS[path](body), fresh_bytes=len(body))


def _large_read(path: str, body: bytes, turns: ChatTurns, passages: Passages) -> Turn | Passage:
    refuse_dense(body)
    return _read(path, body, turns, passages)


def _short_turn(body: bytes) -> Turn:
    return Turn(call=decode_chat(body), fresh_bytes=len(body))


def _tokens_of(
    read: Turn | Passage, codec: Codec, known: PrefixCodec | None
) -> tuple[PromptTokens, ...]:
    """Return the prompts of ``read``; ``known`` is the codec where that remembers prefixes."""
    if isinstance(read, Turn):
        return (known.turn_prompt(read) if known is not None else _chat_prompt(read, codec),)
    if known is not None and read.chunks:
        return (known.passage_prompt(read),)
    call = read.call if read.known is None else decode_completion(read.body)
    return tuple(
        _text_prompt(prompt, codec, known, call)
        if isinstance(prompt, str)
        else PromptTokens(packed=pack_tokens(prompt), is_exact=True)
        for prompt in call.prompts
    )


def _chat_prompt(turn: Turn, codec: Codec) -> PromptTokens:
    call = turn.call
    packed = codec.chat_tokens(call.messages, call.tools, options=call.options)
    return PromptTokens(packed=packed, is_exact=codec.is_exact)


def _text_prompt(
    text: str, codec: Codec, known: PrefixCodec | None, call: CompletionCall
) -> PromptTokens:
    has_added = call.add_special_tokens
    if known is not None:
        return known.text_prompt(text, add_special_tokens=has_added, salt=call.salt)
    packed = codec.text_tokens(text, add_special_tokens=has_added)
    return PromptTokens(packed=packed, is_exact=codec.is_exact)
