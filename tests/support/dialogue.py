"""Conversations that grow, branch and change their surroundings, for hypothesis."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from support.text import texts

if TYPE_CHECKING:
    from collections.abc import Callable

Message = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "function": {"name": f"tool{index}", "description": "Ü", "parameters": {"type": "object"}},
    }
    for index in range(2)
]
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"tools": TOOLS},
    {"tools": TOOLS[:1]},
    {"add_generation_prompt": False},
    {"add_special_tokens": True},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"model": "other"},
)
SEPARATORS = ((",", ":"), (", ", ": "), (" ,\n", " : "))
_TURNS = ("ua", "ua", "uctctct", "ct", "a", "t", "u", "s")


@st.composite
def messages(draw: st.DrawFn, roles: str) -> list[Message]:
    content = st.one_of(
        texts(6), st.sampled_from(("", "x", " <think>\nhm\n</think>\n\nyes", "\n a "))
    )
    made = []
    for index, role in enumerate(roles):
        message: Message = {"content": draw(content)}
        if role in "ac":
            message = {"role": "assistant"} | message
            if draw(st.integers(0, 7)) == 0:
                message["reasoning_content"] = draw(content)
        else:
            message["role"] = {"u": "user", "s": "system", "t": "tool"}[role]
        if role == "c":
            function = {"name": "tool0", "arguments": json.dumps({"n": index})}
            message["tool_calls"] = [{"id": str(index), "type": "function", "function": function}]
        if role == "t":
            message["tool_call_id"] = str(index - 1)
        if role == "u" and draw(st.integers(0, 5)) == 0:
            message["content"] = [{"type": "text", "text": message["content"]}]
        made.append(message)
    return made


@st.composite
def bodies(draw: st.DrawFn) -> list[bytes]:
    """Return chat bodies of which most continue one before them."""
    start = draw(st.sampled_from(("s", "", "su")))
    flow = draw(st.sampled_from(("uauauauauaua", "uactctctctctcta", "ua")))
    known = [draw(messages(start + flow[: draw(st.sampled_from((1, 5, 9, 20)))]))]
    made = []
    for _ in range(draw(st.integers(2, 7))):
        base = draw(st.sampled_from((known[-1], known[-1], *known[-3:])))
        kept = draw(st.sampled_from((*[len(base)] * 6, len(base) - 1, 1)))
        turn = draw(st.lists(st.sampled_from(_TURNS), max_size=2).map("".join))
        conversation = base[:kept] + draw(messages(turn))
        if not conversation:
            continue
        known.append(conversation)
        made.append(draw(written(conversation)))
    return made


@st.composite
def written(draw: st.DrawFn, conversation: list[Message]) -> bytes:
    variant = draw(st.sampled_from(VARIANTS)) if draw(st.integers(0, 4)) == 0 else VARIANTS[1]
    fields = {"model": "tiny", "messages": conversation, **variant}
    order = draw(st.sampled_from((0, 0, 0, 0, 1)))
    names = sorted(fields) if order else list(fields)
    write: Callable[..., str] = json.dumps
    separators = draw(st.sampled_from(SEPARATORS[: 1 + 2 * order]))
    shown = {name: fields[name] for name in names}
    return write(shown, separators=separators, ensure_ascii=bool(order)).encode()
