"""docs/doctor.md says of every finding what the command says of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from warmroute.doctor_case import Code
from warmroute.doctor_text import MEANING, found

ROOT = Path(__file__).resolve().parents[2]


def test_every_finding_is_explained_in_the_same_words_and_order() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    assert [name for name, _, _ in rows] == sorted(code.value for code in Code)
    for name, meaning, fix in rows:
        first = MEANING[Code(name)].removesuffix(".").partition(":")[0]
        assert meaning.replace("`", "").startswith(first.replace("`", "")), name
        assert fix


def test_a_finding_has_the_meaning_of_its_code() -> None:
    finding = found(Code.EVENTS_OFF, "r1", seen="nothing", fix="events")
    assert finding.meaning == MEANING[Code.EVENTS_OFF]
    assert set(MEANING) == set(Code)


@pytest.mark.parametrize("seen", ["Connection refused.", "Connection refused.."])
def test_what_others_said_gets_one_full_stop(seen: str) -> None:
    assert found(Code.ROUTER_UNREACHABLE, None, seen=seen, fix="").seen == "Connection refused."
