"""Which changes to a conversation alter the text of its earlier messages: tried, per template.

A template is rendered on generated conversations that share their first messages and differ after
them, in full and by its tail only (``prompt.history``). The kind that saves most and never gives
another text is the template's.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Final

from prompt.history import (
    Rendered,
    Stability,
    first_reasoning_of,
    last_user_of,
    tail_of,
)
from prompt.message import normalised_messages, normalised_tools
from prompt.model import UnroutablePromptError
from prompt.run import TokenRun
from prompt.segment import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prompt.template import ChatTemplate, Parts

Message = dict[str, Any]

MIN_TRIALS: Final = 12
"""Fewer successful comparisons prove nothing."""
_SHAPES: Final = (
    "uauauaua",
    "uctctctctua",
    "uacttcttuacta",
    "uauctuctucta",
    "uuaaucta",
    "cctacttta",
)
_ENDS: Final = ("", "u", "a", "ct", "ua", "au", "t", "ctau", "ctcta", "uauau")
_ALTERNATING: Final = (("u", "uaua"), ("", "uau"), ("a", "auaua"), ("uau", "u"))
_TEXTS: Final = ("Plain words.", " spaced \n", "\n\nlines\n", "x", '{"a": 1}', "A. B\tC")
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
_OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"add_generation_prompt": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"enable_thinking": True}},
)
_THINKING: Final = "enable_thinking"
_OTHER_VARIABLES: Final = ("documents", "reasoning_effort")
"""Options that templates see as variables."""


def is_tried(template: ChatTemplate, options: Mapping[str, Any]) -> bool:
    """Return whether the trials tell what ``template`` does under ``options``.

    A client may set any variable, and a template may do anything with one: keep the reasoning of
    all turns, or show the tools last. Only those that the template does not read, and whether it
    may think, are known.
    """
    given = dict(options.get("chat_template_kwargs") or {})
    given |= {name: options[name] for name in _OTHER_VARIABLES if options.get(name) is not None}
    if not given:
        return True
    read = given.keys() & template.variables
    return read <= {_THINKING} and isinstance(given.get(_THINKING, True), bool)


def stability_of(template: ChatTemplate) -> Stability:
    """Return the most saving kind that holds on every generated conversation."""
    for stability in (Stability.STABLE, Stability.EPISODIC):
        trials = 0
        for known, grown, shared, tools, options in _cases():
            outcome = _is_equal(template, stability, (known, grown, shared), tools, options)
            if outcome is False:
                break
            trials += outcome is True
        else:
            return stability if trials >= MIN_TRIALS else Stability.UNSTABLE
    return Stability.UNSTABLE


def _cases() -> Iterator[
    tuple[list[Message], list[Message], int, list[Message] | None, dict[str, Any]]
]:
    for index, (shape, has_system, has_reasoning) in enumerate(
        product(_SHAPES, (False, True), (False, True))
    ):
        prefix = "s" * has_system + shape
        tools = [_TOOL] if index % 3 else None
        options = _OPTIONS[index % len(_OPTIONS)]
        pairs = (*zip(_ENDS, (*_ENDS[3:], *_ENDS[:3]), strict=True), *_ALTERNATING)
        for cut, (old, new) in product((index % 4, (index + 1) % 4), pairs):
            shared = len(prefix) - cut
            known = _conversation(prefix[:shared] + old, 0, has_reasoning=has_reasoning)
            grown = _conversation(prefix[:shared] + new, shared, has_reasoning=has_reasoning)
            yield known, known[:shared] + grown[shared:], shared, tools, options


def _conversation(roles: str, salt: int, *, has_reasoning: bool) -> list[Message]:
    return [
        _message(role, index, salt, has_reasoning=has_reasoning and (index + salt) % 3 != 0)
        for index, role in enumerate(roles)
    ]


def _message(role: str, index: int, salt: int, *, has_reasoning: bool) -> Message:
    text = (
        f"{_TEXTS[(index + salt) % len(_TEXTS)]}{index}{_TEXTS[(index * 5 + salt) % len(_TEXTS)]}"
    )
    if role == "s":
        return {"role": "system", "content": text}
    if role == "u":
        return {"role": "user", "content": text}
    if role == "t":
        return {"role": "tool", "content": text, "tool_call_id": f"call{index}"}
    message: Message = {"role": "assistant", "content": text}
    if has_reasoning:
        message["reasoning"] = f"thought {index}"
    if role == "c":
        message["content"] = "" if index % 2 else text
        call = {"name": "look", "arguments": f'{{"at": "{index}"}}'}
        message["tool_calls"] = [{"id": f"call{index}", "type": "function", "function": call}]
    return message


def _is_equal(
    template: ChatTemplate,
    stability: Stability,
    case: tuple[list[Message], list[Message], int],
    tools: list[Message] | None,
    options: dict[str, Any],
) -> bool | None:
    """Return whether the tail gives the text of the whole; None where neither would be used."""
    known, grown, shared = case

    def parts_of(messages: list[Message]) -> Parts | None:
        conversation = normalised_messages(messages, is_structured=template.is_structured)
        return template.render_parts(conversation, normalised_tools(tools), options=options)

    last_user = last_user_of(known, None)
    first_reasoning = first_reasoning_of(known, range(len(known)))
    try:
        before, after = parts_of(known), parts_of(grown)
        if before is None or after is None:
            return None
        rendered = Rendered(
            count=shared,
            checkpoints=[Checkpoint(TokenRun(), 0)] * shared,
            after_last=None,
            last_part="",
            prologue=before.prologue,
            last_user=last_user,
            first_reasoning=first_reasoning,
        )
        tail = tail_of(grown, rendered, stability)
        if tail is None:
            return None
        short = parts_of([grown[index] for index in tail.picked])
    except UnroutablePromptError:
        return None
    if short is None or short.prologue != before.prologue:
        return None
    return (
        after.prologue == before.prologue
        and before.hidden == after.hidden == short.hidden
        and before.messages[: tail.first - before.hidden]
        == after.messages[: tail.first - before.hidden]
        and short.messages[tail.context - short.hidden :]
        == after.messages[tail.first - after.hidden :]
        and short.epilogue == after.epilogue
    )
