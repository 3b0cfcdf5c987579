"""The operators' page in a real browser, in front of real routers (make test-page).

Pictures go to docs/images/, as far as they are shown there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from support.browser import Tab, chromium, tab
from support.fleet import MODEL, FleetPlan, LocalFleet, until
from support.page_fleet import Engines, load
from support.tenancy import key_of, tenant, write_secret
from support.tokenizer import write_tokenizer
from support.valkey import ValkeyProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

ROOT: Final = Path(__file__).parents[2]
IMAGES: Final = ROOT / "docs" / "images"
PICTURE_BYTES: Final = 150_000
AXE: Final = Path(os.environ.get("WARMROUTE_AXE", ROOT / "build/page/axe-core-4.14.1.tgz"))
AXE_SHA256: Final = "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745"
WIDE: Final = {"width": 1440, "height": 900}
EVIL_MODEL: Final = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
TENANTS: Final = ("research", "support", "batch")
LOADED_S: Final = 25.0
LISTEN: Final = """
  window.said = [];
  const aloud = document.querySelector("#announce");
  new MutationObserver(() => window.said.push(aloud.textContent))
    .observe(aloud, { childList: true, characterData: true, subtree: true });
"""
PLACES: Final = """
  ["#charts", "#figures", "#fleet", "#hot-title"].map((id) => {
    const top = document.querySelector(id).getBoundingClientRect().top;
    return Math.round(top - document.querySelector("#tiles").getBoundingClientRect().top);
  })
"""
FOCUS_IS_INSIDE: Final = """
  document.activeElement === document.body || document.activeElement.closest("dialog") !== null
"""


def axe_source() -> str:
    """Return the text of axe-core, which the make target fetched."""
    assert hashlib.sha256(AXE.read_bytes()).hexdigest() == AXE_SHA256
    with tarfile.open(AXE) as packed:
        member = packed.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


async def violations(opened: Tab) -> list[str]:
    """Return what axe-core finds wrong, by rule and element. Its script is the test's, not ours."""
    await opened.page.evaluate(axe_source())
    found: Any = await opened.page.evaluate(
        "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', "
        "'best-practice']})"
    )
    return [
        f"{rule['id']}: {node['html'][:160]} {node['failureSummary'][:200]}"
        for rule in found["violations"]
        for node in rule["nodes"][:3]
    ]


async def shown(opened: Tab) -> None:
    """Wait until the page shows its first snapshot."""
    await opened.page.wait_for_selector("#link[data-state=live]")
    await opened.page.wait_for_function("document.querySelectorAll('#facts dd').length > 0")


async def pictured(opened: Tab, name: str) -> None:
    """Keep a picture of what is seen."""
    size_bytes = await opened.picture(IMAGES / f"dashboard-{name}.png")
    assert 10_000 < size_bytes < PICTURE_BYTES


def page_of(fleet: LocalFleet) -> str:
    return f"{fleet.router.admin_url}/dashboard"


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="browser")
async def running_browser() -> AsyncIterator[Any]:
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="trio")
async def three_replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    """Three real workers with sidecars, three tenants, load for a while."""
    folder = tmp_path_factory.mktemp("trio")
    secret = write_secret(folder)
    plan = FleetPlan(
        replicas=3,
        tokenizer=write_tokenizer(folder / "tokenizer"),
        preset="llama-8b-h100",
        sidecar_flags=("--deployment-key-file", str(secret)),
        config={
            "tenants": [tenant(name) for name in TENANTS],
            "deployment_key_file": str(secret),
        },
    )
    async with LocalFleet(folder, plan) as fleet:
        keys = [key_of(name) for name in TENANTS]
        async with load(fleet.router.url, 20, keys, model=MODEL):
            await asyncio.sleep(LOADED_S)
            yield fleet


async def test_an_empty_fleet_says_what_to_do_first(browser: Any, tmp_path: Path) -> None:
    async with (
        LocalFleet(tmp_path, FleetPlan(replicas=0)) as fleet,
        tab(browser, page_of(fleet), viewport=WIDE) as opened,
    ):
        await shown(opened)
        assert "warmroute serve --replica" in await opened.text("#fleet-table .empty")
        assert f"curl {fleet.router.url}" in await opened.text("#decisions-table .empty")
        await pictured(opened, "empty")
        assert opened.faults == []
        origin = fleet.router.admin_url
        assert all(url.startswith(origin) for url in opened.requests), "nothing from elsewhere"
        assert await violations(opened) == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("light", {"viewport": WIDE}),
        ("dark", {"viewport": WIDE, "color_scheme": "dark"}),
        ("narrow", {"viewport": {"width": 360, "height": 740}}),
    ],
)
async def test_three_replicas_are_shown_with_figures_and_without_a_fault(
    browser: Any, trio: LocalFleet, name: str, options: dict[str, Any]
) -> None:
    async with tab(browser, page_of(trio), **options) as opened:
        await shown(opened)
        await opened.page.wait_for_selector("#fleet-table tbody tr:nth-child(3)")
        await opened.page.wait_for_selector("#decisions-table tbody tr:nth-child(5)")
        assert await opened.text("#fleet-count") == "3 of 3 replicas up"
        cells = await opened.page.locator("#tenants-table tbody th").all_inner_texts()
        assert sorted(cells) == sorted(TENANTS)
        assert await opened.page.locator(".plot canvas").count() == 6
        await asyncio.sleep(2.0)
        wide = await opened.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, "the page itself does not scroll sideways"
        await pictured(opened, name)
        assert opened.faults == []
        assert await violations(opened) == []


async def test_figures_that_change_move_nothing(browser: Any, trio: LocalFleet) -> None:
    """No layout shift once the first snapshot is drawn, but for an alert that comes or goes."""
    async with tab(browser, page_of(trio), viewport=WIDE) as opened:
        await shown(opened)
        await opened.page.wait_for_selector("#decisions-table tbody tr:nth-child(20)")
        await asyncio.sleep(2.0)
        before = await opened.page.evaluate(PLACES)
        await asyncio.sleep(5.0)
        assert await opened.page.evaluate(PLACES) == before


async def test_everything_works_by_keyboard(browser: Any, trio: LocalFleet) -> None:
    async with tab(browser, page_of(trio), viewport=WIDE) as opened:
        await shown(opened)
        page = opened.page
        await page.wait_for_selector("#fleet-table tbody tr:nth-child(3)")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        head = page.locator("#fleet-table thead th").first
        assert await head.get_attribute("aria-sort") == "ascending"
        await head.locator("button").focus()
        await page.keyboard.press("Enter")
        assert await head.get_attribute("aria-sort") == "descending"
        names = await page.locator("#fleet-table tbody th").all_inner_texts()
        assert names == sorted(names, reverse=True)
        first = page.locator("#fleet-table tbody button").first
        await first.focus()
        await page.keyboard.press("Enter")
        await page.wait_for_selector("dialog[open] dl.pairs")
        assert names[0] == await opened.text("#dialog-title")
        for _ in range(12):
            await page.keyboard.press("Tab")
            assert await page.evaluate(FOCUS_IS_INSIDE), "focus stays in the dialog"
        assert await violations(opened) == []
        await page.keyboard.press("Escape")
        assert await page.locator("dialog[open]").count() == 0
        assert await page.evaluate("document.activeElement.textContent") == names[0]
        assert opened.faults == []


async def test_a_decision_opens_with_the_words_of_explain_and_every_candidate(
    browser: Any, trio: LocalFleet
) -> None:
    async with tab(browser, page_of(trio), viewport=WIDE) as opened:
        await shown(opened)
        page = opened.page
        await page.wait_for_selector("#decisions-table tbody tr:nth-child(5)")
        await page.click("#pause")
        await page.locator("#decisions-table tbody button").nth(2).click()
        await page.wait_for_selector("dialog[open] .words")
        request_id = (await opened.text("#dialog-title")).removeprefix("Request ")
        words = await opened.text(".words")
        for line in ("prompt tokens", "policy ExpectedTtft", "-> w", "predicted"):
            assert line in words
        record = await trio.decision(request_id)
        (attempt,) = record["attempts"]
        rows = page.locator("dialog tbody tr")
        assert await rows.count() == len(attempt["decision"]["candidates"]) == 3
        assert "(chosen)" in await rows.first.inner_text()
        terms = sorted(attempt["decision"]["candidates"][0]["terms"])
        heads = await page.locator("dialog thead th").all_inner_texts()
        assert heads[2 : 2 + len(terms)] == terms
        await pictured(opened, "decision")
        assert await violations(opened) == []


async def test_a_page_that_is_paused_changes_nothing_until_it_goes_on(
    browser: Any, trio: LocalFleet
) -> None:
    async with tab(browser, page_of(trio), viewport=WIDE) as opened:
        await shown(opened)
        await opened.page.wait_for_selector("#decisions-table tbody tr")
        await opened.page.click("#pause")
        assert await opened.page.get_attribute("#pause", "aria-pressed") == "true"
        before = await opened.text("main")
        await asyncio.sleep(2.5)
        assert await opened.text("main") == before
        await opened.page.click("#pause")
        await asyncio.sleep(2.5)
        assert await opened.text("main") != before


async def test_a_hundred_replicas_are_sorted_filtered_and_never_markup(
    browser: Any, tmp_path: Path
) -> None:
    with ValkeyProcess() as valkey:
        engines = Engines(100, valkey.url, models=("fleet-model", EVIL_MODEL))
        plan = FleetPlan(replicas=0, state_url=valkey.url, config={"health": {"interval_s": 1.0}})
        async with LocalFleet(tmp_path, plan) as fleet, engines:
            await until(lambda: _seen(fleet, 100), "100 replicas", 60.0)
            async with (
                load(fleet.router.url, 30),
                tab(browser, page_of(fleet), viewport=WIDE) as opened,
            ):
                await shown(opened)
                await opened.page.wait_for_selector("#fleet-table tbody tr:nth-child(100)")
                await asyncio.sleep(LOADED_S)
                await _ask_for(fleet, EVIL_MODEL)
                await _tour_of_many(opened)
                await pictured(opened, "hundred")
                assert await opened.page.evaluate("window.hacked") is None
                assert await opened.page.locator("main img, main script").count() == 0
                assert opened.faults == []
                assert await violations(opened) == []


async def _seen(fleet: LocalFleet, count: int) -> bool:
    return len(await fleet.seen()) == count


async def _ask_for(fleet: LocalFleet, model: str) -> None:
    """Bring a model name that is markup among the decisions: not every one of them is shown."""
    for _ in range(20):
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        url = f"{fleet.router.url}/v1/chat/completions"
        async with fleet.http.post(url, data=json.dumps(body)) as answer:
            await answer.read()


async def _tour_of_many(opened: Tab) -> None:
    page = opened.page
    rows = page.locator("#fleet-table tbody tr")
    await page.fill("#fleet-filter", "gpu-01")
    assert await rows.count() == 10
    await page.fill("#fleet-filter", "onerror")
    assert await rows.count() >= 90, "all serve that model, as far as they answer"
    await page.fill("#fleet-filter", "")
    await page.select_option("#fleet-state", "draining")
    assert await rows.count() == 10
    await page.select_option("#fleet-state", "")
    await page.fill("#decisions-filter", "onerror")
    await page.wait_for_selector("#decisions-table tbody tr")
    assert EVIL_MODEL in await opened.text("#decisions-table tbody")
    await page.fill("#decisions-filter", "")
    await page.locator("#fleet-table tbody button").first.click()
    await page.wait_for_selector("dialog[open] dl.pairs")
    assert EVIL_MODEL in await opened.text("dialog .pairs")
    await page.keyboard.press("Escape")
    await page.click("#fleet-table thead button:text('In flight')")
    assert await page.locator("#fleet-table [aria-sort=descending]").count() == 1


async def test_an_outage_is_named_and_the_page_comes_back_by_itself(
    browser: Any, tmp_path: Path
) -> None:
    """Two of three replicas and the store are gone; then the router is."""
    with ValkeyProcess() as valkey:
        plan = FleetPlan(
            replicas=3,
            state_url=valkey.url,
            tokenizer=write_tokenizer(tmp_path / "tokenizer"),
            preset="llama-8b-h100",
            config={"health": {"interval_s": 0.2}, "admin": "127.0.0.1:0"},
        )
        async with LocalFleet(tmp_path, plan) as fleet:
            async with (
                load(fleet.router.url, 8, model=MODEL),
                tab(browser, page_of(fleet), viewport=WIDE) as opened,
            ):
                await shown(opened)
                await opened.page.evaluate(LISTEN)
                await asyncio.sleep(10.0)
                valkey.kill()
                for replica in fleet.replicas[:2]:
                    replica.sidecar.process.kill()
                    replica.worker.process.kill()
                await opened.page.wait_for_selector("#alerts .alert[data-level=error]")
                await asyncio.sleep(12.0)
                alerts = await opened.text("#alerts")
                assert "2 replicas down" in alerts
                assert "shared state" in alerts
                assert await opened.page.locator(".state[data-state=down]").count() >= 2
                assert await opened.page.locator(".alert b").first.inner_text() != ""
                said = await opened.page.evaluate("window.said.join(' ')")
                assert "2 replicas down" in said
                assert len(said.split(". ")) < 12, "screen readers are told of changes only"
                await pictured(opened, "outage")
                assert await violations(opened) == []
                await _lose_the_router(fleet, opened)
            valkey.start()  # so that what is left can say goodbye


async def _lose_the_router(fleet: LocalFleet, opened: Tab) -> None:
    """Stop the router, see that the page says so, and bring it back on the same address."""
    router = fleet.router
    admin = router.admin_url.removeprefix("http://")
    router.child.process.terminate()
    await opened.page.wait_for_selector("#link[data-state=lost]", timeout=90_000.0)
    assert "disconnected" in await opened.text("#link")
    assert await opened.page.evaluate("document.body.classList.contains('is-old')")
    await opened.page.wait_for_function(
        "document.querySelector('#announce').textContent.includes('Disconnected')"
    )
    await asyncio.to_thread(router.child.process.wait)
    fleet.routers[0] = await fleet.start_router(admin=admin)
    await opened.page.wait_for_selector("#link[data-state=live]", timeout=60_000.0)


async def test_a_page_of_elsewhere_reads_nothing(trio: LocalFleet) -> None:
    url = f"{trio.router.admin_url}/admin/events"
    async with trio.http.get(url, headers={"Sec-Fetch-Site": "cross-site"}) as answer:
        assert answer.status == 403
        assert "access-control-allow-origin" not in answer.headers
