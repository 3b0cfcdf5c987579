"""A sidecar's ``/metrics``, read over HTTP."""

from __future__ import annotations

from contextlib import suppress

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from support.fleet import until


class Dials:
    """What one sidecar's ``/metrics`` shows."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/metrics"

    async def text(self) -> str:
        async with aiohttp.ClientSession() as http, http.get(self.url) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            return await answer.text()

    async def series(self) -> set[str]:
        """Return every series with its labels and without its value."""
        lines = (await self.text()).splitlines()
        return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}

    async def read(self) -> dict[str, float]:
        """Return the samples by name, without the common prefix, a reason after a colon."""
        read = {}
        for family in text_string_to_metric_families(await self.text()):
            for sample in family.samples:
                assert sample.labels["replica"]
                reason = sample.labels.get("reason")
                name = sample.name.removeprefix("warmroute_sidecar_")
                read[f"{name}:{reason}" if reason else name] = sample.value
        return read

    async def show(self, **wanted: float) -> None:
        """Wait until the dials show what is wanted."""
        shown: dict[str, float] = {}

        async def is_so() -> bool:
            with suppress(aiohttp.ClientConnectorError):  # not there yet
                shown.update(await self.read())
            return bool(shown) and all(shown[name] == value for name, value in wanted.items())

        try:
            await until(is_so, str(wanted))
        except AssertionError as error:
            error.add_note(str(shown))
            raise
