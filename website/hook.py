"""What the site has beside docs/: README.md, CHANGELOG.md, and the files that pages link to.

Links between files are written for code hosts; here they are made to lead to the site's own copies.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_ROOT: Final = Path(__file__).resolve().parents[1]
_PAGES: Final = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
_LINK: Final = re.compile(r"(?<!!)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^()\s:#]+)(#[\w-]+)?\)")
_COPIES: Final = "files"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that are not below docs/."""
    for source, page in _PAGES.items():
        text = (_ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for name in sorted(_linked()):
        path = str(_ROOT / name)
        files.append(File.generated(config, f"{_COPIES}/{name}.txt", abs_src_path=path))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return a page whose links lead to what the site has."""
    folder = "" if page.file.src_path in _PAGES.values() else "docs"

    def led(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        name = posixpath.normpath(posixpath.join(folder, target))
        if name in _PAGES:
            return f"[{text}]({_PAGES[name]}{anchor})"
        if name.startswith("docs/"):
            return f"[{text}]({name.removeprefix('docs/')}{anchor})"
        return f"[{text}]({_COPIES}/{name}.txt)" if (_ROOT / name).is_file() else text

    return _LINK.sub(led, markdown)


def _linked() -> set[str]:
    """Return the files beside docs/ that pages link to."""
    sources = [*(_ROOT / "docs").glob("*.md"), *(_ROOT / name for name in _PAGES)]
    found = set()
    for source in sources:
        folder = source.parent.relative_to(_ROOT).as_posix()
        for _text, target, _anchor in _LINK.findall(source.read_text(encoding="utf-8")):
            name = posixpath.normpath(posixpath.join(folder, target))
            is_own = name in _PAGES or name.startswith("docs/")
            if not is_own and (_ROOT / name).is_file():
                found.add(name)
    return found
