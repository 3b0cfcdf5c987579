"""The page of a report: it stands alone, shows foreign text as text, and can be read aloud."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from replay.report import report
from replay.report_page import page
from support.replayed import outcome, random_run, replayed

if TYPE_CHECKING:
    from collections.abc import Callable

VOID = {"meta", "link", "br", "img", "input", "hr"}
HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{ 7 * 7 }}&amp;"


class Reader(HTMLParser):
    """Reads a page to elements and text; an element that is not closed in order is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def every(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.elements if found == tag]


def _hostile_run(**changes: Any) -> str:
    run = replayed(
        *(
            outcome(
                n,
                tenant=HOSTILE,
                replica=HOSTILE,
                reason=HOSTILE,
                prefix=HOSTILE,
                session=HOSTILE,
                error=HOSTILE if n == 3 else None,
                cached_tokens=50,
            )
            for n in range(30)
        ),
        **({"trace": HOSTILE, "policy": HOSTILE, "replicas": (HOSTILE, "b")} | changes),
    )
    return page(report({HOSTILE: run, "other": run}, bounds={f"{HOSTILE} bound": run}))


PAGES: dict[str, Callable[[], str]] = {
    "one": lambda: page(report({"ours": random_run(500)}, bounds={"pooled": random_run(500, 1)})),
    "several": lambda: page(report({f"rule {n}": random_run(300, n) for n in range(10)})),
    "empty": lambda: page(report({"ours": replayed()})),
    "unknown": lambda: page(
        report({"ours": replayed(outcome(cached_tokens=None, ttft_s=None), replicas=())})
    ),
    "hostile": _hostile_run,
}


@pytest.fixture(params=sorted(PAGES), scope="module")
def text(request: pytest.FixtureRequest) -> str:
    return PAGES[request.param]()


def test_a_page_stands_alone(text: str) -> None:
    reader = Reader(text)
    assert {tag for tag, _ in reader.elements}.isdisjoint(
        {"script", "link", "img", "iframe", "object", "embed", "base", "form", "image", "use"}
    )
    names = {name for _, attributes in reader.elements for name in attributes}
    assert not {name for name in names if name.startswith("on")}
    assert names.isdisjoint({"src", "href", "xlink:href", "srcset", "action"})
    assert "http:" not in text
    assert "https:" not in text
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_a_page_forbids_itself_to_fetch_anything(text: str) -> None:
    policies = [
        meta["content"]
        for meta in Reader(text).every("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_charts_and_tables_have_names(text: str) -> None:
    reader = Reader(text)
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for svg in reader.every("svg"):
        if svg.get("aria-hidden") != "true":
            assert svg["role"] == "img"
            assert set((svg["aria-labelledby"] or "").split()) <= set(ids)
    assert len(reader.every("caption")) == len(reader.every("table"))
    assert all(cell.get("scope") in {"row", "col"} for cell in reader.every("th"))


def test_a_page_has_both_colour_schemes_and_a_language(text: str) -> None:
    assert Reader(text).every("html") == [{"lang": "en"}]
    assert "prefers-color-scheme: dark" in text


def test_nothing_that_is_unknown_is_written_in_python(text: str) -> None:
    shown = " ".join(Reader(text).text)
    assert not re.search(r"\b(None|nan|inf)\b", shown)


def test_foreign_text_is_shown_as_it_is() -> None:
    shown = "".join(Reader(_hostile_run()).text)
    start = HOSTILE[:60]
    assert f"Replay of {start}" in shown
    assert shown.count(start) > 8
    assert "49" not in [part.strip() for part in Reader(_hostile_run()).text]


def test_warnings_come_first_and_once_where_they_hold_for_all() -> None:
    single = page(report({name: random_run(300, replicas=("a",)) for name in "xy"}))
    assert single.count("A single replica") == 1
    assert single.index("A single replica") < single.index("<figure>")


def test_a_warning_of_one_replay_carries_its_name() -> None:
    runs = {"full": random_run(300, evictions=4), "empty": random_run(300, evictions=0)}
    assert "<li>empty: Nothing was evicted" in page(report(runs))


def test_one_replay_has_its_six_figures_and_several_four_in_common() -> None:
    one = Reader(page(report({"a": random_run(300)})))
    two = Reader(page(report({"a": random_run(300), "b": random_run(300, 1)})))
    assert len(one.every("figure")) == 6
    assert len(two.every("figure")) == 4 + 2 * 6


def test_the_key_figures_are_those_of_the_score() -> None:
    run = replayed(outcome(cached_tokens=25, ttft_s=1.5, duration_s=2.5))
    shown = [part.strip() for part in Reader(page(report({"x": run}))).text]
    for value in ("25.0 %", "1.50 s", "100 ms"):
        assert value in shown


def test_the_largest_tenants_are_in_the_table_and_the_rest_is_counted() -> None:
    text = page(report({"a": random_run(600)}))
    assert "10 more tenants are in the JSON." in text
    assert text.count('<th scope="row">tenant-') == 20


def test_a_trace_without_tenants_has_no_table_of_them() -> None:
    assert "<caption>Tenants</caption>" not in page(report({"a": replayed(outcome())}))
    assert "<caption>Tenants</caption>" in page(
        report({"a": replayed(outcome(0), outcome(1, tenant="acme"))})
    )


def test_the_busiest_replicas_are_drawn_and_the_rest_is_counted() -> None:
    run = replayed(
        *(outcome(n, replica=f"r{n % 30}") for n in range(45)),
        replicas=tuple(f"r{n}" for n in range(30)),
    )
    text = page(report({"a": run}))
    assert "the 24 busiest of 30" in text
    assert text.count('<rect class="bar"') == 24


def test_times_far_apart_are_drawn_on_a_logarithmic_axis() -> None:
    far = replayed(*(outcome(n, ttft_s=0.01 if n < 50 else 10.0) for n in range(100)))
    near = replayed(*(outcome(n, ttft_s=1.0 if n < 50 else 10.0) for n in range(100)))
    assert '<span class="unit">logarithmic</span>' in page(report({"a": far}))
    assert '<span class="unit">logarithmic</span>' not in page(report({"a": near}))
