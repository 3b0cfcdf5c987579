"""What each of several processes gets of every limit: in total never more than is configured."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from router.config import Config, ConfigError, decode_config
from router.settings import SettingRules
from router.supervisor.share import seated, share_of

PROCESSES = 3
TENANT = {
    "name": "acme",
    "scope": "acme",
    "keys": [],
    "quota": {"max_inflight": 7, "new_blocks_per_s": 9.0, "index_bytes": 1 << 20},
}


def config(**fields: Any) -> Config:
    return decode_config({"processes": PROCESSES, **fields})


def amounts(of: Config) -> dict[str, float | None]:
    """Return every bound on a sum over processes."""
    found: dict[str, float | None] = {
        "connections": of.limits.connections,
        "connections_per_address": of.limits.connections_per_address,
        "buffered_bytes": of.limits.buffered_bytes,
        "max_inflight": of.admission.max_inflight,
        "pending": of.admission.pending,
        "memory_bytes": of.admission.overload.memory_bytes,
        "max_queue": of.hold.max_queue,
        "reserve": of.retry.reserve,
        "per_s": of.retry.per_s,
        "recording": of.recording.max_bytes,
        "prompts": of.prompt_bytes,
        "traces": of.tracing.parents_per_s,
        "decisions": of.decisions.max_bytes,
        "access_log": of.access_log.max_bytes,
    }
    for tenant in of.tenants:
        found["tenant_inflight"] = tenant.quota.max_inflight
        found["tenant_blocks"] = tenant.quota.new_blocks_per_s
        found["tenant_index"] = tenant.quota.index_bytes
    return found


def whole(**fields: Any) -> Config:
    admission = {"max_inflight": 100, "overload": {"memory_bytes": 1 << 30}}
    return config(admission=admission, **fields)


def test_no_limit_becomes_larger_than_it_was_told() -> None:
    told = whole(retry={"reserve": 3, "per_s": 100.0})
    quota = structs.replace(told, tenants=())
    for key, part in amounts(share_of(quota)).items():
        total = amounts(quota)[key]
        assert part is not None
        assert total is not None
        assert 0 < part * PROCESSES <= total, key
        assert part * PROCESSES > total - PROCESSES, key


def test_one_process_goes_by_the_configuration_itself() -> None:
    told = decode_config({"admission": {"max_inflight": 1}})
    assert share_of(told) is told


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"admission": {"max_inflight": 2}}, "admission.max_inflight"),
        ({"hold": {"max_queue": 1}}, "hold.max_queue"),
        ({"limits": {"connections_per_address": 2}}, "limits.connections_per_address"),
        (
            {"limits": {"body_bytes": 1 << 20, "buffered_bytes": 2 << 20}},
            "limits.buffered_bytes",
        ),
    ],
)
def test_a_limit_that_is_not_enough_for_each_process_is_refused(
    fields: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=rf"\A{key}: expected at least"):
        config(**fields)
    decode_config(fields)  # good for one


def test_live_settings_are_judged_by_the_same_rule() -> None:
    rules = SettingRules(config())
    with pytest.raises(ConfigError, match=r"admission\.max_inflight: expected at least 3"):
        rules.in_force({"admission": {"max_inflight": 2}})
    live = rules.in_force({"admission": {"max_inflight": 9}})
    assert share_of(rules.config_of(live)).admission.max_inflight == 3


def test_what_the_shared_state_keeps_for_all_routers_is_not_divided() -> None:
    told = config(admission={"max_inflight_per_replica": 8})
    assert share_of(told).admission.max_inflight_per_replica == 8
    assert share_of(told).state.mirror_bytes == told.state.mirror_bytes


def test_each_process_writes_files_of_its_own() -> None:
    paths = {"decisions": {"path": "/d"}, "access_log": {"path": "/a"}, "audit_log": "/u"}
    told = config(seed=5, **paths)
    first, second = seated(told, 0), seated(told, 1)
    assert (first.decisions.path, second.decisions.path) == ("/d.p0", "/d.p1")
    assert (first.access_log.path, second.access_log.path) == ("/a.p0", "/a.p1")
    assert (first.audit_log, second.audit_log) == ("/u.p0", "/u.p1")
    assert (first.seed, second.seed) == (5, 6)
    shown = config(access_log={"path": "stderr"})
    assert seated(shown, 1).access_log.path == "stderr"
