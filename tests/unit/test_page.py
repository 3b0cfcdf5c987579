"""The files of the operators' page: small, self-contained, as vendored, and served correctly."""

from __future__ import annotations

import hashlib
import re
from types import SimpleNamespace
from typing import Any

import pytest

from router.page import FOLDER, SECURITY, TYPES, Page, is_known

MOST_BYTES = 300_000
OURS = sorted(path for path in FOLDER.glob("*") if path.is_file())
README = (FOLDER / "vendor" / "README.md").read_text(encoding="utf-8")
ROUTES = Page().routes()


def request(**headers: str) -> Any:
    received = [
        (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
    ]
    return SimpleNamespace(headers=SimpleNamespace(received=received))


async def answer(path: str, **headers: str) -> tuple[int, str, bytes]:
    """Return status, header lines and body."""
    got: Any = await ROUTES[path]["GET"](request(**headers))
    return got.status, got.lines.decode(), got.body


def test_all_of_it_is_small() -> None:
    sizes = [path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()]
    assert 0 < sum(sizes) < MOST_BYTES


@pytest.mark.parametrize("name", ["uPlot.iife.min.js", "uPlot.min.css", "LICENSE"])
def test_what_is_vendored_is_what_the_table_says(name: str) -> None:
    digest = hashlib.sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest()
    (line,) = [line for line in README.splitlines() if line.startswith(f"| `{name}`")]
    assert digest in line


def test_every_vendored_file_is_in_the_table() -> None:
    names = {path.name for path in (FOLDER / "vendor").iterdir()} - {"README.md"}
    assert names == set(re.findall(r"^\| `([^`]+)`", README, re.MULTILINE))


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_nothing_is_loaded_from_elsewhere_and_no_text_becomes_markup(path: Any) -> None:
    """Strings from the network are set as text: nothing here can make markup of them."""
    text = path.read_text(encoding="utf-8")
    foreign = set(re.findall(r"https?://[^\s\"'`)<]+", text))
    assert foreign <= {"http://www.w3.org/2000/svg", "http://HOST:PORT", "http://HOST:PORT,"}
    for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert danger not in text
    assert not re.search(r"\bFunction\(|setTimeout\(\s*[\"'`]", text)


def test_the_start_page_has_no_script_or_style_of_its_own() -> None:
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", html))
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", html)


def test_the_policy_of_the_page_allows_this_origin_only() -> None:
    policy = SECURITY["Content-Security-Policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert "*" not in policy


@pytest.mark.parametrize("path", sorted(set(ROUTES) - {"/"}))
async def test_a_file_has_its_type_its_tag_and_the_security_headers(path: str) -> None:
    status, lines, body = await answer(path)
    suffix = "." + path.rpartition(".")[2] if "." in path else ".html"
    assert status == 200
    assert body
    for line in (f"Content-Type: {TYPES[suffix]}", "Cache-Control: no-cache"):
        assert line in lines
    for name, value in SECURITY.items():
        assert f"{name}: {value}\r\n" in lines
    (tag,) = re.findall(r"ETag: (\"[0-9a-f]{32}\")", lines)
    assert (await answer(path, if_none_match=tag))[::2] == (304, b"")
    assert (await answer(path, if_none_match='"other"'))[0] == 200


async def test_an_answer_without_a_body_tells_no_length_that_is_none() -> None:
    got: Any = await ROUTES["/dashboard"]["GET"](request(if_none_match="*"))
    sent = got.encode("GET", b"now", is_http10=False, keep_alive=True)
    assert sent.startswith(b"HTTP/1.1 304 ")
    assert b"content-length" not in sent.lower()
    assert sent.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("header", "known"),
    [('"a"', True), ('W/"a"', True), ('"b", "a"', True), ("*", True), ('"b"', False), ("a", False)],
)
def test_tags_are_compared_as_the_standard_says(header: str, *, known: bool) -> None:
    assert is_known(header, '"a"') is known


def test_only_what_a_browser_loads_is_served() -> None:
    assert "/dashboard/vendor/README.md" not in ROUTES
    assert all(set(methods) == {"GET", "HEAD"} for methods in ROUTES.values())


async def test_the_root_leads_to_the_page() -> None:
    status, lines, _ = await answer("/")
    assert status == 307
    assert "Location: ./dashboard\r\n" in lines
