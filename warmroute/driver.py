"""A client that holds agent conversations: streams chats, measures them, plays sessions.

Times are what the client sees on its own clock: from just before the request is written until the
answer's first event arrives, which the engine sends with the first token (that token may be no
whole character yet). Answers are greedy: equal questions get equal ones. One request per turn and
no retry: a failure is a failure.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from msgspec import Struct

from warmroute.workload import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from warmroute.workload import Session

REPLICA_HEADER = "x-warmroute-replica"
EVENT_PREFIX = b"data:"
DONE = b"[DONE]"
HTTP_OK = 200
SHOWN_ERROR_CHARS = 500
OPEN_CONNECTIONS = 0
"""No limit: who drives decides how much happens at once."""


class ChatFailedError(Exception):
    """A chat did not end as it should; the text says which and how."""


class PromptDetails(Struct, frozen=True):
    """What the engine says of the prompt."""

    cached_tokens: int = 0


class Usage(Struct, frozen=True):
    """The OpenAI ``usage`` object, as far as it is measured."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class _Delta(Struct, frozen=True):
    content: str | None = None


class _Choice(Struct, frozen=True):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Event(Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: Usage | None = None
    error: Any = None


class Reply(Struct, frozen=True, kw_only=True):
    """One answer and what it took. ``replica`` None: the router did not tell."""

    text: str
    replica: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    duration_s: float


class Exchange(Struct, frozen=True, kw_only=True):
    """One request of a session and its reply. ``started_s`` is on the driver's clock."""

    session: str
    turn: int
    started_s: float
    messages: tuple[Message, ...]
    reply: Reply


_decoder = msgspec.json.Decoder(_Event)


def open_http() -> aiohttp.ClientSession:
    """Return a client session without limits on connections or time; close it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=OPEN_CONNECTIONS),
        timeout=aiohttp.ClientTimeout(total=None),
    )


class ChatClient:
    """Streams chat completions of one model from one address (``http://host:port``)."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, model: str, clock: Callable[[], float]
    ) -> None:
        self._http = http
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._clock = clock

    async def chat(self, messages: Sequence[Message], max_tokens: int) -> Reply:
        """Return the answer to ``messages``; raises ChatFailedError."""
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        payload = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        began_s = self._clock()
        try:
            async with self._http.post(self._url, data=payload, headers=headers) as response:
                if response.status != HTTP_OK:
                    text = (await response.text())[:SHOWN_ERROR_CHARS]
                    message = f"{self._url} answered {response.status}: {text}"
                    raise ChatFailedError(message)
                return await self._read(response, began_s)
        except (aiohttp.ClientError, msgspec.DecodeError, OSError) as error:
            message = f"{self._url}: {type(error).__name__}: {error}"
            raise ChatFailedError(message) from error

    async def _read(self, response: aiohttp.ClientResponse, began_s: float) -> Reply:
        texts: list[str] = []
        usage: Usage | None = None
        first_event_s: float | None = None
        async for line in response.content:
            if not line.startswith(EVENT_PREFIX):
                continue
            data = line[len(EVENT_PREFIX) :].strip()
            if data == DONE:
                return self._reply(response, texts, usage, began_s, first_event_s)
            event = _decoder.decode(data)
            if event.error is not None:
                message = f"{self._url} broke off: {event.error}"
                raise ChatFailedError(message)
            usage = event.usage or usage
            if event.choices and first_event_s is None:
                first_event_s = self._clock()
            texts += (choice.delta.content or "" for choice in event.choices)
        message = f"{self._url}: the stream ended without {DONE.decode()}"
        raise ChatFailedError(message)

    def _reply(
        self,
        response: aiohttp.ClientResponse,
        texts: Sequence[str],
        usage: Usage | None,
        began_s: float,
        first_event_s: float | None,
    ) -> Reply:
        if usage is None or first_event_s is None:
            message = f"{self._url}: the answer has no {'choice' if usage else 'usage'}"
            raise ChatFailedError(message)
        details = usage.prompt_tokens_details or PromptDetails()
        return Reply(
            text="".join(texts),
            replica=response.headers.get(REPLICA_HEADER),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens,
            completion_tokens=usage.completion_tokens,
            ttft_s=first_event_s - began_s,
            duration_s=self._clock() - began_s,
        )


class Driver:
    """Plays sessions in their order, ``open_sessions`` of them at a time, each turn after turn."""

    def __init__(
        self,
        client: ChatClient,
        open_sessions: int,
        clock: Callable[[], float],
        on_exchange: Callable[[Exchange], None],
    ) -> None:
        self._client = client
        self._open_sessions = open_sessions
        self._clock = clock
        self._on_exchange = on_exchange

    async def play(self, sessions: Sequence[Session]) -> None:
        """Play all sessions; raises ChatFailedError at the first failure, ending the others."""
        coming = iter(sessions)

        async def play_in_turn() -> None:
            for session in coming:
                await self._play_one(session)

        players = [asyncio.create_task(play_in_turn()) for _ in range(self._open_sessions)]
        try:
            await asyncio.gather(*players)
        finally:
            for player in players:
                player.cancel()
            await asyncio.gather(*players, return_exceptions=True)

    async def _play_one(self, session: Session) -> None:
        messages = [session.system]
        for number, turn in enumerate(session.turns):
            await asyncio.sleep(turn.think_s)
            messages.append(turn.message)
            started_s = self._clock()
            reply = await self._client.chat(messages, turn.reply_tokens)
            self._on_exchange(
                Exchange(
                    session=session.name,
                    turn=number,
                    started_s=started_s,
                    messages=tuple(messages),
                    reply=reply,
                )
            )
            messages.append({"role": "assistant", "content": reply.text})
