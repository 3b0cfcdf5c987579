"""``warmroute replay`` before it sends anything, and without a target: what its flags mean."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from policies.round_robin import RoundRobin
from policies.weighted import Weighted
from replay.setting import FleetSettings
from replay.trace import TraceRequest
from router.config import Config
from sidecar.clock import LLAMA_8B_H100, StepCost
from warmroute.cli import UsageError, main
from warmroute.replay_fleet import add_fleet_flags, bounds_of, fleet_of
from warmroute.replay_input import (
    Feed,
    add_input_flags,
    kind_of,
    policies_of,
    policy_of,
    read_feed,
)


@pytest.fixture(name="trace")
def trace_file(tmp_path: Path) -> Path:
    """Two sessions of two turns each."""
    path = tmp_path / "t.jsonl"
    ids = ([0, 1], [0, 2], [0, 1, 3, 4], [0, 2, 5, 6])
    lines = [
        {
            "timestamp": 2_000 * at,
            "input_length": 512 * len(one),
            "output_length": 20,
            "hash_ids": one,
        }
        for at, one in enumerate(ids)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


LIVE = ["--target", "http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "http://10.1.2.3:80"], "--target: 10.1.2.3 is not this machine: "),
        (["--target", "router"], "--target: expected http://host:port, got 'router'"),
        ([*LIVE, "--replicas", "2"], "--replicas: not with --target"),
        ([*LIVE, "--policy", "weighted"], "--policy: not with --target"),
        ([*LIVE, "--event-delay", "0"], "--event-delay: not with --target"),
        ([*LIVE, "--resume"], "--resume: expected --journal FILE"),
        ([*LIVE, "--vocab-size", "7"], "--vocab-size: expected at least 8"),
        ([*LIVE, "--vocab-size", "8", "--shrink", "512"], "blocks of 1 tokens, each one of 6, "),
        (["--shrink", "2"], "--shrink: only with --target"),
        (["--timeout", "2"], "--timeout: only with --target"),
        (["--allow-remote"], "--allow-remote: only with --target"),
        (["--policy", "fastest"], "--policy.kind: expected "),
        (["--policy", "{kind: weighted, w_queue: -1}"], "--policy.w_queue: Expected `float` >= 0"),
        (["--policy", "{kind: weighted"], "--policy: neither a kind nor YAML: "),
        (["--policy", "random", "--policy", "random"], "--policy: random is there twice"),
        (["--fleet", "/no/such.yaml"], "--fleet: /no/such.yaml: No such file or directory"),
        (
            ["--json", "/no/such/dir/x.json"],
            "--json: /no/such/dir/x.json: expected a file in a dir",
        ),
        (["--html", "/"], "--html: /: expected a file in a dir"),
        (["--decisions", "log"], "--decisions: there is a trace, too: "),
    ],
)
def test_wrong_words_are_refused_by_name(
    trace: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # A vocabulary of six has too few blocks of one token: make the trace have more of them.
    if "512" in words:
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        lines[0] |= {"input_length": 512 * 20, "hash_ids": list(range(20))}
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", str(trace), *words]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"warmroute replay: {said}")
    assert out == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--limit", "0"], "--limit: expected a whole number of at least 1, got '0'"),
        (["--rate", "nan"], "--rate: expected a number above 0, got 'nan'"),
        (["--event-delay", "-1"], "--event-delay: expected a number of at least 0, got '-1'"),
        (["--rate", "1", "--speed", "2"], "not allowed with argument"),
        (["--seed", "-1"], "--seed: expected a whole number below 2**63, got '-1'"),
    ],
)
def test_values_out_of_range_end_with_the_usage(
    trace: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(trace), *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["no-such.jsonl", "."])
def test_a_trace_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / name)
    assert main(["replay", path]) == 2
    assert capsys.readouterr().err.startswith(f"warmroute replay: {Path(path)}: ")


def test_a_bad_line_is_named_with_its_file(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text(trace.read_text().replace("1024", "-1", 1))
    assert main(["replay", str(trace)]) == 2
    assert capsys.readouterr().err.startswith(f"warmroute replay: {trace}: line 1: ")


def test_without_a_trace_the_usage_says_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["replay"]) == 2
    assert "expected TRACE, or --decisions LOG" in capsys.readouterr().err


def test_a_decision_log_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--decisions", "/no/such.log"]) == 2
    assert "/no/such.log" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("round_robin", RoundRobin()),
        ("{kind: weighted, w_queue: 2}", Weighted(w_queue=2)),
        ('{"kind": "weighted", "w_prefix": 0.5}', Weighted(w_prefix=0.5)),
    ],
)
def test_a_policy_is_a_kind_or_a_mapping_with_one(text: str, policy: object) -> None:
    assert policy_of(text) == policy


def test_a_policy_of_nothing_is_refused() -> None:
    for text in ("", "3", "[weighted]"):
        with pytest.raises(UsageError, match="--policy"):
            policy_of(text)


def test_policies_are_called_by_kind_where_that_tells_them_apart() -> None:
    texts = ["random", "{kind: weighted,  w_queue: 2}", "{kind: weighted, w_queue: 3}"]
    assert list(policies_of(texts)) == ["random", *(" ".join(text.split()) for text in texts[1:])]


def test_without_a_policy_it_is_the_routers_own() -> None:
    own = Config().policy
    assert policies_of([]) == {kind_of(own): own}


def test_policies_are_compared_in_virtual_time(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("replicas: 3\ncost: llama-8b-h100\n")
    words = ["--fleet", str(fleet), "--replicas", "2", "--policy", "least_loaded", "--bounds"]
    words += ["--policy", "round_robin", "--json", "-", "--html", str(page), "--slo-ttft", "9"]
    assert main(["replay", str(trace), *words]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert err == ""
    assert [run["name"] for run in told["runs"]] == ["least_loaded", "round_robin"]
    assert {len(run["score"]["replicas"]) for run in told["runs"]} == {2}
    assert [row["name"] for row in told["comparison"]["rows"]][:2] == ["pooled", "infinite"]
    assert told["runs"][0]["score"]["goodput"]["ttft_limit_s"] == 9
    assert "live" not in told
    assert "<html" in page.read_text()


def test_without_json_the_report_is_for_people(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace), "--policy", "round_robin"]) == 0
    assert "Replay of t.jsonl" in capsys.readouterr().out


def arrivals(trace: Path, *words: str) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    add_input_flags(parser)
    feed = read_feed(parser.parse_args([str(trace), *words]), 0)
    return [round(one.arrival_s, 3) for one in feed.requests]


def test_a_trace_is_cut_spread_and_paced_as_the_flags_say(trace: Path) -> None:
    assert arrivals(trace) == [0, 2, 4, 6]
    assert arrivals(trace, "--limit", "2") == [0, 2]
    assert arrivals(trace, "--speed", "4") == [0, 0.5, 1, 1.5]
    assert arrivals(trace, "--rate", "2") == [0, 0.5, 1, 1.5]
    spread = arrivals(trace, "--jitter", "1")
    assert spread != arrivals(trace)
    assert spread == sorted(spread)
    assert spread == arrivals(trace, "--jitter", "1")
    faster = arrivals(trace, "--jitter", "1", "--speed", "2")
    assert faster == pytest.approx([one / 2 for one in spread], abs=0.001)


def test_a_rate_needs_more_than_one_arrival_time(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_text(re.sub('"timestamp": [0-9]+', '"timestamp": 0', trace.read_text()))
    assert main(["replay", str(trace), "--rate", "2"]) == 2
    assert capsys.readouterr().err.startswith("warmroute replay: --rate: requests: expected more")


def test_bad_lines_are_passed_over_and_told(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_text(trace.read_text().replace("1024", "-1", 1))
    assert main(["replay", str(trace), "--skip-bad", "--policy", "round_robin"]) == 0
    assert "1 bad lines were passed over: line 1: " in capsys.readouterr().out


def fleet(*words: str) -> FleetSettings:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    add_fleet_flags(parser)
    return fleet_of(parser.parse_args(list(words)))


def test_flags_win_over_the_file_of_the_fleet(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("replicas: 3\nrouters: 2\ncost: llama-8b-h100\nevent_delay_s: 9\n")
    assert fleet() == FleetSettings()
    assert fleet("--fleet", str(path), "--replicas", "5", "--event-delay", "250") == FleetSettings(
        replicas=5,
        routers=2,
        cost=LLAMA_8B_H100,
        kv_bytes_per_token=131_072,
        event_delay_s=0.25,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("replicas: 0", "replicas: Expected `int` >= 1"),
        ("replica: 2", "replica: no such setting; did you mean replicas\\?"),
        ("cost: fast", "cost: expected llama-8b-h100, .* or a mapping"),
        ("- 1", "expected a mapping"),
        ("{", "not YAML"),
    ],
)
def test_a_wrong_file_of_the_fleet_is_named_with_the_field(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=rf"--fleet: {path}: .*{said}"):
        fleet("--fleet", str(path))


def test_bounds_have_one_memory_and_the_infinite_one_holds_the_whole_trace() -> None:
    request = TraceRequest(arrival_s=0, prompt_tokens=900, output_tokens=100, chain=())
    feed = Feed(name="t", block_tokens=64, requests=(request,) * 50)
    settings = FleetSettings(replicas=4, capacity_tokens=1_000, event_delay_s=1, event_loss=0.5)
    bounds = bounds_of(feed, settings)
    assert list(bounds) == ["pooled", "infinite"]
    assert all(one.is_pooled and not one.event_delay_s + one.event_loss for one in bounds.values())
    assert bounds["pooled"].capacity_tokens == 1_000
    assert 4 * bounds["infinite"].capacity_tokens >= 50 * 1_000


def test_the_cost_that_a_calibration_wrote_is_the_fleets_clock(tmp_path: Path) -> None:
    path = tmp_path / "cost.yaml"
    path.write_text(
        "step_ms: 5\nprefill_token_ms: 0.03\nattention_pair_ms: 0\n"
        "decode_sequence_ms: 0.1\nkv_token_read_ms: 0\n"
    )
    assert fleet("--cost", str(path)).cost == StepCost(
        step_ms=5,
        prefill_token_ms=0.03,
        attention_pair_ms=0,
        decode_sequence_ms=0.1,
        kv_token_read_ms=0,
    )
    path.write_text("step_ms: fast\n")
    with pytest.raises(UsageError, match=r"--cost: .*cost\.yaml: cost\.step_ms: Expected `float`"):
        fleet("--cost", str(path))
    with pytest.raises(UsageError, match=r"--cost: expected llama-8b-h100, .* or a file, got 'h2'"):
        fleet("--cost", "h2")
