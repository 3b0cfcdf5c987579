"""Every metric of a router, a sidecar and a worker, as their code makes it; the page of all.

``python -m support.metric_page docs/metrics.md`` writes the page between its two marks.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from router.access_log import open_access_log
from router.app import App
from router.config import decode_config
from router.decision_log import open_decision_log
from router.setting_life import SettingLife
from router.state_reader import build_mirror
from router.supervisor.front import CrewMetrics
from router.tls import TlsWatch
from router.tracing import Tracing
from router.warm_open import open_warm_ups
from sidecar.gauge import render_kv
from sidecar.metrics import SidecarMetrics
from sidecar.report import KvReport, PeerReport, TierReport
from state.direct import LookupCounts
from state.figures import MirrorFigures
from state.model import ReplicaId, RouterId
from state.setting_store import MemorySettingStore
from state.warm_claim import MemoryWarmClaims
from support.metric_label import label_values
from support.tenant import SECRET, tenant_config
from support.tls import Authority

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import Metric

    from router.span import Span

BEGIN: Final = "<!-- metrics: begin -->\n"
END: Final = "<!-- metrics: end -->\n"
NOWHERE: Final = "redis://127.0.0.1:1"
_TOTAL: Final = "_total"


class Family(NamedTuple):
    """One metric as it is scraped: ``name`` with the ``_total`` of a counter."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class NoExport:
    """Takes no spans."""

    exported = failed = 0

    def add(self, spans: Sequence[Span]) -> None:
        """Leave them."""

    def close(self) -> None:
        """There is nothing to send."""


def family_of(metric: Metric) -> Family:
    """Return what a collector's metric looks like; its labels are known without a sample."""
    labels = tuple(getattr(metric, "_labelnames", ()))
    if not labels and metric.samples:
        labels = tuple(label for label in metric.samples[0].labels if label != "le")
    total = _TOTAL if metric.type == "counter" else ""
    return Family(metric.name + total, metric.type, labels, metric.documentation)


async def router_families(folder: Path) -> list[Family]:
    """Return those of a router that has all that makes metrics."""
    raw = tenant_config(folder, acme={"quota": {"max_inflight": 1}})
    raw |= {"decisions": {"path": str(folder / "decisions.jsonl")}}
    raw |= {"shadow": {"policy": {"kind": "least_loaded"}}}
    raw |= {"access_log": {"path": str(folder / "access.jsonl")}}
    raw["hedge"] = {"enabled": True}
    config = decode_config(raw)
    clock = time.monotonic
    log = open_decision_log(config.decisions, config.policy, "r", clock=clock, unix_s=0.0)
    access = open_access_log(config.access_log, clock=clock, rng=random.Random())
    assert log is not None
    assert access is not None
    app = App(config, {}, build_mirror(NOWHERE), log, SECRET)
    app.log_access(access)
    app.trace_requests(Tracing(config.tracing, NoExport(), random.Random()))
    app.metrics.gauges.lookups = LookupCounts().by_outcome
    app.metrics.gauges.mirror = lambda: MirrorFigures(
        rungs_entered={}, snapshots=0, evicted_blocks=0, index_bytes=0
    )
    overload = app.entrance.overload
    overload.used_bytes = overload.limit_bytes = 1  # what only some systems tell
    shown = Authority(folder).issue("warmroute").certificate
    app.metrics.registry.register(TlsWatch((), app.pool.tls, shown))
    app.metrics.registry.register(CrewMetrics(int, {"crashed": 0, "replaced": 0}))
    SettingLife(app, NOWHERE, MemorySettingStore())
    claims = MemoryWarmClaims(RouterId("r"), clock)
    app.metrics.registry.register(open_warm_ups(app, claims))
    families = [family_of(metric) for metric in app.metrics.registry.collect()]
    await access.lines.close()
    await log.close()
    await app.tokens.close()
    app.prompts.close()
    await app.pool.close()
    return families


def sidecar_families() -> list[Family]:
    """Return those of a sidecar."""
    return [family_of(metric) for metric in SidecarMetrics(ReplicaId("r")).collect()]


def worker_families() -> list[Family]:
    """Return those of a worker that vLLM does not have."""
    states = {"free": 0}
    tiers = [
        TierReport(
            tier=tier, page_bytes=1, total_pages=0, states=states, latency_ms=1.0, bytes_per_s=1.0
        )
        for tier in ("device", "host", "disk")
    ]
    text = render_kv(KvReport(tiers, PeerReport()), 0)
    return [family_of(metric) for metric in text_string_to_metric_families(text)]


async def all_families() -> dict[str, list[Family]]:
    """Return the families of each program, in order of their names."""
    with tempfile.TemporaryDirectory() as folder:
        router = await router_families(Path(folder))
    found = {"Router": router, "Sidecar": sidecar_families(), "Worker": worker_families()}
    return {program: sorted(families) for program, families in found.items()}


def tables(found: dict[str, list[Family]]) -> str:
    """Return the tables of the page, and what labels may be."""
    lines: list[str] = []
    for program, families in found.items():
        lines += ["", f"## {program}", "", "| name | type | labels | says |", "|---|---|---|---|"]
        for one in families:
            labels = ", ".join(f"`{label}`" for label in one.labels)
            lines.append(f"| `{one.name}` | {one.kind} | {labels} | {one.text} |")
    lines += ["", "## Labels", "", "| label | of | values |", "|---|---|---|"]
    for label, of, values in label_values(_names(found)):
        lines.append(f"| `{label}` | {of} | {values} |")
    return "\n".join(lines[1:]) + "\n"


def _names(found: dict[str, list[Family]]) -> Iterable[tuple[str, str]]:
    return [(one.name, label) for each in found.values() for one in each for label in one.labels]


def with_tables(page: str, found: dict[str, list[Family]]) -> str:
    """Return the page with what is between its marks made anew."""
    made = BEGIN + tables(found) + END
    return re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: made, page, flags=re.DOTALL)


def main() -> None:
    """Write the page that is named."""
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(), asyncio.run(all_families())))


if __name__ == "__main__":
    main()
