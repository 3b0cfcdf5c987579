"""Settings on the operators' page, in a real browser: tried, changed, rolled back, refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from support.browser import chromium, tab
from support.fleet import FleetPlan, LocalFleet
from support.setting_desk import SettingDesk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

SAID: Final = "#settings-said"


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="browser")
async def running_browser() -> AsyncIterator[Any]:
    async with chromium() as browser:
        yield browser


async def fill(page: Any, key: str, value: str) -> None:
    """Type a change and let it be tried."""
    words = {"key": key, "value": value, "reason": "from the page", "author": "ann"}
    for name, text in words.items():
        await page.fill(f"#settings-form [name={name}]", text)
    await page.click("#settings-form [type=submit]")


async def test_a_change_is_tried_made_and_taken_back_and_a_wrong_one_says_why(
    browser: Any, tmp_path: Path
) -> None:
    plan = FleetPlan(replicas=0, config={"policy": {"kind": "weighted"}})
    async with (
        LocalFleet(tmp_path, plan) as fleet,
        tab(browser, f"{fleet.router.admin_url}/dashboard") as opened,
    ):
        page, desk = opened.page, SettingDesk(fleet, fleet.router)
        await page.wait_for_selector("#settings-note:text('the configuration file alone')")
        assert await page.is_disabled("#settings-apply")

        await fill(page, "policy.w_queue", "-1")
        await page.wait_for_selector(f"{SAID} :text('policy.w_queue: Expected `float` >= 0.0')")
        assert await page.is_disabled("#settings-apply")

        await fill(page, "policy.w_queue", "0.5")
        await page.wait_for_selector(f"{SAID} :text('policy.w_queue: 1 → 0.5')")
        assert await desk.version() == 0
        await page.click("#settings-apply")
        await page.wait_for_selector(f"{SAID} :text('Version 1 is in force.')")
        assert (await desk.get())["values"]["policy"]["w_queue"] == 0.5
        await page.wait_for_selector("#settings-note:text('version 1')")

        status, _ = await desk.set({"policy": {"w_queue": 4}})
        assert status == 200
        await page.wait_for_selector("#settings-note:text('version 2')")
        await page.click("#settings summary:text('History')")
        await page.click("#settings-history button:text('Roll back to 1')")
        await page.wait_for_selector("#dialog-body :text('policy.w_queue: 4 → 0.5')")
        assert await desk.version() == 2
        await page.click("#dialog-body button")
        assert await desk.version() == 2, "a reason is required"
        await page.fill("#dialog-body [name=reason]", "worse")
        await page.click("#dialog-body button")
        await page.wait_for_selector("#dialog-body :text('Version 3 is in force.')")
        view = await desk.get()
        assert (view["values"]["policy"]["w_queue"], view["reason"]) == (0.5, "worse")
        assert all("status of 400" in fault for fault in opened.faults), opened.faults
