"""Turns of conversations to ids: by their tails where the template's history is stable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prompt.history import (
    Conversation,
    Rendered,
    Stability,
    first_reasoning_of,
    last_user_of,
    points_of,
    tail_of,
)
from prompt.message import normalised_messages, normalised_tools
from prompt.model import PromptTokens, UnroutablePromptError
from prompt.sandbox import PrintedTool
from prompt.stability import is_tried, stability_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prompt.segment import Checkpoint, SegmentCache
    from prompt.template import ChatTemplate, Parts
    from prompt.turn import Variant

Messages = list[dict[str, Any]]


class ChatEncoder:
    """One template with one tokenizer. ``framed``: the cache for prompts with special tokens."""

    def __init__(
        self, template: ChatTemplate, plain: SegmentCache, framed: SegmentCache | None
    ) -> None:
        self._template = template
        self._plain = plain
        self._framed = framed
        self.stability = stability_of(template)

    def tail(
        self, messages: Messages, conversation: Conversation, variant: Variant, *, salt: str = ""
    ) -> PromptTokens | None:
        """Return the ids of ``messages`` by rendering their tail; None where that cannot be."""
        rendered = conversation.rendered.get(variant)
        cache = self._cache(variant)
        tail = None if rendered is None else tail_of(messages, rendered, self.stability)
        if rendered is None or tail is None or cache is None:
            return None
        picked = self._normalised([messages[index] for index in tail.picked])
        if self._is_sensitive(picked[tail.context :]):
            return None
        try:
            parts = self._parts(picked, variant)
        except UnroutablePromptError:
            return None  # the whole conversation may be fine
        if parts is None or parts.prologue != rendered.prologue:
            return None
        first, context, checkpoint = tail.first, tail.context, tail.checkpoint
        after = rendered.after_last
        if after is not None and parts.messages[context - parts.hidden] == rendered.last_part:
            first, context, checkpoint = first + 1, context + 1, after
        text, points = points_of(parts, len(picked), context)
        encoded = cache.resume(checkpoint, text, points, salt=salt)
        checkpoints = [*rendered.checkpoints[:first], *encoded.checkpoints]
        conversation.keep(variant, _rendered(messages, checkpoints, parts, rendered))
        return PromptTokens(run=encoded.tokens, is_exact=True)

    def whole(
        self, messages: Messages, conversation: Conversation, variant: Variant, *, salt: str = ""
    ) -> PromptTokens | None:
        """Return the ids by rendering everything, and remember it; None where it has no parts."""
        conversation.rendered.pop(variant, None)
        cache = self._cache(variant)
        if cache is None or self.stability is Stability.UNSTABLE:
            return None
        if not is_tried(self._template, variant.options):
            return None
        normalised = self._normalised(messages)
        parts = None if self._is_sensitive(normalised) else self._parts(normalised, variant)
        if parts is None:
            return None
        tail, points = points_of(parts, len(messages), parts.hidden)
        start = len(parts.prologue)
        points = [start + point for point in points]
        encoded = cache.encode(parts.prologue + tail, points, salt=salt)
        checkpoints = [*[None] * parts.hidden, *encoded.checkpoints]
        conversation.keep(variant, _rendered(messages, checkpoints, parts, None))
        return PromptTokens(run=encoded.tokens, is_exact=True)

    def _cache(self, variant: Variant) -> SegmentCache | None:
        return self._framed if variant.options.get("add_special_tokens") else self._plain

    def _normalised(self, messages: Messages) -> Messages:
        return normalised_messages(messages, is_structured=self._template.is_structured)

    def _parts(self, normalised: Messages, variant: Variant) -> Parts | None:
        if variant.printed is None and variant.tools is not None:
            tools = normalised_tools(variant.tools) or []
            variant.printed = [PrintedTool(tool) for tool in tools]
        return self._template.render_parts(normalised, variant.printed, options=variant.options)

    def _is_sensitive(self, normalised: Messages) -> bool:
        """Return whether a message holds a text that the template looks for."""
        sought = self._template.sensitive_texts
        return any(
            text in content
            for message in normalised
            for content in _contents_of(message)
            for text in sought
        )


def _contents_of(message: dict[str, Any]) -> list[str]:
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    reasoning = message.get("reasoning")
    return [*texts, reasoning] if isinstance(reasoning, str) else texts


def _rendered(
    messages: Sequence[dict[str, Any]],
    checkpoints: list[Checkpoint | None],
    parts: Parts,
    before: Rendered | None,
) -> Rendered:
    """Return what is to be kept; the last checkpoint is the one after the last message."""
    known = 0 if before is None else before.count
    reasoning = None if before is None else before.first_reasoning
    if reasoning is None:
        reasoning = first_reasoning_of(messages, range(known, len(messages)))
    return Rendered(
        count=len(messages),
        checkpoints=checkpoints[:-1],
        after_last=checkpoints[-1],
        last_part=parts.messages[-1] if parts.messages else "",
        prologue=parts.prologue,
        last_user=last_user_of(messages, before),
        first_reasoning=reasoning,
    )
