"""What a live replay sends requests to: a router or an engine with OpenAI's HTTP API.

Times are the client's own: from just before a request is written until the first event with a token
arrives, and until the stream ends.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from replay.synthesis import Prompt

EndpointName = Literal["completions", "chat"]

PATHS: Final[dict[EndpointName, str]] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}
RECEIPT_PREFIX: Final = "x-warmroute-"
EVENT_PREFIX: Final = b"data:"
DONE: Final = b"[DONE]"
HTTP_OK: Final = 200
SHOWN_CHARS: Final = 200
CONNECT_S: Final = 10.0
IDLE_CONNECTION_S: Final = 2.0
"""Shorter than any server's own patience, so that no request meets a connection that just ends."""


class TargetError(Exception):
    """The target does not answer as one; the text says what it did."""


class AddressError(ValueError):
    """The target's address is none, or none that a load test may have."""


class TargetSettings(Struct, frozen=True, kw_only=True):
    """``url`` is ``http://host:port`` with the API below it; ``model`` is what requests ask for."""

    url: str
    model: str
    endpoint: EndpointName = "completions"
    ignore_eos: bool = True
    timeout_s: float = 600.0


class Answer(Struct, frozen=True, kw_only=True):
    """What came back, None where the target does not tell. ``error``: why it is not whole."""

    duration_s: float
    ttft_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    replica: str | None = None
    reason: str | None = None
    predicted_cached_tokens: int | None = None
    error: str | None = None


class _PromptDetails(Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(Struct, frozen=True):
    role: str | None = None
    content: str | None = None


class _Choice(Struct, frozen=True):
    delta: _Delta | None = None

    @property
    def has_token(self) -> bool:
        """Whether it is more than the line that says who speaks."""
        return self.delta is None or bool(self.delta.content) or self.delta.role is None


class _Event(Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None


class _Model(Struct, frozen=True):
    id: str


class _Models(Struct, frozen=True):
    data: tuple[_Model, ...]


class _Failure(Exception):  # noqa: N818 - it becomes the answer's ``error``
    """An answer that is not whole."""


class _Seen:
    """What a stream has told so far."""

    def __init__(self) -> None:
        self.ttft_s: float | None = None
        self.usage: _Usage | None = None
        self.receipts: dict[str, str] = {}


_decoder: Final = msgspec.json.Decoder(_Event)


def checked_address(url: str, *, may_be_remote: bool) -> str:
    """Return ``url`` without ``/v1`` or a slash at its end; raises AddressError."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        message = f"expected http://host:port, got {url!r}"
        raise AddressError(message)
    if parts.username is not None:
        message = "expected http://host:port, got one with credentials"
        raise AddressError(message)
    if not may_be_remote and not _is_loopback(host):
        message = f"{host} is not this machine: a load test goes there with --allow-remote only"
        raise AddressError(message)
    return url.rstrip("/").removesuffix("/v1")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_http(timeout_s: float, tls: ssl.SSLContext | None = None) -> aiohttp.ClientSession:
    """Return a session without a limit on connections; close it. ``tls`` is for ``https://``."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=IDLE_CONNECTION_S, ssl=tls or True
        ),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S),
    )


async def model_of(http: aiohttp.ClientSession, url: str) -> str:
    """Return the one model that ``url`` serves; raises TargetError."""
    try:
        async with http.get(f"{url}/v1/models", allow_redirects=False) as response:
            body = await response.read()
            if response.status != HTTP_OK:
                message = f"{url}/v1/models answered {response.status}: {_shown(body)}"
                raise TargetError(message)
        models = sorted({model.id for model in msgspec.json.decode(body, type=_Models).data})
    except (aiohttp.ClientError, OSError) as error:
        message = f"{url} does not answer: {_named(error)}"
        raise TargetError(message) from None
    except msgspec.MsgspecError as error:
        message = f"{url}/v1/models is no list of models: {error}"
        raise TargetError(message) from None
    if len(models) != 1:
        message = f"{url} serves {', '.join(models) or 'no model'}: name one with --model"
        raise TargetError(message)
    return models[0]


class Target:
    """Sends prompts to one address over ``http``; ``clock`` is monotonic, in seconds."""

    def __init__(
        self, http: aiohttp.ClientSession, settings: TargetSettings, clock: Callable[[], float]
    ) -> None:
        self._http = http
        self._settings = settings
        self._clock = clock
        self._url = settings.url + PATHS[settings.endpoint]

    def body_of(self, prompt: Prompt) -> bytes:
        """Return the request that asks for an answer to ``prompt``."""
        settings = self._settings
        body: dict[str, Any] = {"model": settings.model}
        if settings.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt.content}]
        else:
            body["prompt"] = prompt.content
        body |= {
            "max_tokens": prompt.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if settings.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body)

    async def ask(self, body: bytes) -> Answer:
        """Return what became of one request; a failure is an answer, too."""
        seen, error = _Seen(), None
        began_s = self._clock()
        try:
            await self._stream(body, began_s, seen)
        except _Failure as failure:
            error = str(failure)
        except TimeoutError:
            error = f"no whole answer within {self._settings.timeout_s:g} s"
        except (aiohttp.ClientError, msgspec.MsgspecError, OSError, ValueError) as failure:
            error = _named(failure)
        duration_s = self._clock() - began_s
        usage, receipts = seen.usage, seen.receipts
        details = usage.prompt_tokens_details if usage is not None else None
        predicted = receipts.get("predicted-cached-tokens", "")
        return Answer(
            duration_s=duration_s,
            ttft_s=seen.ttft_s,
            prompt_tokens=usage.prompt_tokens if usage is not None else None,
            output_tokens=usage.completion_tokens if usage is not None else None,
            cached_tokens=details.cached_tokens if details is not None else None,
            replica=receipts.get("replica"),
            reason=receipts.get("reason"),
            predicted_cached_tokens=int(predicted) if predicted.isdecimal() else None,
            error=error,
        )

    async def _stream(self, body: bytes, began_s: float, seen: _Seen) -> None:
        headers = {"Content-Type": "application/json"}
        # Wherever a redirection leads, nobody has allowed that address.
        async with self._http.post(
            self._url, data=body, headers=headers, allow_redirects=False
        ) as response:
            seen.receipts = {
                name.lower().removeprefix(RECEIPT_PREFIX): value
                for name, value in response.headers.items()
                if name.lower().startswith(RECEIPT_PREFIX)
            }
            if response.status != HTTP_OK:
                message = f"status {response.status}: {_shown(await response.read())}"
                raise _Failure(message)
            async for line in response.content:
                if line.startswith(EVENT_PREFIX):
                    data = line[len(EVENT_PREFIX) :].strip()
                    if data == DONE:
                        break
                    self._take(data, began_s, seen)
            else:
                message = "the stream ended before its end"
                raise _Failure(message)
        if seen.ttft_s is None:
            message = "the answer has no token"
            raise _Failure(message)

    def _take(self, data: bytes, began_s: float, seen: _Seen) -> None:
        if seen.ttft_s is not None and b'"usage"' not in data and b'"error"' not in data:
            return
        event = _decoder.decode(data)
        if event.error is not None:
            message = f"broken off: {_shown(msgspec.json.encode(event.error))}"
            raise _Failure(message)
        seen.usage = event.usage or seen.usage
        if seen.ttft_s is None and any(choice.has_token for choice in event.choices):
            seen.ttft_s = self._clock() - began_s


def _shown(body: bytes) -> str:
    return " ".join(body.decode(errors="replace").split())[:SHOWN_CHARS]


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[: 2 * SHOWN_CHARS] if str(error) else repr(error)
