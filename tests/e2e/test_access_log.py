"""The access log of a real router, its exemplars, and a trace that passes it unchanged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from support.fleet import FleetPlan, LocalFleet, until
from support.raw import RawClient
from support.stage import Actor, chat_body, post_to
from support.talking import fleet_is_up, talking_router
from support.tenant import key_of, tenant_config

if TYPE_CHECKING:
    from pathlib import Path

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
PROMPT = "CANARY words that nobody may log"


async def test_each_request_is_a_line_without_its_text_and_its_trace_passes_unchanged(
    tmp_path: Path,
) -> None:
    actor = Actor("a")
    actor.url = f"http://{(await actor.replica.start()).authority}"
    path = tmp_path / "access.jsonl"
    config: dict[str, Any] = {
        "replicas": [{"url": actor.url, "name": "a"}],
        "attend_sidecars": False,
        "health": {"interval_s": 0.1},
        "access_log": {"path": str(path)},
        **tenant_config(tmp_path, "acme"),
    }
    async with LocalFleet(tmp_path, FleetPlan(replicas=0, routers=0)) as fleet:
        config["state"] = {"redis": fleet.state_url}
        async with talking_router(fleet, tmp_path, "router", **config) as router:
            await fleet_is_up(fleet, router)
            client = await RawClient.connect(router.port)
            body = chat_body(PROMPT)
            bearer = f"Bearer {key_of('acme')}"
            headers = {"Authorization": bearer, "X_Request_Id": "mine", "Traceparent": PARENT}
            client.send(post_to(body, **headers))
            assert (await client.reply()).status == 200
            client.send(post_to(body, Authorization="Bearer CANARY-key"))
            assert (await client.reply()).status == 401
            await client.close()

            async def is_logged() -> bool:
                return path.exists() and path.read_text().count("\n") == 2

            await until(is_logged, "both requests are logged")
            accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
            async with fleet.http.get(f"{router.admin_url}/metrics", headers=accept) as answer:
                kind, text = answer.headers["Content-Type"], await answer.text()
    await actor.replica.stop()
    [sent] = actor.posts()
    assert sent.all(b"traceparent") == [PARENT.encode()]
    assert "CANARY" not in path.read_text()
    good, refused = map(json.loads, path.read_text().splitlines())
    assert (good["client_request_id"], good["trace_id"], good["tenant"]) == ("mine", TRACE, "acme")
    assert (good["replica"], good["status"], good["outcome"]) == ("a", 200, "done")
    assert good["request_bytes"] >= len(body)
    assert good["response_bytes"] > 0
    assert good["duration_s"] >= good["ttft_s"] > 0
    assert (refused["status"], refused["outcome"], refused["tenant"]) == (401, "refused", None)
    assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    families = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    traced = {
        family.name
        for family in families
        for sample in family.samples
        if sample.exemplar and sample.exemplar.labels == {"trace_id": TRACE}
    }
    assert traced == {"warmroute_ttft_seconds", "warmroute_request_duration_seconds"}
