"""A canary on the operators' page, in a real browser: started, looked at, stopped, refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from support.browser import chromium, tab
from support.canary_desk import CanaryDesk, conversation, talk
from support.fleet import FleetPlan, LocalFleet, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

PICTURE: Final = Path(__file__).parents[2] / "docs" / "images" / "dashboard-canary.png"
LEFT_EDGES: Final = """
  ["#canary-title", "#canary-now dt", "#canary-now tbody th", "#canary-form label"].map((each) => {
    const one = document.querySelector(each);
    return one.getBoundingClientRect().left + parseFloat(getComputedStyle(one).paddingLeft);
  })
"""
WIDE: Final = {"width": 1440, "height": 900}


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


async def test_a_promotion_that_the_verdict_does_not_carry_is_asked_for_twice(
    browser: Any, tmp_path: Path
) -> None:
    plan = FleetPlan(replicas=1, config={"policy": {"kind": "weighted"}})
    async with (
        LocalFleet(tmp_path, plan) as fleet,
        tab(browser, f"{fleet.router.admin_url}/dashboard") as opened,
    ):
        page, desk = opened.page, CanaryDesk(fleet, fleet.router)
        await desk.start({"w_queue": 2.0}, percent=50)
        for _ in range(30):
            body = conversation("one story")
            url = f"{fleet.router.url}/v1/chat/completions"
            async with fleet.http.post(url, json=body) as answer:
                assert answer.status == 200
        await page.wait_for_selector("#canary-now :text('all 30 requests fell on one side')")
        await page.wait_for_selector("#canary-now :text('1 of 32 of the')")
        for name, text in {"reason": "try", "author": "ann"}.items():
            await page.fill(f"#canary-form [name={name}]", text)
        await page.click("#canary-form [value=promote]")
        await page.wait_for_selector("#canary-said :text('too little to tell')")
        assert (await desk.status())["state"] == "running"
        await page.click("#canary-said button")
        await page.wait_for_selector("#canary-note:text('none')")
        values = (await desk.settings.get())["values"]
        assert values["policy"]["w_queue"] == 2.0
        assert all("status of 409" in fault for fault in opened.faults), opened.faults


async def test_what_both_sides_did_is_shown_beside_each_other(browser: Any, tmp_path: Path) -> None:
    """With a picture of it."""
    plan = FleetPlan(replicas=2, config={"policy": {"kind": "weighted"}})
    async with (
        LocalFleet(tmp_path, plan) as fleet,
        tab(browser, f"{fleet.router.admin_url}/dashboard", viewport=WIDE) as opened,
    ):
        page, desk = opened.page, CanaryDesk(fleet, fleet.router)
        await desk.start({"w_queue": 2.0}, id="more-queue", percent=50)
        await talk(fleet, 200)
        await until(lambda: desk.has_counted(200), "all of them are counted")
        verdict = (await desk.status())["verdict"]
        both = [verdict[f"{side}_requests"] for side in ("candidate", "control")]
        assert sum(both) == 200
        assert min(both) > 0
        told = f"{both[0]} requests of the candidate, {both[1]} of the control"
        await page.wait_for_selector(f"#canary-now :text('{told}')")
        assert len(set(await page.evaluate(LEFT_EDGES))) == 1
        await page.evaluate("document.querySelector('#canary').scrollIntoView()")
        assert 10_000 < await opened.picture(PICTURE) < 150_000
        assert opened.faults == []
