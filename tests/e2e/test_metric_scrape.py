"""What real processes answer at /metrics is what the page says, and of bounded series."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from support.fleet import FleetPlan, LocalFleet, until
from support.metric_label import CLOSED, OPEN
from support.metric_page import Family, all_families, family_of
from support.tenant import key_of, tenant_config

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = "one two three four five six seven eight nine ten " * 60


async def test_processes_have_the_metrics_of_the_page_and_no_others(tmp_path: Path) -> None:
    """Names, kinds and labels; label values are of the closed sets."""
    known = {one.name: one for each in (await all_families()).values() for one in each}
    config = tenant_config(tmp_path, "acme")
    config |= {"decisions": {"path": str(tmp_path / "decisions.jsonl")}}
    config |= {"access_log": {"path": str(tmp_path / "access.jsonl")}}
    flags = ("--block-tokens", "16")
    async with LocalFleet(tmp_path, FleetPlan(replicas=1, sidecar_flags=flags)) as fleet:
        router = await fleet.start_router(**config)
        await fleet.all_up(router)
        key = {"Authorization": f"Bearer {key_of('acme')}"}
        for headers in (key, key, {}):
            body = {"model": fleet.plan.model, "prompt": PROMPT, "max_tokens": 1}
            url = f"{router.url}/v1/completions"
            async with fleet.http.post(url, json=body, headers=headers) as answer:
                await answer.read()
        said = await sidecar_address(fleet)
        for url in (router.admin_url, said, fleet.replicas[0].url):
            async with fleet.http.get(f"{url}/metrics") as answer:
                text = await answer.text()
            check(text, known)


async def sidecar_address(fleet: LocalFleet) -> str:
    """Return where the sidecar's metrics are, which its log names."""

    async def is_told() -> bool:
        return "metrics at " in fleet.replicas[0].sidecar.log_tail()

    await until(is_told, "the address of the metrics")
    found = re.search(r"metrics at (http://[\w.:]+)", fleet.replicas[0].sidecar.log_tail())
    assert found is not None
    return found[1].removesuffix("/metrics")


def check(text: str, known: dict[str, Family]) -> None:
    """Compare one exposition with what is known."""
    ours = 0
    for metric in text_string_to_metric_families(text):
        family = family_of(metric)
        if not family.name.startswith("warmroute_"):
            continue  # vLLM's names, of the worker
        ours += 1
        expected = known[family.name]
        if metric.samples:
            labels = tuple(sorted(expected.labels))  # in a text they have no order
            assert family._replace(labels=tuple(sorted(family.labels))) == expected._replace(
                labels=labels
            )
        for sample in metric.samples:
            for label, value in sample.labels.items():
                if label not in OPEN and label != "le":
                    assert value in CLOSED[family.name, label], sample
    assert ours > 10


async def test_a_replica_that_left_leaves_no_series(tmp_path: Path) -> None:
    """B51: of its trust, residency, standing, load; a registered replica that deregisters."""
    async with LocalFleet(tmp_path, FleetPlan(replicas=2)) as fleet:
        router = fleet.router
        for number in range(8):
            body = {"model": fleet.plan.model, "prompt": f"{number % 2} {PROMPT}", "max_tokens": 1}
            async with fleet.http.post(f"{router.url}/v1/completions", json=body) as answer:
                assert answer.status == 200
        both = await replicas_of(fleet)
        assert {name for names in both.values() for name in names} == {"w0", "w1"}
        assert len(both) > 8
        await asyncio.to_thread(fleet.processes.stop, fleet.replicas[1].sidecar)

        async def has_left() -> bool:
            return "w1" not in await fleet.seen(router)

        await until(has_left, "the replica left")
        left = await replicas_of(fleet)
        assert {name for names in left.values() for name in names} == {"w0"}


async def replicas_of(fleet: LocalFleet) -> dict[str, set[str]]:
    """Return the replicas that each metric of the router has a series of."""
    async with fleet.http.get(f"{fleet.router.admin_url}/metrics") as answer:
        text = await answer.text()
    found: dict[str, set[str]] = {}
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            if "replica" in sample.labels:
                found.setdefault(metric.name, set()).add(sample.labels["replica"])
    return found
