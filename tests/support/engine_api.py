"""The four APIs that carry a prompt: one conversation asked through each, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence


Talk = list[tuple[str, str]]
"""Messages as (role, content)."""
Json = dict[str, Any]


class Told(Struct, frozen=True, kw_only=True):
    """One answer: its text, what was counted, and the headers it came with."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    headers: Mapping[str, str]

    @property
    def replica(self) -> str:
        """Who the router says answered."""
        return self.headers["x-warmroute-replica"]

    @property
    def reason(self) -> str:
        """Why that one."""
        return self.headers["x-warmroute-reason"]

    @property
    def predicted_tokens(self) -> int:
        """What the router expected to be cached."""
        return int(self.headers["x-warmroute-predicted-cached-tokens"])

    @property
    def request_id(self) -> str:
        """The router's name for the request."""
        return self.headers["x-warmroute-request-id"]


class Api(Struct, frozen=True, kw_only=True):
    """One API: its body for a conversation, and where text and usage are in its answers."""

    name: str
    path: str
    body_of: Callable[[Talk], Json]
    output_field: str
    text_of: Callable[[Json], str]
    delta_of: Callable[[Json], str]
    usage_of: Callable[[Json], tuple[int, int] | None]


def _chat_usage(answer: Json) -> tuple[int, int] | None:
    usage = answer.get("usage")
    if not usage:
        return None
    return usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get(
        "cached_tokens"
    ) or 0


def _chat_delta(event: Json) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _response_text(answer: Json) -> str:
    messages = [item for item in answer["output"] if item["type"] == "message"]
    return "".join(part["text"] for message in messages for part in message["content"])


def _response_delta(event: Json) -> str:
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def _response_usage(answer: Json) -> tuple[int, int] | None:
    usage = answer.get("response", answer).get("usage")
    if not usage:
        return None
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def _message_delta(event: Json) -> str:
    return str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""


def _message_usage(answer: Json) -> tuple[int, int] | None:
    usage = answer.get("usage")
    if not usage:
        return None
    cached = usage.get("cache_read_input_tokens") or 0
    # What is new in the cache is not among the input tokens either.
    fresh = usage["input_tokens"] + (usage.get("cache_creation_input_tokens") or 0)
    return fresh + cached, cached


def _messages_body(talk: Talk) -> Json:
    system = "\n".join(content for role, content in talk if role == "system")
    return {"system": system, "messages": _messages([part for part in talk if part[0] != "system"])}


def _messages(talk: Talk) -> list[Json]:
    return [{"role": role, "content": content} for role, content in talk]


APIS: Final[Sequence[Api]] = (
    Api(
        name="chat",
        path="/v1/chat/completions",
        body_of=lambda talk: {"messages": _messages(talk)},
        output_field="max_tokens",
        text_of=lambda answer: str(answer["choices"][0]["message"]["content"]),
        delta_of=_chat_delta,
        usage_of=_chat_usage,
    ),
    Api(
        name="completion",
        path="/v1/completions",
        body_of=lambda talk: {"prompt": "".join(f"{role}: {text}\n" for role, text in talk)},
        output_field="max_tokens",
        text_of=lambda answer: str(answer["choices"][0]["text"]),
        delta_of=lambda event: "".join(choice["text"] for choice in event["choices"]),
        usage_of=_chat_usage,
    ),
    Api(
        name="response",
        path="/v1/responses",
        body_of=lambda talk: {"input": _messages(talk), "store": False},
        output_field="max_output_tokens",
        text_of=_response_text,
        delta_of=_response_delta,
        usage_of=_response_usage,
    ),
    Api(
        name="message",
        path="/v1/messages",
        body_of=_messages_body,
        output_field="max_tokens",
        text_of=lambda answer: "".join(part["text"] for part in answer["content"]),
        delta_of=_message_delta,
        usage_of=_message_usage,
    ),
)


class Asker(Struct, frozen=True, kw_only=True):
    """Asks one model greedily through one API."""

    http: aiohttp.ClientSession
    api: Api
    model: str
    output_tokens: int
    is_streamed: bool

    async def ask(self, url: str, talk: Talk) -> Told:
        """Ask whoever listens at ``url``, router or engine."""
        body = {
            "model": self.model,
            "temperature": 0,
            self.api.output_field: self.output_tokens,
            "stream": self.is_streamed,
            **self.api.body_of(talk),
        }
        if self.is_streamed and self.api.usage_of is _chat_usage:
            body["stream_options"] = {"include_usage": True}
        async with self.http.post(f"{url}{self.api.path}", json=body) as answer:
            data = await answer.text()
            assert answer.status == 200, data
            return self._told(data, answer.headers)

    def _told(self, data: str, headers: Mapping[str, str]) -> Told:
        if self.is_streamed:
            lines = [line[5:].strip() for line in data.split("\n") if line.startswith("data:")]
            events = [json.loads(line) for line in lines if line != "[DONE]"]
            text = "".join(map(self.api.delta_of, events))
            usages = [usage for usage in map(self.api.usage_of, events) if usage is not None]
        else:
            answer = json.loads(data)
            text = self.api.text_of(answer)
            usages = [usage for usage in [self.api.usage_of(answer)] if usage is not None]
        assert usages, data
        prompt_tokens, cached_tokens = usages[-1]
        return Told(
            text=text, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, headers=headers
        )
