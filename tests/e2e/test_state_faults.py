"""One fault of the state server after the other under a steady load: no request notices."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from support.fleet import LocalFleet, until
from support.parted_link import PartedLink
from support.steady_load import SteadyLoad, rungs_told

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from support.valkey import ValkeyProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOLD_S = 1.5
"""Of each fault: beyond the age from which a view is stale."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="link")
async def parted_link(valkey: ValkeyProcess) -> AsyncIterator[PartedLink]:
    async with PartedLink(valkey.socket_path) as running:
        yield running


@pytest.fixture(scope="module", name="state_url")
def url_of_link(link: PartedLink) -> str:
    return link.url


class _Faults:
    """How each fault begins and ends."""

    def __init__(self, valkey: ValkeyProcess, link: PartedLink) -> None:
        self._valkey = valkey
        self._link = link

    async def slow(self) -> Callable[[], Awaitable[None]]:
        """R-04."""
        self._link.delay_s = 0.05

        async def end() -> None:
            self._link.delay_s = 0.0

        return end

    async def frozen(self) -> Callable[[], Awaitable[None]]:
        """R-03."""
        self._valkey.freeze()

        async def end() -> None:
            self._valkey.thaw()

        return end

    async def killed(self) -> Callable[[], Awaitable[None]]:
        """R-02, R-06."""
        self._valkey.kill()

        async def end() -> None:
            self._valkey.start()

        return end

    async def flushed(self) -> Callable[[], Awaitable[None]]:
        """R-06."""
        await self._valkey.flush()

        async def end() -> None:
            await self._valkey.flush()

        return end

    async def parted(self) -> Callable[[], Awaitable[None]]:
        """R-11, C-12: nobody hears anything."""
        self._link.part()

        async def end() -> None:
            self._link.heal()

        return end

    async def deaf(self) -> Callable[[], Awaitable[None]]:
        """R-11, C-12: what is sent arrives, no reply comes back."""
        self._link.part(replies_only=True)

        async def end() -> None:
            self._link.heal()

        return end

    async def full(self) -> Callable[[], Awaitable[None]]:
        """R-09: it takes no writes and is read as before."""
        await self._valkey.command("CONFIG", "SET", "maxmemory", "1")

        async def end() -> None:
            await self._valkey.command("CONFIG", "SET", "maxmemory", "0")

        return end


FAULTS = {
    "slow": "live",
    "frozen": "stale",
    "killed": "stale",
    "flushed": "live",
    "parted": "stale",
    "deaf": "stale",
    "full": "stale",
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_request_fails_or_waits_for_a_faulty_state_server(
    fleet: LocalFleet, valkey: ValkeyProcess, link: PartedLink, fault: str
) -> None:
    """C-11, F7, F8: 50 requests a second; each rung has its gauge, header and one line."""
    router, rung = fleet.router, FAULTS[fault]
    await fleet.all_up(router)

    async def is_on(wanted: str) -> bool:
        return str((await fleet.get(f"{router.url}/readyz"))["rung"]) == wanted

    await until(lambda: is_on("live"), "live before")
    log_before = len(router.child.log.read_text())
    async with SteadyLoad(router.url) as load:
        await asyncio.sleep(0.3)
        end = await getattr(_Faults(valkey, link), fault)()
        began_s = time.monotonic()
        try:
            await until(lambda: is_on(rung), f"{rung} during {fault}")
            await asyncio.sleep(max(0.0, HOLD_S - (time.monotonic() - began_s)))
            await until(load.is_enough, "requests during the fault")
            if not load.stalls:
                assert await is_on(rung)
                assert await gauge_of(fleet, rung) == 1
            assert len(await fleet.seen()) == 2
        finally:
            await end()
        await until(lambda: is_on("live"), f"live after {fault}")
        await fleet.all_up(router)
    assert set(load.outcomes) == {"200"}, load.outcomes
    assert load.slowest_s(0.9) <= 0.1
    assert (
        {"live", rung} <= set(load.rungs) <= {"live", rung} | ({"stale"} if load.stalls else set())
    )
    told = rungs_told(router.child.log.read_text()[log_before:])
    outages = len(told) // 2
    assert told == ["stale", "live"] * outages, told
    assert (rung == "stale") <= outages <= (rung == "stale") + load.stalls, told


async def gauge_of(fleet: LocalFleet, rung: str) -> float:
    async with fleet.http.get(f"{fleet.router.url}/metrics") as answer:
        text = await answer.text()
    [value] = [
        line.rpartition(" ")[2]
        for line in text.splitlines()
        if line.startswith(f'warmroute_state_rung{{rung="{rung}"}}')
    ]
    return float(value)
