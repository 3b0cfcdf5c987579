"""What a sidecar counts over several lives of its engine, and when silence is suspect."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sidecar.change import FoldCounts
from sidecar.fold import PageFolder
from sidecar.metrics import RenewalReason, SidecarMetrics
from sidecar.scrape import EngineMetrics, parse_metrics
from sidecar.silence import Silence
from sidecar.subscriber import EventSource, EventSubscriber
from state.model import ModelIdentity, ReplicaId, ReplicaLoad

REPLICA = ReplicaId("r1")
SOURCE = EventSource(events="tcp://127.0.0.1:1")
IDENTITY = ModelIdentity(model="m", block_tokens=4)


def shown(metrics: SidecarMetrics) -> dict[str, float]:
    return {
        sample.name.removeprefix("warmroute_sidecar_")
        + sample.labels.get("reason", ""): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_counters_go_on_over_the_lives_of_an_engine() -> None:
    """B50: a new folder and a new subscriber begin at zero, and no counter ever falls."""
    metrics = SidecarMetrics(REPLICA)
    for life in (1, 2, 3):
        subscriber = EventSubscriber(SOURCE)
        metrics.follow_subscriber(subscriber)
        folder = PageFolder(IDENTITY, 4)
        metrics.follow_folder(folder, RenewalReason.RESTARTED)
        before = shown(metrics)
        assert before["event_gaps_total"] == 2 * (life - 1)
        subscriber.gaps += 2
        subscriber.dropped_batches += 5
        folder.counts.unknown_pages += 7
        folder.orphans.dropped += 1
        now = shown(metrics)
        assert now["event_gaps_total"] == 2 * life
        assert now["dropped_event_batches_total"] == 5 * life
        assert now["unknown_pages_total"] == 7 * life
        assert now["dropped_orphans_total"] == life
        assert now["generations_totalrestarted"] == life


def test_whatever_a_folder_or_a_subscriber_counts_is_shown() -> None:
    """B50: no counter that only a debugger could read."""
    metrics = SidecarMetrics(REPLICA)
    names = shown(metrics).keys()
    assert {f"{field.name}_total" for field in dataclasses.fields(FoldCounts)} <= names
    counted = {name for name, value in vars(EventSubscriber(SOURCE)).items() if type(value) is int}
    assert counted == {"malformed_messages", "dropped_batches", "gaps", "missed_batches"}
    for name in ("malformed_event_messages", "dropped_event_batches", "event_gaps"):
        assert f"{name}_total" in names


def test_every_series_is_explained_to_operators() -> None:
    """B50: docs/sidecar.md names whatever is exported."""
    document = (Path(__file__).resolve().parents[2] / "docs" / "sidecar.md").read_text()
    explained = set(re.findall(r"`([a-z_]+)", document))
    metrics = SidecarMetrics(REPLICA)
    names = {
        name.partition("generations_total")[0] or "generations_total" for name in shown(metrics)
    }
    assert len(names) > 15
    assert [name for name in sorted(names) if name not in explained] == []


def worked(*, running: int | None = None, prompt_tokens: int | None = None) -> EngineMetrics:
    return EngineMetrics(load=ReplicaLoad(running=running), prompt_tokens=prompt_tokens)


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([worked(running=0, prompt_tokens=500)] * 3, False),
        ([worked(running=1)] * 3, True),
        ([worked(prompt_tokens=5), worked(prompt_tokens=6), worked(prompt_tokens=6)], True),
        ([worked(prompt_tokens=6), worked(prompt_tokens=0), worked(prompt_tokens=0)], False),
        ([worked(), worked(), worked()], False),
        ([None, None, None], False),
        ([worked(running=1), None, worked(running=0)], True),
    ],
)
def test_only_an_engine_that_was_seen_working_can_be_silent(
    looks: list[EngineMetrics | None], expected: object
) -> None:
    """B50: an idle engine, one that restarted and one that tells nothing are not suspect."""
    silence = Silence(REPLICA, timeout_s=10.0)
    told = [silence.look(SOURCE, metrics, 11.0 * at) for at, metrics in enumerate(looks)]
    told.append(silence.look(SOURCE, None, 11.0 * len(looks)))
    assert told[0] is False
    assert told[-1] is expected


def test_silence_ends_with_the_first_batch_and_begins_anew_with_another_source() -> None:
    """B50: prompts that are all cached make no events, so later silence proves nothing."""
    silence = Silence(REPLICA, timeout_s=10.0)
    busy = worked(running=1)
    assert [silence.look(SOURCE, busy, at) for at in (0.0, 9.9, 10.0)] == [False, False, True]
    silence.hear()
    assert [silence.look(SOURCE, busy, at) for at in (11.0, 100.0)] == [False, False]
    silence.begin()
    assert [silence.look(SOURCE, busy, at) for at in (101.0, 111.0)] == [False, True]
    assert not silence.look(None, busy, 120.0)


def test_prompt_tokens_are_read_from_vllm_and_sglang() -> None:
    """B50: what tells that an engine works; summed over its ranks, None where it is not told."""
    text = 'vllm:prompt_tokens_total{engine="0"} 7.0\nvllm:prompt_tokens_total{engine="1"} 5.0\n'
    assert parse_metrics(text).prompt_tokens == 12
    assert parse_metrics("sglang:prompt_tokens_total 3.0\n").prompt_tokens == 3
    assert parse_metrics("").prompt_tokens is None
