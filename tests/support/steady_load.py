"""Requests at a steady rate against one router, and how long it took to decide about them."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from support.stage import chat_body

if TYPE_CHECKING:
    from types import TracebackType

TEXT = "quick brown foxes jump over lazy dogs " * 40
SESSIONS = 8
STALL_S = 0.3


class SteadyLoad:
    """``async with SteadyLoad(url) as load``: sends ``rate_hz`` requests a second meanwhile.

    ``outcomes`` counts status codes and kinds of errors; ``rungs`` what answers said of the state.
    ``stalls`` counts the times that this machine stood still: a router takes that for an outage.
    """

    def __init__(self, url: str, rate_hz: float = 50.0) -> None:
        self._url = url
        self._pause_s = 1.0 / rate_hz
        self._tasks: set[asyncio.Task[None]] = set()
        self.outcomes: Counter[str] = Counter()
        self.rungs: Counter[str] = Counter()
        self.stalls = 0

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=30)
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(timeout=timeout, connector=connector)
        self._before = await decisions(self._http, self._url)
        self._sending = asyncio.create_task(self._send())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sending.cancel()
        await asyncio.gather(self._sending, *self._tasks, return_exceptions=True)
        self._after = await decisions(self._http, self._url)
        await self._http.close()

    async def is_enough(self, requests: int = 60) -> bool:
        """Return whether so many were answered."""
        return self.outcomes["200"] >= requests

    def slowest_s(self, share: float) -> float:
        """Return the bound under which that share of the decisions stayed, once it is over."""
        counts = {bound: n - self._before[bound] for bound, n in self._after.items()}
        total = counts[float("inf")]
        return min(bound for bound, n in counts.items() if n >= share * total)

    async def _send(self) -> None:
        number = 0
        while True:
            number += 1
            task = asyncio.create_task(self._ask(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            due_s = time.monotonic() + self._pause_s
            await asyncio.sleep(self._pause_s)
            self.stalls += time.monotonic() - due_s > STALL_S

    async def _ask(self, number: int) -> None:
        text = f"session {number % SESSIONS} {TEXT} {number}"
        body = chat_body(text, stream=False, max_tokens=1)
        try:
            async with self._http.post(f"{self._url}/v1/chat/completions", data=body) as answer:
                await answer.read()
                self.outcomes[str(answer.status)] += 1
                self.rungs[answer.headers.get("x-warmroute-rung", "")] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            self.outcomes[type(error).__name__] += 1


def rungs_told(log: str) -> list[str]:
    """Return the rungs of a router's log, one per line about a move."""
    return re.findall(r"state at \S+ is (\w+), age", log)


async def decisions(http: aiohttp.ClientSession, url: str) -> dict[float, float]:
    """Return the cumulative buckets of the time that decisions took, by their bound in seconds."""
    async with http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    [family] = [
        one
        for one in text_string_to_metric_families(text)
        if one.name == "warmroute_decision_seconds"
    ]
    return {float(s.labels["le"]): s.value for s in family.samples if "le" in s.labels}
