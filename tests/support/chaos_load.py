"""Clients under whose feet processes die, and a ledger of how each of their requests ended.

A request may end in one of few ways, and each must be told truthfully: what a client takes for a
whole answer is one, byte for byte, and what was cut is a beginning of it. What the workers generate
follows from the prompt, so every text is known before it is asked for.
"""

from __future__ import annotations

import asyncio
import enum
import json
import random
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from chaos.evidence import End
from prompt.codec import load_codec
from prompt.request import decode_chat
from sidecar.runner import Draw, prompt_key
from sidecar.synthetic import WORDS, Lexicon
from state.prefix import unpack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path

CANARY: Final = "quokkazanzibar"
"""In every prompt, and in nothing that is ever logged or shown."""
DEADLINE_S: Final = 25.0
PATH: Final = "/v1/chat/completions"
DONE: Final = b"[DONE]"
SYSTEM_TOKENS: Final = 3_000
ERROR_KEYS: Final = frozenset({"message", "type", "param", "code"})
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_HEADERS: Final = {"Content-Type": "application/json"}


class Leaving(enum.StrEnum):
    """Ways in which a client goes away."""

    WAITING_FOR_STREAM = "before the head of a stream"
    IN_STREAM = "in the middle of a stream"
    RESET_IN_STREAM = "in the middle of a stream, with a reset"
    WAITING_FOR_ANSWER = "before an answer that is no stream"
    HALF_BODY = "in the middle of its own body"


@dataclass(slots=True, kw_only=True)
class Entry:
    """One request of the ledger. ``body`` is what arrived, ``is_whole`` whether it ended well."""

    request_id: str
    router_index: int
    request: dict[str, Any]
    began_s: float
    ended_s: float = float("inf")
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    is_whole: bool = False
    is_left: bool = False
    is_late: bool = False
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    transport: asyncio.Transport | None = None
    end: End | None = None
    fault: str = ""

    @property
    def is_stream(self) -> bool:
        """Whether a stream was asked for."""
        return bool(self.request["stream"])

    def __str__(self) -> str:
        kind = "stream" if self.is_stream else "answer"
        return (
            f"{self.request_id} ({kind}, router {self.router_index}) {self.end}"
            f" after {self.ended_s - self.began_s:.2f} s, status {self.status},"
            f" {len(self.body)} bytes: {self.fault or 'no fault'}"
        )


class Script:
    """What is asked, and what the workers answer to it."""

    def __init__(self, model: str, tokenizer: Path, seed: int) -> None:
        self.model = model
        self.codec = load_codec(tokenizer)
        self._lexicon = Lexicon(self.codec)
        rng = random.Random(seed)
        words: list[str] = []
        while len(self.tokens(" ".join(words))) < SYSTEM_TOKENS:
            words += rng.choices(WORDS, k=50)
        self.system = " ".join(words)

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return unpack_tokens(self.codec.text_tokens(text))

    def request(self, number: int, rng: random.Random, *, is_stream: bool) -> dict[str, Any]:
        """Return one request: the shared system prompt, and a question that nobody else asks."""
        question = f"{CANARY} {number} {' '.join(rng.choices(WORDS, k=rng.randint(20, 60)))}"
        messages = [("system", self.system), ("user", question)]
        return {
            "model": self.model,
            "messages": [{"role": role, "content": content} for role, content in messages],
            "max_tokens": rng.randint(8, 60),
            "stream": is_stream,
        } | ({"stream_options": {"include_usage": True}} if is_stream else {})

    def packed(self, request: dict[str, Any]) -> bytes:
        """Return the prompt as workers and routers see it."""
        call = decode_chat(json.dumps(request).encode())
        return self.codec.chat_tokens(call.messages, call.tools, options=call.options)

    def answer(self, request: dict[str, Any]) -> str:
        """Return what any worker answers."""
        draw = Draw(seed=0, index=0, prompt_key=prompt_key(self.packed(request)))
        voice = self._lexicon.voice(draw, 0)
        return "".join(voice.next_piece().text for _ in range(request["max_tokens"]))


def judge(entry: Entry, expected: str) -> None:
    """Set how ``entry`` ended, and its fault where that breaks a rule."""
    if entry.is_late:
        entry.end, entry.fault = End.HUNG, "it did not end before its deadline"
    elif entry.status is None:
        entry.end = End.LEFT if entry.is_left else End.CLOSED
    elif entry.status != 200:
        _judge_error(entry)
    elif entry.is_stream:
        _judge_stream(entry, expected)
    else:
        _judge_answer(entry, expected)


def _judge_error(entry: Entry) -> None:
    entry.end = End.HTTP_ERROR
    if entry.is_left or not entry.is_whole:
        entry.end = End.LEFT if entry.is_left else End.CLOSED
        return
    if entry.status not in {502, 503, 504}:
        entry.fault = f"no error of ours has this status: {bytes(entry.body)!r}"
    elif not _is_error(bytes(entry.body)):
        entry.fault = f"not the body of an error: {bytes(entry.body)!r}"
    elif b'"overloaded_error"' in entry.body and "Retry-After" not in entry.headers:
        entry.fault = "an overload without Retry-After"


def _judge_answer(entry: Entry, expected: str) -> None:
    if not entry.is_whole:
        entry.end = End.LEFT if entry.is_left else End.CLOSED
        return
    entry.end = End.COMPLETE
    try:
        answer = json.loads(entry.body)
        text = answer["choices"][0]["message"]["content"]
        output_tokens = answer["usage"]["completion_tokens"]
    except (ValueError, LookupError, TypeError):
        entry.fault = f"not an answer: {bytes(entry.body)!r}"
        return
    if text != expected or output_tokens != entry.request["max_tokens"]:
        entry.fault = f"another answer than {expected!r}: {text!r}"


def _judge_stream(entry: Entry, expected: str) -> None:
    whole, _, rest = bytes(entry.body).rpartition(b"\n\n")
    events = [event.removeprefix(b"data: ") for event in whole.split(b"\n\n") if event]
    is_done = DONE in events
    errors = [event for event in events if _is_error(event)]
    texts = [_text(event) for event in events if event != DONE and not _is_error(event)]
    text = "".join(part for part in texts if part is not None)
    if is_done:
        entry.end = End.COMPLETE
    elif errors:
        entry.end = End.ERROR_EVENT
    else:
        entry.end = End.LEFT if entry.is_left else End.CLOSED
    if None in texts:
        entry.fault = f"an event that is none: {whole!r}"
    elif is_done and (errors or events[-1] != DONE or rest or text != expected):
        entry.fault = f"it says that it is done and is not: {text!r} of {expected!r}, {errors}"
    elif errors and (errors != events[-1:] or rest):
        entry.fault = f"something follows an error event: {whole!r}"
    elif not expected.startswith(text):
        entry.fault = f"not the beginning of {expected!r}: {text!r}"
    elif entry.end is End.CLOSED and entry.is_whole:
        entry.fault = "it ends as if it were whole, without saying that it is done"


def _text(event: bytes) -> str | None:
    """Return what an event adds to the text; None for what is no event of a chat."""
    try:
        choices = json.loads(event)["choices"]
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    except (ValueError, LookupError, TypeError):
        return None


def _is_error(data: bytes) -> bool:
    try:
        error = json.loads(data)["error"]
    except (ValueError, LookupError, TypeError):
        return False
    return isinstance(error, dict) and error.keys() >= ERROR_KEYS and bool(error["message"])


class Load:
    """Sessions that ask one request after the other, until told to stop."""

    def __init__(self, script: Script, urls: Sequence[str], seed: int) -> None:
        self.script = script
        self.ledger: list[Entry] = []
        self._urls = urls
        self._rng = random.Random(seed)
        self._is_stopping = False

    def stop(self) -> None:
        """Begin no more requests."""
        self._is_stopping = True

    async def has_asked(self, requests: int) -> bool:
        """Return whether that many requests were begun."""
        return len(self.ledger) >= requests

    async def session(self, number: int) -> None:
        """Ask until stopped, on connections that are kept alive; one router after the other."""
        rng = random.Random(f"{number} {self._rng.random()}")
        async with _client() as http:
            while not self._is_stopping:
                router_index = rng.randrange(len(self._urls))
                await self.ask(http, router_index, is_stream=rng.random() < 0.7)
                await asyncio.sleep(rng.uniform(0.05, 0.4))

    async def ask(
        self, http: aiohttp.ClientSession, router_index: int, *, is_stream: bool
    ) -> Entry:
        """Ask one request and note how it ended."""
        entry = self._entry(router_index, is_stream=is_stream)
        await self._follow(entry, self._exchange(http, entry))
        return entry

    async def leave(self, how: Leaving, router_index: int, delay_s: float) -> Entry:
        """Ask one request and go away, ``delay_s`` after what ``how`` waits for."""
        is_stream = how is not Leaving.WAITING_FOR_ANSWER
        entry = self._entry(router_index, is_stream=is_stream)
        if how is Leaving.HALF_BODY:
            await self._follow(entry, self._send_half(entry, delay_s))
            return entry
        async with _client() as http:
            asking = asyncio.create_task(self._follow(entry, self._exchange(http, entry)))
            if how in {Leaving.IN_STREAM, Leaving.RESET_IN_STREAM}:
                begun = asyncio.create_task(entry.has_begun.wait())
                await asyncio.wait({asking, begun}, return_when=asyncio.FIRST_COMPLETED)
                begun.cancel()
            await asyncio.wait({asking}, timeout=delay_s)
            if not asking.done():
                entry.is_left = True
                if how is Leaving.RESET_IN_STREAM and entry.transport is not None:
                    _reset(entry.transport)
                else:
                    asking.cancel()
            await asyncio.wait({asking})
        return entry

    def _entry(self, router_index: int, *, is_stream: bool) -> Entry:
        number = len(self.ledger)
        request = self.script.request(number, self._rng, is_stream=is_stream)
        entry = Entry(
            request_id=f"chaos-{number}",
            router_index=router_index,
            request=request,
            began_s=time.monotonic(),
        )
        self.ledger.append(entry)
        return entry

    async def _follow(self, entry: Entry, exchange: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await exchange
        except TimeoutError:
            entry.is_late = True
        except (aiohttp.ClientError, OSError, EOFError):
            pass  # the connection ended: what arrived until then is judged
        finally:
            entry.ended_s = time.monotonic()
            entry.transport = None
            judge(entry, self.script.answer(entry.request))

    async def _exchange(self, http: aiohttp.ClientSession, entry: Entry) -> None:
        url = self._urls[entry.router_index] + PATH
        data = json.dumps(entry.request).encode()
        headers = _HEADERS | {"X-Request-Id": entry.request_id}
        async with http.post(url, data=data, headers=headers) as answer:
            entry.status = answer.status
            entry.headers = dict(answer.headers)
            connection = answer.connection
            entry.transport = connection.transport if connection is not None else None
            async for piece in answer.content.iter_any():
                entry.body += piece
                entry.has_begun.set()
            entry.is_whole = True

    async def _send_half(self, entry: Entry, delay_s: float) -> None:
        """Promise a body, send half of it, and leave."""
        entry.is_left = True
        host, _, port = self._urls[entry.router_index].removeprefix("http://").rpartition(":")
        body = json.dumps(entry.request).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: router\r\nContent-Length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(head.encode() + body[: len(body) // 2])
            await writer.drain()
            await asyncio.sleep(delay_s)
        finally:
            writer.close()


def _client() -> aiohttp.ClientSession:
    """Return a client without time limits of its own."""
    no_limit = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)
    return aiohttp.ClientSession(timeout=no_limit)


def _reset(transport: asyncio.Transport) -> None:
    """End a connection as a killed process with unread data does."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()


def tally(ledger: Sequence[Entry], key: Callable[[Entry], str]) -> dict[str, int]:
    """Return how many entries have which key."""
    counts: dict[str, int] = {}
    for entry in ledger:
        counts[key(entry)] = counts.get(key(entry), 0) + 1
    return dict(sorted(counts.items()))
