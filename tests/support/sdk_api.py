"""The four APIs through the SDKs that clients have: openai's, and anthropic's for messages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Self

import anthropic
from msgspec import Struct

from support.conversation import sdk
from support.engine_api import Json

if TYPE_CHECKING:
    from types import TracebackType

    from support.engine_api import Api, Talk

_OF_ONE_ANSWER: Final = frozenset({"id", "item_id", "created", "created_at", "completed_at"})


class Heard(Struct, frozen=True, kw_only=True):
    """What an SDK made of one answer, without ids and times.

    ``usage`` has every count that was told at last. ``rest`` is the whole answer; of a stream, the
    kinds of its events in the order of their first, because an engine that is read slowly puts
    several tokens into one event.
    """

    text: str
    usage: Json
    endings: list[str]
    rest: Any
    headers: Mapping[str, str]

    @property
    def answer(self) -> tuple[str, Json, list[str], Any]:
        """What must be equal wherever the answer came from."""
        return self.text, self.usage, self.endings, self.rest


def anthropic_sdk(url: str) -> anthropic.AsyncAnthropic:
    """Return a client of the server at ``url`` that never retries."""
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)


class Clients:
    """Both SDKs as clients of one server, router or engine; neither retries."""

    def __init__(self, url: str) -> None:
        self._openai = sdk(url)
        self._anthropic = anthropic_sdk(url)

    async def __aenter__(self) -> Self:
        """Connect with the first call."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave all connections."""
        await self._openai.close()
        await self._anthropic.close()

    async def ask(
        self, api: Api, talk: Talk, *, model: str, output_tokens: int, is_streamed: bool
    ) -> Heard:
        """Ask ``talk`` greedily through ``api``."""
        fields = {"model": model, "stream": is_streamed, api.output_field: output_tokens}
        if is_streamed and api.name in {"chat", "completion"}:
            fields["stream_options"] = {"include_usage": True}
        raw = await self._create(api)(**fields, **api.body_of(talk), extra_body={"temperature": 0})
        parsed = raw.parse()
        if inspect.isawaitable(parsed):
            parsed = await parsed
        if is_streamed:
            return _heard_stream(api, [event.model_dump() async for event in parsed], raw.headers)
        return _heard_whole(api, parsed.model_dump(), raw.headers)

    def _create(self, api: Api) -> Any:
        resource: Any = {
            "chat": self._openai.chat.completions,
            "completion": self._openai.completions,
            "response": self._openai.responses,
            "message": self._anthropic.messages,
        }[api.name]
        return resource.with_raw_response.create


def _heard_whole(api: Api, answer: Json, headers: Mapping[str, str]) -> Heard:
    assert api.usage_of(answer) is not None, answer
    return Heard(
        text=api.text_of(answer),
        usage=answer["usage"],
        endings=_endings(answer),
        rest=_without_ids(answer),
        headers=headers,
    )


def _heard_stream(api: Api, events: list[Json], headers: Mapping[str, str]) -> Heard:
    told = [event for event in events if api.usage_of(event) is not None]
    assert told, events
    return Heard(
        text="".join(map(api.delta_of, events)),
        usage=told[-1].get("response", told[-1])["usage"],
        endings=[ending for event in events for ending in _endings(event)],
        rest=list(dict.fromkeys(event.get("type") or event["object"] for event in events)),
        headers=headers,
    )


def _endings(value: Any) -> list[str]:
    """Return why the answer ended, in whatever way ``value`` says it."""
    if isinstance(value, list):
        return [ending for part in value for ending in _endings(part)]
    if not isinstance(value, dict):
        return []
    own = [value[key] for key in ("finish_reason", "stop_reason") if value.get(key)]
    if value.get("object") == "response":
        own.append(value["status"])
    return own + [ending for part in value.values() for ending in _endings(part)]


def _without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_ids(part) for part in value]
    if isinstance(value, dict):
        return {key: _without_ids(part) for key, part in value.items() if key not in _OF_ONE_ANSWER}
    return value
