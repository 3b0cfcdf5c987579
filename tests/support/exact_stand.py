"""Chats of ``exact_case`` through a router: what it predicted, and what the engine found cached."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from prompt.model import Unroutable
from prompt.reader import CHAT_PATH
from support.exact_case import CASES, Body
from support.exact_template import STYLED
from support.vllm import MODEL, PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from support.vllm_stand import Stand

OUTPUT_TOKENS: Final = 2
_SHORT: Final = "What is 2 + 2"
_REPEATS: Final = 24
"""Makes a question some four pages long."""


class Heard(Struct, frozen=True, kw_only=True):
    """One answer: its status, what was predicted and what was reported, and the router's record."""

    status: int
    predicted_tokens: int
    cached_tokens: int
    prompt_tokens: int
    record: Mapping[str, Any]

    def __str__(self) -> str:
        [*_, last] = self.record["attempts"]
        return (
            f"{self.status}, predicted {self.predicted_tokens} of {self.record['prompt_tokens']}, "
            f"found {self.cached_tokens} of {self.prompt_tokens}, {self.record['unroutable']}, "
            f"{last['decision']}"
        )

    @property
    def is_right(self) -> bool:
        """Whether prediction and report are the same pages, of a prompt that was read as it is.

        Of a prompt of whole pages that are all there, a router leaves one token, an engine a page.
        """
        is_known = self.record["is_exact"] and self.record["unroutable"] is None
        is_counted = self.record["prompt_tokens"] == self.prompt_tokens
        predicted_pages = self.predicted_tokens // PAGE_TOKENS
        return is_known and is_counted and predicted_pages == self.cached_tokens // PAGE_TOKENS

    @property
    def is_refused(self) -> bool:
        """Whether the engine refused the prompt, and the router had seen that it has none."""
        return self.status == 400 and self.record["unroutable"] == Unroutable.TEMPLATE


def write_styled(folder: Path) -> Path:
    """Give the model in ``folder`` the template whose style a request chooses; returns it."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "chat_template": STYLED}))
    return folder


def body_of(case: str, style: str, number: int) -> Body:
    """Return a long chat of its own with the text of ``style``."""
    fields = json.loads(
        json.dumps(CASES[case]).replace(_SHORT, f"{number} " + f"{_SHORT} " * _REPEATS)
    )
    kwargs = {**fields.pop("chat_template_kwargs", {}), "style": style}
    return {
        "model": MODEL,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "chat_template_kwargs": kwargs,
        **fields,
    }


async def heard(stand: Stand, body: Body) -> Heard:
    """Ask the router once it knows what the engines told."""
    await stand.informed()
    http = stand.fleet.http
    async with http.post(f"{stand.fleet.router.url}{CHAT_PATH}", json=body) as answer:
        told = await answer.json()
        headers = answer.headers
    usage = told.get("usage") or {}
    return Heard(
        status=answer.status,
        predicted_tokens=int(headers["x-warmroute-predicted-cached-tokens"]),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        prompt_tokens=usage.get("prompt_tokens", 0),
        record=await stand.fleet.decision(headers["x-warmroute-request-id"]),
    )


async def wrong_cases(stand: Stand, asked: Iterable[tuple[str, str]]) -> tuple[list[str], int]:
    """Ask each (case, style) twice; return what was wrong, and how many were refused.

    The second time all full pages before the last token must be there.
    """
    wrong = []
    refused = 0
    for number, (case, style) in enumerate(asked):
        body = body_of(case, style, number)
        first, second = await heard(stand, body), await heard(stand, body)
        if first.is_refused and second.is_refused:
            refused += 1
            continue
        expected = max(0, second.prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
        if not (first.is_right and second.is_right and second.cached_tokens == expected):
            wrong.append(f"{case}, {style}, {expected} expected:\n  {first}\n  {second}")
    return wrong, refused
