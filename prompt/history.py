"""Conversations that grow: render and tokenize only what is new, where that is proved exact.

The text of a conversation is a prologue, one part per message and an epilogue. A template is
*stable* when a message's part depends on the messages before it and the one after it only, and on
those before in a way that the first exchange and the last few messages show (indices, order of
roles, kinds of neighbours). Then the parts of new messages are the same in a shortened conversation
that leaves out the middle, and the tokens of everything before the last known message stay.

One dependence on what comes later is common: reasoning is dropped before the last user message.
Templates that are stable but for that are *episodic*: parts stay while the last user message stays
the same, or as long as no message carries reasoning.

Which kind a template is, is tried at load on generated conversations (``prompt.stability``). Texts
that a template looks for in a message (``</think>``) make its conversation be rendered in full, and
so does a prologue that changed (a new date).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, structs

from prompt.segment import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from prompt.template import Parts
    from prompt.turn import Variant

MAX_VARIANTS: Final = 4
"""Kept per conversation: documents or tools may change with every turn."""
_HEAD_MESSAGES: Final = 4
"""The first user message is looked for among so many."""
_CONTEXT_MESSAGES: Final = range(2, 14)
_REASONING: Final = ("reasoning", "reasoning_content")


class Stability(enum.Enum):
    """Which changes alter the text of earlier messages."""

    STABLE = "none"
    EPISODIC = "reasoning before a new user message"
    UNSTABLE = "any"


class Rendered(Struct, frozen=True, kw_only=True, gc=False):
    """What is kept of a rendered conversation of ``count`` messages.

    ``checkpoints[i]`` stands for the text before message i, ``after_last`` for the text up to the
    end of ``last_part``, the text of the last message. ``last_user`` is the index of the last
    user message, ``first_reasoning`` of the first message with reasoning, None without one.
    """

    count: int
    checkpoints: list[Checkpoint | None]
    after_last: Checkpoint | None
    last_part: str
    prologue: str
    last_user: int | None
    first_reasoning: int | None

    def shortened(self, count: int) -> Rendered:
        """Return what stays true of a conversation that shares the first ``count`` messages."""
        if count >= self.count:
            return self
        checkpoints = self.checkpoints[:count]
        return structs.replace(self, count=count, checkpoints=checkpoints, after_last=None)


class Conversation:
    """Decoded messages that requests share, and what was rendered of them, by variant.

    A variant is all besides messages that decides the text: model, tools and options. Messages are
    appended by one thread; a rendering is replaced as a whole.
    """

    __slots__ = ("messages", "rendered")

    def __init__(self, messages: list[dict[str, Any]] | None = None) -> None:
        self.messages = messages or []
        self.rendered: dict[Variant, Rendered] = {}

    def keep(self, variant: Variant, rendered: Rendered) -> None:
        """Remember what was rendered; the oldest of many variants is forgotten."""
        self.rendered.pop(variant, None)
        if len(self.rendered) >= MAX_VARIANTS:
            self.rendered.pop(next(iter(tuple(self.rendered))), None)
        self.rendered[variant] = rendered

    def continued(self, count: int, fresh: list[dict[str, Any]]) -> Conversation:
        """Return the conversation of the first ``count`` messages and ``fresh`` ones."""
        if len(self.messages) == count:
            self.messages += fresh
            return self
        branch = Conversation(self.messages[:count])
        branch.messages += fresh
        branch.rendered = {
            variant: rendered.shortened(count) for variant, rendered in tuple(self.rendered.items())
        }
        return branch


class Tail(Struct, frozen=True, kw_only=True, gc=False):
    """How to render the end of a conversation, which begins at message ``first``.

    Of the ``picked`` messages the first ``context`` are there for the others only.
    """

    picked: list[int]
    context: int
    first: int
    checkpoint: Checkpoint


def tail_of(
    messages: Sequence[Mapping[str, Any]], rendered: Rendered, stability: Stability
) -> Tail | None:
    """Return what has to be rendered of ``messages``, which begin like the rendered ones."""
    if stability is Stability.UNSTABLE:
        return None
    first = min(rendered.count, len(messages)) - 1
    checkpoint = rendered.checkpoints[first] if 0 <= first < len(rendered.checkpoints) else None
    if checkpoint is None or not _keeps_history(messages, rendered, stability, first):
        return None
    picked = picked_context(messages, first)
    if picked is None:
        return None
    return Tail(
        picked=[*picked, *range(first, len(messages))],
        context=len(picked),
        first=first,
        checkpoint=checkpoint,
    )


def picked_context(messages: Sequence[Mapping[str, Any]], first: int) -> list[int] | None:
    """Return the messages before ``first`` that stand for all of them; None where all are needed.

    An even number is left out, which keeps turns in their order; the last kept ones do not begin
    with the answer of a tool, whose call would be missing.
    """
    head = next(
        (
            index + 1
            for index, message in enumerate(messages[: min(_HEAD_MESSAGES, first)])
            if message["role"] == "user"
        ),
        None,
    )
    if head is None:
        return None
    for context in _CONTEXT_MESSAGES:
        begin = first - context
        if begin <= head:
            return None
        if (begin - head) % 2 == 0 and messages[begin]["role"] != "tool":
            return [*range(head), *range(begin, first)]
    return None


def _keeps_history(
    messages: Sequence[Mapping[str, Any]], rendered: Rendered, stability: Stability, first: int
) -> bool:
    if stability is Stability.STABLE:
        return True
    if rendered.first_reasoning is None or rendered.first_reasoning >= first:
        return True
    return last_user_of(messages, rendered) == rendered.last_user


def last_user_of(messages: Sequence[Mapping[str, Any]], known: Rendered | None) -> int | None:
    """Return the index of the last user message; ``known`` is of a conversation that begins so."""
    low = 0 if known is None else known.count
    for index in range(len(messages) - 1, low - 1, -1):
        if messages[index]["role"] == "user":
            return index
    if known is None:
        return None
    if known.last_user is None or known.last_user < known.count:
        return known.last_user
    return last_user_of(messages[:low], None)


def first_reasoning_of(messages: Sequence[Mapping[str, Any]], indices: Iterable[int]) -> int | None:
    """Return the first of ``indices`` whose message carries reasoning."""
    for index in indices:
        if any(messages[index].get(name) is not None for name in _REASONING):
            return index
    return None


def points_of(parts: Parts, messages: int, first: int) -> tuple[str, list[int]]:
    """Return the text from message ``first`` on, and where in it each message from there begins.

    The last point is the end of the last message. Messages in the prologue begin nowhere.
    """
    skipped = first - (messages - len(parts.messages))
    texts = parts.messages[skipped:]
    points, position = [], 0
    for text in texts:
        points.append(position)
        position += len(text)
    points.append(position)
    return "".join((*texts, parts.epilogue)), points
