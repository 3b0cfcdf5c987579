"""docs/config.md and docs/cli.md are those of the code. If not: make docs-reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import inspect

from router.config import Config
from support import cli_page, config_page
from warmroute.cli import COMMANDS

if TYPE_CHECKING:
    import pytest

_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLE = _ROOT / "examples" / "warmroute.yaml"


def test_the_page_of_settings_is_that_of_their_types() -> None:
    """If this fails: make docs-reference."""
    assert (_ROOT / "docs" / "config.md").read_text(encoding="utf-8") == config_page.page()


def test_the_page_of_commands_is_that_of_their_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails: make docs-reference. The width of a terminal does not matter."""
    monkeypatch.setenv("COLUMNS", "40")
    assert (_ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == cli_page.page()


def test_every_key_has_a_line_with_its_default_and_range() -> None:
    page = config_page.page()
    for field in inspect.type_info(Config).fields:  # type: ignore[attr-defined]
        assert f"\n| `{field.encode_name}` | " in page
    assert "\n| `fall` | integer | `3` | ≥ 1 |" in page
    assert '\n| `lookup` | `direct`, `mirror` | `"mirror"` |' in page
    assert "\n| `seed` | integer, or null | `null` | ≥ 0, ≤ 9,223,372,036,854,775,807 |" in page
    assert "\n| `url` | text | required |" in page


def test_a_key_is_told_with_the_remark_that_the_annotated_file_has() -> None:
    said = config_page.remarks(_EXAMPLE)
    assert said["policy.prefill.token_ms"] == "per token that is computed"
    assert said["policy.w_copy"].endswith("would save, where the cache is full")
    assert said["models"].startswith("Exact prefixes for a model")
    assert "fall" not in said


def test_a_section_that_occurs_twice_is_told_once() -> None:
    page = config_page.page()
    assert "\n## `admin_tls`\n\nAs [`listen_tls`](#listen_tls).\n" in page
    assert page.count("\n| `client_ca` |") == 1


def test_every_command_has_its_flags_with_their_defaults() -> None:
    page = cli_page.page()
    assert all(f"\n## warmroute {name}\n" in page for name in COMMANDS)
    assert "\n### warmroute kv audit\n" in page
    assert "| `--listen ADDRESS` | for clients (default: 127.0.0.1:8080) |" in page
    assert (
        "| `--engine ENGINE` | the engine's address, http://host:port or https:// (required) |"
        in page
    )


def test_types_are_told_in_words() -> None:
    class Inner(msgspec.Struct):
        """A section."""

    def said(kind: object) -> str:
        return config_page.words(inspect.type_info(kind))

    assert said(bool) == "true or false"
    assert said(int | str | None) == "integer or text, or null"
    assert said(tuple[str, ...]) == "list of: text"
    assert said(tuple[Inner, ...]) == "list of sections"
    assert said(dict[str, float]) == "mapping: text to number"
    assert said(Inner | None) == "section, or null"
