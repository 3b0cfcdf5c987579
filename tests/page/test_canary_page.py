"""A canary on the operators' page, in a real browser: started, looked at, stopped, refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from support.browser import chromium, tab
from support.canary_desk import CanaryDesk
from support.fleet import FleetPlan, LocalFleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="browser")
async def running_browser() -> AsyncIterator[Any]:
    async with chromium() as browser:
        yield browser


async def test_a_canary_is_started_shown_with_its_figures_and_stopped(
    browser: Any, tmp_path: Path
) -> None:
    plan = FleetPlan(replicas=0, config={"policy": {"kind": "weighted"}})
    async with (
        LocalFleet(tmp_path, plan) as fleet,
        tab(browser, f"{fleet.router.admin_url}/dashboard") as opened,
    ):
        page, desk = opened.page, CanaryDesk(fleet, fleet.router)
        await page.wait_for_selector("#canary-note:text('none')")
        assert await page.is_disabled("#canary-form [value=stop]")
        for name, text in {"policy": "w_queue=-1", "reason": "try", "author": "ann"}.items():
            await page.fill(f"#canary-form [name={name}]", text)
        await page.click("#canary-form [value=start]")
        await page.wait_for_selector("#canary-said :text('canary.policy.w_queue')")
        assert (await desk.status())["state"] == "none"

        await page.fill("#canary-form [name=policy]", "w_queue=2 tie_margin=0.1")
        await page.click("#canary-form [value=start]")
        await page.wait_for_selector("#canary-note:text('running')")
        view = await desk.status()
        assert (view["state"], view["settings"]["percent"]) == ("running", 10)
        assert view["settings"]["policy"]["tie_margin"] == 0.1
        await page.wait_for_selector("#canary-now td:text('of 200 requests on the side')")
        assert await page.is_disabled("#canary-form [value=start]")

        await page.click("#canary-form [value=stop]")
        await page.wait_for_selector("#canary-note:text('none')")
        await page.wait_for_selector("#canary-now :text('ann: try')")
        assert (await desk.status())["last"]["reason"] == "try"
        assert all("status of 400" in fault for fault in opened.faults), opened.faults
