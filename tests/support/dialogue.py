"""Conversations that grow, branch and change their surroundings, from a seed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from support.text import PARTS

if TYPE_CHECKING:
    from random import Random

Message = dict[str, Any]

TOOLS: Final = [
    {
        "type": "function",
        "function": {"name": f"tool{index}", "description": "Ü", "parameters": {"type": "object"}},
    }
    for index in range(2)
]
VARIANTS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"tools": TOOLS},
    {"tools": TOOLS[:1]},
    {"add_generation_prompt": False},
    {"add_special_tokens": True},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"model": "other"},
)
_FLOWS: Final = ("uauauauauaua", "uctctctctctcta", "ua", "uauctctua", "aauucta")
_TURNS: Final = ("ua", "ua", "uctctct", "ct", "ct", "a", "t", "u", "s", "au")
_ROLES: Final = {"u": "user", "s": "system", "t": "tool", "a": "assistant", "c": "assistant"}
_TEXTS: Final = ("", "x", "Some more words.", "\n a ", "One more line, a longer one.\n" * 30)


def text_of(random: Random) -> str:
    """Return a short text of parts that interact, or a plain one."""
    if random.random() < 0.5:
        return random.choice(_TEXTS)
    return "".join(random.choices(PARTS, k=random.randrange(8)))


def messages_of(random: Random, roles: str, reasoning_share: float) -> list[Message]:
    made = []
    for index, role in enumerate(roles):
        message: Message = {"role": _ROLES[role], "content": text_of(random)}
        if role in "ac" and random.random() < reasoning_share:
            message["reasoning_content"] = text_of(random)
        if role in "ac" and random.random() < reasoning_share / 4:
            message["content"] = " <think>\nhm\n</think>\n\nyes"
        if role == "c":
            function = {"name": "tool0", "arguments": json.dumps({"n": index})}
            message["tool_calls"] = [{"id": str(index), "type": "function", "function": function}]
        if role == "t":
            message["tool_call_id"] = str(index - 1)
        if role == "u" and random.random() < 0.1:
            message["content"] = [{"type": "text", "text": message["content"]}]
        made.append(message)
    return made


def bodies_of(random: Random) -> list[bytes]:
    """Return chat bodies of which most continue the one before, with the same surroundings."""
    share = random.choice((0.0, 0.0, 0.3))
    flow = random.choice(("", "s")) + random.choice(_FLOWS)
    known = [messages_of(random, flow, share)]
    fields = random.choice(VARIANTS)
    made = [written(random, known[0], fields)]
    for _ in range(random.randrange(2, 8)):
        base = random.choice((*[known[-1]] * 5, *known[-3:]))
        kept = random.choice((*[len(base)] * 6, len(base) - 1, 1))
        turn = "".join(random.choices(_TURNS, k=random.randrange(3)))
        known.append(base[:kept] + messages_of(random, turn, share))
        if random.random() < 0.1:
            fields = random.choice(VARIANTS)
        made.append(written(random, known[-1], fields))
    return made


def written(random: Random, messages: list[Message], fields: dict[str, Any]) -> bytes:
    """Return a body as one of several clients writes it."""
    named = {"model": "tiny", "messages": messages or [{"role": "user", "content": "x"}], **fields}
    if random.random() < 0.1:
        return json.dumps(dict(sorted(named.items())), separators=(" ,\n", " : ")).encode()
    return json.dumps(named, ensure_ascii=False).encode()
