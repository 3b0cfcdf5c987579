"""The examples with a real promtool and a real Prometheus (make test-observability).

PROMTOOL and PROMETHEUS name the programs where they are not on the path.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from support.fleet import FleetPlan, LocalFleet, until
from support.port import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    import aiohttp

pytestmark = pytest.mark.heavy

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"
RULES: Final = EXAMPLES / "prometheus"
TRAFFIC_S: Final = 20.0
PROMPT: Final = "one two three four five six seven eight nine ten " * 80
QUIET: Final = {
    "Failed", "Not admitted", "By tenant", "Second tries", "Held in caches, bytes", "Diagnoses",
    "Prompt tokens of the largest tenants", "Refused commands", "Waited in the router", "Limit",
    "Dropped log lines", "Certificates end", "Slowness",
}  # fmt: skip
"""Panels that show nothing while there are no tenants, no TLS, no limits and no faults."""


def program(name: str) -> str:
    found = os.environ.get(name.upper()) or shutil.which(name)
    assert found is not None, (
        f"{name} is not here: apt-get install prometheus, or set {name.upper()}"
    )
    return found


@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", "prometheus.yaml"),
        ("check", "rules", "rules.yaml", "alerts.yaml"),
        ("test", "rules", "rules_test.yaml"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_promtool_finds_nothing_wrong(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [program("promtool"), *words], cwd=RULES, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def expressions() -> Iterator[tuple[str, str]]:
    """Yield a name and an expression of every alert, rule and panel; variables have values."""
    for name in ("rules.yaml", "alerts.yaml"):
        for group in yaml.safe_load((RULES / name).read_text())["groups"]:
            for rule in group["rules"]:
                yield rule.get("record") or rule["alert"], rule["expr"]
    board = json.loads((EXAMPLES / "grafana" / "warmroute.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"].replace("$__rate_interval", "15s")
            yield panel["title"], re.sub(r"\$\w+", ".*", expr)


async def query(http: aiohttp.ClientSession, url: str, expr: str) -> list[Any]:
    """Return what Prometheus answers; an error is a failure."""
    async with http.get(f"{url}/api/v1/query", params={"query": expr}) as answer:
        told = await answer.json()
    assert told["status"] == "success", (expr, told)
    found: list[Any] = told["data"]["result"]
    return found


async def sidecar_port(fleet: LocalFleet) -> str:
    """Return where the sidecar's metrics are."""
    found = re.search(r"metrics at http://([\w.:]+)", fleet.replicas[0].sidecar.log_tail())
    assert found is not None
    return found[1]


def scraping(folder: Path, targets: dict[str, str]) -> Path:
    """Return the file of a Prometheus that scrapes often; the rules are those of the examples."""
    config = yaml.safe_load((RULES / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES / name) for name in config["rule_files"]]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


async def test_every_expression_of_alerts_and_dashboard_has_an_answer(tmp_path: Path) -> None:
    """A real Prometheus scrapes a router, a sidecar and a worker under traffic."""
    async with LocalFleet(tmp_path, FleetPlan(replicas=2, routers=1)) as fleet:
        router = fleet.router
        targets = {
            "warmroute-router": router.admin_url.removeprefix("http://"),
            "warmroute-sidecar": await sidecar_port(fleet),
            "warmroute-worker": fleet.replicas[0].url.removeprefix("http://"),
        }
        port = free_port()
        process = await asyncio.create_subprocess_exec(
            program("prometheus"), f"--config.file={scraping(tmp_path, targets)}",
            f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            await answers(fleet, f"http://127.0.0.1:{port}", router.url)
        finally:
            process.terminate()
            await process.wait()


async def answers(fleet: LocalFleet, url: str, router_url: str) -> None:
    """Send requests for a while and ask everything then."""

    async def is_ready() -> bool:
        try:
            async with fleet.http.get(f"{url}/-/ready") as answer:
                return answer.status == 200
        except OSError:
            return False

    await until(is_ready, "Prometheus is ready", 60)
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + TRAFFIC_S
    number = 0
    while loop.time() < ends_s:
        number += 1
        body = {"model": fleet.plan.model, "prompt": f"{number % 3} {PROMPT}", "max_tokens": 2}
        async with fleet.http.post(f"{router_url}/v1/completions", json=body) as answer:
            assert answer.status == 200
            await answer.read()
        await asyncio.sleep(0.2)
    assert len(await query(fleet.http, url, "up == 1")) == 3
    answered: dict[str, int] = {}
    for name, expr in expressions():
        found = await query(fleet.http, url, expr)
        answered[name] = answered.get(name, 0) + len(found)
    panels = {name for name in answered if not re.match(r"Warmroute|warmroute:", name)}
    assert panels >= QUIET
    assert {name for name in panels if not answered[name]} <= QUIET
    firing = {
        one["metric"]["alertname"]
        for one in await query(fleet.http, url, 'ALERTS{alertstate="firing"}')
    }
    assert firing <= {"WarmrouteLoopLag"}, "a busy machine may be late, nothing else is wrong"
