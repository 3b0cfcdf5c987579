"""One system prompt that all requests share: its load spreads, and its cache is used."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from support.conversation import Answered, ask, at_once, sdk
from support.fleet import MODEL, FleetPlan, LocalFleet
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WORKERS = 8
SYSTEM_PROMPT = " ".join(f"Rule {number} for the lazy dog: cite your sources." for number in range(138))


def question(number: int) -> list[tuple[str, str]]:
    """Return messages that share 3,000 tokens and differ after them."""
    return [("system", SYSTEM_PROMPT), ("user", f"{number} is my number. " + "fox jumps " * 20)]

