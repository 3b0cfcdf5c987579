"""Compares the tokens of the router's own files with the engine's ``/tokenize``, over samples."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from prompt.codec import load_codec
from prompt.model import CodecLoadError, UnroutablePromptError
from prompt.question import TOKENIZE_PATH, WrongAnswerError, tokenized
from state.prefix import TOKEN_BYTES
from warmroute.admin_client import read_bounded
from warmroute.doctor_case import TokenCheck

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prompt.codec import Codec

TOKENIZE_S: Final = 10.0
MAX_ANSWER_BYTES: Final = 1 << 20
TEXTS: Final = (
    "Hello, world! It's 12345 o'clock; they'll've seen 3.14159.",
    "  indented\n\tcode = {'a': [1, 2]}\r\n\n    return f(x)  \n",
    "Naïve café, Straße, привет мир, 你好世界, 日本語, \u00bd 🦙 e\u0301.",
)
"""Words and numbers, white space, scripts: where tokenizers differ."""
_ASK: Final = {"role": "user", "content": "And <b>why</b> is that?"}
CHATS: Final[tuple[list[dict[str, Any]], ...]] = (
    [_ASK],
    [{"role": "system", "content": "You answer briefly."}, _ASK],
    [_ASK, {"role": "assistant", "content": "Because."}, _ASK],
)
"""A turn, a system prompt, a second turn: where templates differ."""


class CannotCompareError(Exception):
    """There is nothing to compare with; the text says why."""


def read_codec(directory: str) -> Codec:
    """Return the codec of a directory; raises CannotCompareError."""
    try:
        return load_codec(Path(directory))
    except CodecLoadError as error:
        message = f"{directory}: {error}"
        raise CannotCompareError(message) from None


async def check_tokens(
    http: aiohttp.ClientSession, url: str, model: str, directory: str
) -> TokenCheck:
    """Return how often router and engine differ; raises CannotCompareError."""
    codec = await asyncio.to_thread(read_codec, directory)
    texts = [await _text_pair(http, url, model, codec, text) for text in TEXTS]
    chats = [await _chat_pair(http, url, model, codec, chat) for chat in CHATS]
    compared = [pair for pair in chats if pair is not None]
    other = [pair for pair in (*texts, *compared) if pair[0] != pair[1]]
    return TokenCheck(
        model=model,
        directory=directory,
        texts=len(texts),
        chats=len(compared),
        other_texts=sum(ours != theirs for ours, theirs in texts),
        other_chats=sum(ours != theirs for ours, theirs in compared),
        first=_difference(*other[0]) if other else "",
    )


async def _text_pair(
    http: aiohttp.ClientSession, url: str, model: str, codec: Codec, text: str
) -> tuple[bytes, bytes]:
    body = {"model": model, "prompt": text, "add_special_tokens": True}
    return codec.text_tokens(text), await _asked(http, url, body)


async def _chat_pair(
    http: aiohttp.ClientSession, url: str, model: str, codec: Codec, chat: Sequence[dict[str, Any]]
) -> tuple[bytes, bytes] | None:
    """Return both sides' tokens; None where the template takes no such chat."""
    try:
        ours = codec.chat_tokens(list(chat), None, options={})
    except UnroutablePromptError:
        return None
    body = {"model": model, "messages": list(chat), "add_generation_prompt": True}
    return ours, await _asked(http, url, body)


async def _asked(http: aiohttp.ClientSession, url: str, body: dict[str, object]) -> bytes:
    """Return the engine's packed ids; raises CannotCompareError."""
    try:
        async with http.post(
            url + TOKENIZE_PATH,
            data=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"},
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=TOKENIZE_S),
        ) as answer:
            if answer.status != 200:  # noqa: PLR2004
                message = f"{url}{TOKENIZE_PATH} answered {answer.status}"
                raise CannotCompareError(message)
            return tokenized(await read_bounded(answer, MAX_ANSWER_BYTES))
    except (aiohttp.ClientError, TimeoutError, OSError, WrongAnswerError) as error:
        message = f"{url}{TOKENIZE_PATH}: {type(error).__name__}"
        raise CannotCompareError(message) from None


def _difference(ours: bytes, theirs: bytes) -> str:
    """Return where two token sequences part, in numbers only."""
    pairs = zip(ours, theirs, strict=False)
    least = min(len(ours), len(theirs))
    byte = next((at for at, (one, other) in enumerate(pairs) if one != other), least)
    return (
        f"{len(ours) // TOKEN_BYTES} tokens here, {len(theirs) // TOKEN_BYTES} there, equal up to "
        f"token {byte // TOKEN_BYTES}"
    )
