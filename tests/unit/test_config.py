"""The configuration: every wrong key is named by its path."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from policies.round_robin import RoundRobin
from policies.weighted import Weighted
from router.config import Config, ConfigError, decode_config, load_config, split_address

ROOT = Path(__file__).parents[2]


def test_an_empty_file_is_the_default_configuration(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert load_config(path) == Config()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"lisen": "a:1"}, "lisen"),
        ({"policy": {"kind": "weighted", "w_que": 1}}, "policy"),
        ({"policy": {"kind": "magic"}}, "policy"),
        ({"policy": {"kind": "weighted", "w_queue": -1}}, "policy.w_queue"),
        ({"health": {"fall": 0}}, "health.fall"),
        ({"health": {"interval_s": "fast"}}, "health.interval_s"),
        ({"replicas": [{"url": "http://a:1"}, {"name": "b"}]}, "replicas[1]"),
        ({"replicas": [{"url": "https://a:1/v1"}]}, "replicas[0].url"),
        ({"replicas": [{"url": "unix:run/x"}]}, "replicas[0].url"),
        ({"replicas": [{"url": "unix:/.x"}]}, "replicas[0]"),
        ({"listen": "unix:run/x"}, "listen"),
        ({"listen_tls": {"certificate": "c"}}, "listen_tls"),
        (
            {"listen": "unix:/run/x", "listen_tls": {"certificate": "c", "key": "k"}},
            "listen_tls",
        ),
        ({"admin": None, "admin_tls": {"certificate": "c", "key": "k"}}, "admin_tls"),
        (
            {"admin_tls": {"certificate": "c", "key": "k", "min_version": "1.1"}},
            "admin_tls.min_version",
        ),
        ({"socket_mode": "rw"}, "socket_mode"),
        ({"upstream": {"tls": {"verify": False}}}, "upstream.tls"),
        ({"replicas": [{"url": "http://a:1/v1"}]}, "replicas[0].url"),
        ({"replicas": [{"url": "http://u:p@a:1"}]}, "replicas[0].url"),
        ({"replicas": [{"url": "http://a:99999"}]}, "replicas[0].url"),
        ({"replicas": [{"url": 'http://a"b:1'}]}, "replicas[0].url"),
        ({"replicas": [{"url": "http://a:1//"}]}, "replicas[0].url"),
        ({"replicas": [{"url": "http://a:1"}, {"url": "http://a:1/"}]}, "replicas[1]"),
        ({"replicas": [{"url": "http://a:1", "name": "x y"}]}, "replicas[0].name"),
        ({"listen": "8080"}, "listen"),
        ({"admin": "localhost:http"}, "admin"),
        ({"limits": {"body_bytes": 0}}, "limits.body_bytes"),
        ({"state": {"redis": "redis+cluster://h:1,k:2/3"}}, "state.redis"),
        ({"state": {"lookup": "both"}}, "state.lookup"),
        ({"models": [{"name": "m", "tokenizer": "a"}, {"name": "m", "tokenizer": "b"}]}, "models"),
        ({"models": [{"name": "m"}]}, "models[0]"),
        ({"models": [{"name": "m", "tokenizer": "a", "tokens": "bytes"}]}, "models[0]"),
        ({"models": [{"name": "m", "tokens": "guess"}]}, "models[0].tokens"),
        ({"tokens": {"source": "guess"}}, "tokens.source"),
        ({"tokens": {"patience_s": 0}}, "tokens.patience_s"),
        ({"policy": {"kind": "weighted", "lower_tier_credit": 2}}, "policy.lower_tier_credit"),
        ({"kv_transfer": {"min_tokens": 0}}, "kv_transfer.min_tokens"),
        ({"hold": {"enabled": True}, "state": {"lookup": "direct"}}, "hold.enabled"),
        ({"hold": {"ageing": -1}}, "hold.ageing"),
        ({"kv_transfer": {"enabled": "yes"}}, "kv_transfer.enabled"),
        ({"kv_transfer": {"tokens": 1}}, "kv_transfer"),
        ({"paths": ["v1/audio/speech"]}, "paths[0]"),
        ({"paths": ["/v1/../admin"]}, "paths[0]"),
        ({"paths": ["/a?b=c"]}, "paths[0]"),
        ({"paths": ["/a", "/b\n"]}, "paths[1]"),
        ({"paths": ["//a"]}, "paths[0]"),
        ({"paths": ["/a*"]}, "paths[0]"),
        ({"paths": ["/*/a"]}, "paths[0]"),
        ({"paths": ["*"]}, "paths[0]"),
        ([], "the file"),
    ],
)
def test_a_wrong_key_is_named_by_its_path(raw: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_config(raw)
    assert expected in str(caught.value).split(":")[0] or expected in str(caught.value)


KINDS = [
    "aibrix",
    "bounded_hash",
    "dynamo",
    "expected_ttft",
    "kthena",
    "least_loaded",
    "least_work",
    "llm_d",
    "llm_d_precise",
    "llm_d_sticky",
    "loadaware",
    "mooncake",
    "power_of_two",
    "preble",
    "random",
    "round_robin",
    "session_hash",
    "smg_event",
    "smg_tree",
    "weighted",
]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"state": {"lookup": "both"}}, "state.lookup: expected direct or mirror, got 'both'"),
        (
            {"models": [{"name": "m", "tokens": "guess"}]},
            "models[0].tokens: expected bytes or engine or off, got 'guess'",
        ),
        (
            {"policy": {"kind": "best"}},
            f"policy.kind: expected {' or '.join(KINDS)}, got 'best'",
        ),
        (
            {"paths": ["/a", "b"]},
            "paths[1]: expected a plain path such as /v1/audio/speech or /v1/*",
        ),
        (
            {"replicas": [{"url": "http://a:1", "name": "-x"}]},
            (
                "replicas[0].name: expected a name of up to 128 letters, digits and . _ : @ - "
                "without a sign in front"
            ),
        ),
    ],
)
def test_a_wrong_choice_is_told_the_right_ones(raw: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_config(raw)
    assert str(caught.value) == message


def test_an_unknown_key_is_named_by_its_own_name() -> None:
    with pytest.raises(ConfigError) as caught:
        decode_config({"hot_prefix": {"sahre": 1}})
    assert str(caught.value) == "hot_prefix.sahre: no such setting; did you mean share?"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"receits": True}, "receits: no such setting; did you mean receipts?"),
        ({"colour": "red"}, "colour: no such setting"),
        (
            {"replicas": [{"url": "http://a:1"}, {"url": "http://a:2", "nmae": "b"}]},
            "replicas[1].nmae: no such setting; did you mean name?",
        ),
        (
            {"policy": {"kind": "weighted", "w_copy": 1}},
            (
                "policy.w_copy: policy weighted has no w_copy; it has w_queue, w_prefix, w_recent, "
                "tokens_scale, tie_margin, lower_tier_credit"
            ),
        ),
        (
            {"shadow": {"policy": {"kind": "round_robin", "w_copy": 1}}},
            "shadow.policy.w_copy: policy round_robin has no w_copy; it has no settings",
        ),
        (
            {"policy": {"kind": "expected_ttft", "prefill": {"token": 1}}},
            "policy.prefill.token: no such setting; did you mean token_ms?",
        ),
    ],
)
def test_a_misspelled_key_is_told_by_its_path_and_what_was_meant(raw: object, message: str) -> None:
    """Of policies only those of the kind that was chosen are named."""
    with pytest.raises(ConfigError) as caught:
        decode_config(raw)
    assert str(caught.value) == message


def test_the_policy_is_chosen_by_its_kind() -> None:
    assert decode_config({"policy": {"kind": "round_robin"}}).policy == RoundRobin()
    weighted = decode_config({"policy": {"kind": "weighted", "w_prefix": 2.5}}).policy
    assert isinstance(weighted, Weighted)
    assert weighted.w_prefix == 2.5


def test_a_key_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    """Else the last one counts: half of the tenants would be gone without a word."""
    path = tmp_path / "twice.yaml"
    path.write_text("health: {}\npolicy: {kind: random}\nhealth: {fall: 5}\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml: .*'health' occurs twice.*line 3"):
        load_config(path)


def test_a_file_that_is_no_yaml_or_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("listen: [")
    with pytest.raises(ConfigError, match=r"bad\.yaml: not YAML"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_config(tmp_path / "none.yaml")


def test_addresses_may_be_ipv6() -> None:
    assert split_address("listen", "[::1]:8080") == ("::1", 8080)


def test_the_annotated_example_lists_every_key_with_its_default() -> None:
    """The example must stay true: same keys at the top, same values as the code's defaults."""
    raw = yaml.safe_load((ROOT / "examples" / "warmroute.yaml").read_text())
    config = decode_config(raw)
    known = msgspec.to_builtins(Config())
    assert set(raw) == set(known)
    for section, keys in known.items():
        if isinstance(keys, dict):
            assert set(raw[section]) == set(keys), section
    assert set().union(*raw["replicas"]) == {"url", "name", "kv_capacity_tokens"}
    assert msgspec.structs.replace(config, replicas=()) == Config()


def test_a_replica_url_with_credentials_is_refused_without_showing_them() -> None:
    """G-02."""
    with pytest.raises(ConfigError) as refused:
        decode_config({"replicas": [{"url": "http://user:CANARY@a:1"}]})
    assert "CANARY" not in str(refused.value)
