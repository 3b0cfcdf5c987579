"""Building the compiled helpers, and doing without them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from prompt import native_word
from prompt.native_word import word_library
from state import native
from state.compiled import library_path
from support.native import needs_compiler
from warmroute.native import main


@pytest.fixture(name="sources")
def copied_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    sources = [
        Path(shutil.copy(source, tmp_path)) for source in (native.SOURCE, native_word.SOURCE)
    ]
    monkeypatch.setattr("warmroute.native._SOURCES", sources)
    monkeypatch.setattr(native_word, "SOURCE", sources[1])
    word_library.cache_clear()
    return sources


@needs_compiler
def test_both_helpers_are_built_beside_their_sources_and_taken(
    sources: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert word_library() is None
    word_library.cache_clear()
    assert main() == 0
    built = [library_path(source) for source in sources]
    assert capsys.readouterr().out.split() == [str(path) for path in built]
    assert native.load(built[0]) is not None
    assert word_library() is not None
    word_library.cache_clear()
    sources[1].write_text(sources[1].read_text() + "\n")
    assert word_library() is None, "one of another source is never taken"
    word_library.cache_clear()


def test_without_a_compiler_it_says_so_and_leaves_nothing(
    sources: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for compiler in ("no-such-compiler", "false"):
        monkeypatch.setenv("CC", compiler)
        assert main() == 1
        assert "block_table: not built, routers go on without it" in capsys.readouterr().err
    assert sorted(path.suffix for path in sources[0].parent.iterdir()) == [".c", ".c"]
    assert word_library() is None
    word_library.cache_clear()
