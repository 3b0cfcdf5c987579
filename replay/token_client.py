"""Asks one engine with token ids (``POST /v1/completions``) and notes when each token comes."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
import msgspec
from msgspec import Struct

from replay.probe import Answer

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence
    from types import TracebackType

DONE: Final = b"[DONE]"
EVENT: Final = b"data:"
SHOWN_CHARS: Final = 300
SILENCE_S: Final = 120.0
"""How long a token may take."""
CONNECT_S: Final = 5.0


class AskError(Exception):
    """The engine did not answer as asked. ``status`` is the HTTP status of a refusal, else None."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _Details(Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(Struct, frozen=True):
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(Struct, frozen=True):
    choices: tuple[msgspec.Raw, ...] = ()
    usage: _Usage | None = None
    error: Any = None


_decode: Final = msgspec.json.Decoder(_Event).decode


class TokenClient:
    """``await client.ask(token_ids, output_tokens)``; an async context manager."""

    def __init__(
        self,
        url: str,
        model: str,
        clock: Callable[[], float],
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._clock = clock
        self._tls = tls
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls or True),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=SILENCE_S),
            headers=self._headers,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.close()

    async def ask(self, tokens: Sequence[int], output_tokens: int) -> Answer:
        """Return when ``output_tokens`` more tokens came; raises AskError."""
        body = {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        payload = msgspec.json.encode(body)
        sent_s = self._clock()
        try:
            async with self._http.post(self._url, data=payload, allow_redirects=False) as response:
                if response.status != HTTPStatus.OK:
                    text = (await response.text())[:SHOWN_CHARS]
                    message = f"{self._url} answered {response.status}: {text}"
                    raise AskError(message, response.status)
                answer = await self._read(response, sent_s)
        except (TimeoutError, aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            message = f"{self._url}: {type(error).__name__}: {error}"
            raise AskError(message) from error
        if len(answer.times_s) != output_tokens:
            message = f"{self._url}: {len(answer.times_s)} tokens came, not {output_tokens}"
            raise AskError(message)
        return answer

    async def _read(self, response: aiohttp.ClientResponse, sent_s: float) -> Answer:
        times_s: list[float] = []
        cached_tokens = None
        async for line in response.content:
            if not line.startswith(EVENT):
                continue
            data = line[len(EVENT) :].strip()
            if data == DONE:
                return Answer(sent_s=sent_s, times_s=tuple(times_s), cached_tokens=cached_tokens)
            now_s = self._clock()
            event = _decode(data)
            if event.error is not None:
                message = f"{self._url} broke off: {event.error}"
                raise AskError(message)
            usage = event.usage
            if usage is not None and usage.prompt_tokens_details is not None:
                told = usage.prompt_tokens_details.cached_tokens
                cached_tokens = cached_tokens if told is None else told
            # An engine that does not count along sends an event with each token.
            count = len(times_s) + 1 if usage is None else usage.completion_tokens
            if event.choices:
                times_s += [now_s] * (count - len(times_s))
        message = f"{self._url}: the stream ended without {DONE.decode()}"
        raise AskError(message)
