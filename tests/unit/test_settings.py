"""Partial configurations over a file's: merged, judged, compared."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.expected_ttft import ExpectedTtft
from policies.weighted import Weighted
from router.config import Config, ConfigError, StateSettings
from router.setting_view import DrainBody
from router.settings import FIXED, SECTIONS, SettingRules, drained, leaves, over

RULES = SettingRules(Config(policy=Weighted(w_queue=2.0, w_prefix=3.0)))


def test_without_a_document_the_file_is_in_force() -> None:
    live = RULES.in_force({})

    config = Config(policy=Weighted(w_queue=2.0, w_prefix=3.0))
    assert RULES.config_of(live) == config
    assert set(RULES.sources({}).values()) == {"file"}
    assert drained(live) == frozenset()


def test_a_document_overrides_the_file_key_by_key() -> None:
    settings = {"policy": {"w_queue": 0.5}, "admission": {"overload": {"recover_s": 1}}}

    live = RULES.in_force(settings)

    assert live.policy == Weighted(w_queue=0.5, w_prefix=3.0)
    assert live.admission.overload.recover_s == 1.0
    assert live.admission.overload.lag_s.close == 1.0
    told = [key for key, source in RULES.sources(settings).items() if source == "document"]
    assert told == ["policy.w_queue", "admission.overload.recover_s"]


def test_a_policy_of_another_kind_takes_nothing_of_the_files() -> None:
    live = RULES.in_force({"policy": {"kind": "least_loaded"}})

    assert type(live.policy).__name__ == "LeastLoaded"
    assert RULES.sources({"policy": {"kind": "least_loaded"}})["policy.kind"] == "document"


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"policy": {"w_queue": -0.1}}, r"policy\.w_queue: Expected `float` >= 0"),
        ({"policy": {"w_queue": 1_001}}, r"policy\.w_queue: Expected `float` <= 1000"),
        ({"policy": {"w_wrong": 1}}, "w_wrong"),
        ({"policy": 3}, "policy: Expected"),
        ({"health": {"rise": 1.5}}, r"health\.rise: Expected `int`"),
        ({"replicas": []}, "replicas"),
        ({"drains": ["a", "a"]}, "drains: a replica occurs twice"),
        ({"drains": "w0"}, "drains: Expected `array`"),
        ({"policy": {"kind": "preble"}}, r"policy\.kind: expected one that does not keep"),
    ],
)
def test_a_wrong_value_is_named_with_its_range(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        RULES.in_force(settings)


@pytest.mark.parametrize("key", FIXED)
def test_what_only_a_start_can_change_is_refused_by_name(key: str) -> None:
    settings: dict[str, Any] = {}
    inner = settings
    *path, last = key.split(".")
    for part in path:
        inner = inner.setdefault(part, {})
    inner[last] = {"initial": 3} if last == "learning" else 5_000

    with pytest.raises(ConfigError, match=rf"^{key}: expected in the configuration file only"):
        RULES.in_force(settings)


def test_holding_stays_off_where_the_store_is_asked_per_request() -> None:
    rules = SettingRules(Config(state=StateSettings(lookup="direct")))

    with pytest.raises(ConfigError, match=r"hold\.enabled"):
        rules.in_force({"hold": {"enabled": True}})


def test_a_router_that_was_started_for_placements_takes_policies_that_keep_them() -> None:
    rules = SettingRules(Config(), keeps_placements=True)

    assert type(rules.in_force({"policy": {"kind": "preble"}}).policy).__name__ == "Preble"


def test_a_patch_sets_keys_and_null_gives_them_back_to_the_file() -> None:
    before = {"policy": {"kind": "weighted", "w_queue": 1}, "hold": {"ageing": 0.5}}

    after = RULES.patched(before, {"policy": {"w_recent": 2}, "hold": {"ageing": None}})

    assert after == {"policy": {"kind": "weighted", "w_queue": 1, "w_recent": 2}}
    assert before["hold"] == {"ageing": 0.5}
    assert RULES.patched(after, {"policy": None}) == {}


def test_weights_go_with_the_kind_that_they_belong_to() -> None:
    pinned = RULES.patched({}, {"policy": {"w_queue": 1}})
    assert pinned == {"policy": {"kind": "weighted", "w_queue": 1}}

    other = RULES.patched(pinned, {"policy": {"kind": "round_robin"}})
    assert other == {"policy": {"kind": "round_robin"}}
    assert RULES.patched(other, {"policy": {"kind": "weighted", "w_queue": 4}}) == {
        "policy": {"kind": "weighted", "w_queue": 4}
    }


def test_a_pinned_kind_makes_routers_with_another_file_agree() -> None:
    settings = RULES.patched({}, {"policy": {"w_queue": 0.25}})

    live = SettingRules(Config()).in_force(settings)

    assert live.policy == Weighted(w_queue=0.25)


def test_the_difference_is_of_values_in_force_and_not_of_documents() -> None:
    assert RULES.difference({}, {"policy": {"w_queue": 2.0}}) == []
    [change] = RULES.difference({"policy": {"w_queue": 1.0}}, {})
    assert (change.key, change.before, change.after) == ("policy.w_queue", 1.0, 2.0)
    keys = [row.key for row in RULES.difference({}, {"policy": {"kind": "least_loaded"}})]
    assert "policy.kind" in keys
    assert "policy.w_queue" in keys
    rows = RULES.difference({}, {"policy": {"kind": "expected_ttft"}})
    assert not [row.key for row in rows if row.before is None and row.after is None]


def test_a_policy_of_another_kind_is_compared_with_the_weights_that_nobody_told() -> None:
    told = {row.key: row for row in RULES.difference({}, {"policy": {"kind": "expected_ttft"}})}

    assert (told["policy.w_prefix"].before, told["policy.w_prefix"].after) == (3.0, None)
    assert (told["policy.w_copy"].before, told["policy.w_copy"].after) == (
        None,
        ExpectedTtft().w_copy,
    )
    back = RULES.difference({"policy": {"kind": "expected_ttft"}}, {})
    assert {row.key: row.before for row in back} == {key: row.after for key, row in told.items()}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner, max_size=2)
    ),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from([*SECTIONS, "drains", "canary", "a"]), VALUES, max_size=4)


@given(OBJECTS, OBJECTS)
def test_no_document_and_no_patch_raises_anything_but_what_names_a_key(
    settings: dict[str, Any], patch: dict[str, Any]
) -> None:
    patched = RULES.patched(settings, patch) if _is_judged(settings) else settings
    list(leaves(over(RULES.base, patched)))
    RULES.difference(settings, patched)
    _is_judged(patched)


def _is_judged(settings: dict[str, Any]) -> bool:
    try:
        RULES.in_force(settings)
    except ConfigError:
        return False
    return True


@given(OBJECTS)
def test_a_patch_leaves_no_null_and_no_empty_object_of_its_own(patch: dict[str, Any]) -> None:
    after = RULES.patched({}, patch)

    assert all(value is not None for _, value in leaves(after))
    assert {} not in after.values()


def test_who_and_why_are_lines() -> None:

    for wrong in ("", " ", "two\nlines", "x" * 129, "bell\a"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"author": wrong, "reason": "r"}, DrainBody)
    assert msgspec.convert({"author": "ann", "reason": "é ok"}, DrainBody).author == "ann"


def test_the_last_weight_that_is_given_back_leaves_no_pin_of_the_files_kind() -> None:
    """Else a file with another policy would count for nothing after the next start."""
    changed = RULES.patched({}, {"policy": {"w_queue": 1}})
    assert RULES.patched(changed, {"policy": {"w_queue": None}}) == {}
    assert RULES.patched({}, {"policy": {"w_queue": None}}) == {}
    assert RULES.patched({}, {"policy": {"kind": "weighted"}}) == {"policy": {"kind": "weighted"}}
    other = {"policy": {"kind": "expected_ttft", "w_copy": 1}}
    assert RULES.patched(other, {"policy": {"w_copy": None}}) == {
        "policy": {"kind": "expected_ttft"}
    }
