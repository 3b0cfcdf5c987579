"""Events captured from a real vLLM in eight configurations, decoded and folded."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from sidecar.event import ClearedPages, EventBatch, RemovedPages, StoredPages, decode_batch
from sidecar.fold import PageFolder
from sidecar.scrape import parse_metrics
from sidecar.sequence import END_SEQUENCE, parse_frames
from state.model import BlockId, ModelIdentity, NamespaceId, Tier
from state.prefix import chain_of, chain_root, namespace_of, pack_tokens, salt_scope
from support.data import data_file

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.data

PAGE_TOKENS = 32
RUNS = 8
SALT = "tenant-1"
_MASK = 2**64 - 1

Resident = dict[tuple[NamespaceId, Tier], set[BlockId]]
Prefix = tuple[str, tuple[int, ...]]
"""A salt and all tokens up to the end of a page."""


@cache
def load(name: str) -> Any:
    return json.loads(data_file(f"kv_events/{name}").read_text("utf-8"))


def runs() -> list[Any]:
    found = load("kv_events_samples.json")["runs"]
    assert len(found) == RUNS
    return list(found)


def plain_handle(value: Any) -> int:
    """Return the handle of a hash as the capture wrote it down: an int or hex bytes."""
    if isinstance(value, dict):
        return int(value["__bytes_hex__"][-16:], 16)
    return int(value) & _MASK


def plain_events(decoded: Any) -> Iterator[dict[str, Any]]:
    names = {
        "BlockStored": ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size"],
        "BlockRemoved": ["type", "block_hashes"],
        "AllBlocksCleared": ["type"],
    }
    for event in decoded[1]:
        if isinstance(event, list):
            yield dict(zip(names[event[0]], event, strict=False))
        else:
            yield event


def assert_decodes_to(message: dict[str, Any]) -> None:
    batch = decode_batch(bytes.fromhex(message["payload_hex"]))
    assert batch.malformed_events == batch.unknown_events == 0
    assert batch.timestamp_s == message["decoded"][0]
    assert batch.dp_rank == message["decoded"][2]
    expected = list(plain_events(message["decoded"]))
    assert len(batch.events) == len(expected)
    for event, plain in zip(batch.events, expected, strict=True):
        if plain["type"] == "AllBlocksCleared":
            assert event == ClearedPages()
            continue
        assert isinstance(event, StoredPages | RemovedPages)
        assert event.handles == tuple(plain_handle(value) for value in plain["block_hashes"])
        assert event.tier is Tier.GPU
        assert event.group == plain.get("group_idx")
        if isinstance(event, StoredPages):
            assert_store_is(event, plain)


def assert_store_is(event: StoredPages, plain: dict[str, Any]) -> None:
    parent = plain["parent_block_hash"]
    assert event.parent == (None if parent is None else plain_handle(parent))
    assert event.page_tokens == plain["block_size"]
    if event.handles:
        assert event.packed_tokens == pack_tokens(plain["token_ids"])
    first_keys = (plain.get("extra_keys") or [None])[0]
    assert event.scope == (salt_scope(first_keys[0]) if first_keys else None)
    assert event.opaque_from is None
    assert event.is_prefix_group is (plain.get("kv_cache_spec_kind") in {None, "full_attention"})


def messages_of(scenario: dict[str, Any]) -> list[dict[str, Any]]:
    return list(scenario.get("messages", scenario.get("messages_within_2s", [])))


def prompts_of(scenario: dict[str, Any]) -> list[list[int]]:
    if "prompts" in scenario:
        return list(scenario["prompts"])
    prompt = scenario.get("prompt_token_ids", [])
    return [prompt + scenario.get("output_token_ids", [])]


def page_prefixes(run: dict[str, Any]) -> dict[int, Prefix]:
    """Return what each handle stands for, from the prompts and the hashes computed for them."""
    prefixes: dict[int, Prefix] = {}
    for scenario in run["scenarios"]:
        salt = ((scenario.get("request") or {}).get("body") or {}).get("cache_salt", "")
        digests = scenario.get("expected_full_hashes_hex") or []
        if digests and not isinstance(digests[0], list):
            digests = [digests]
        if scenario["scenario"] == "client_abort":
            digests = [aborted_chain(scenario)]
        for tokens, chain in zip(prompts_of(scenario), digests, strict=False):
            for page, digest in enumerate(chain):
                prefix = tuple(tokens[: (page + 1) * PAGE_TOKENS])
                assert len(prefix) == (page + 1) * PAGE_TOKENS
                prefixes[int(digest[-16:], 16)] = (salt, prefix)
    return prefixes


def aborted_chain(scenario: dict[str, Any]) -> list[str]:
    """Return the hash of an aborted prompt's one full page; the capture did not compute it."""
    (event,) = [
        event
        for message in messages_of(scenario)
        for event in plain_events(message["decoded"])
        if event["type"] == "BlockStored"
    ]
    assert event["parent_block_hash"] is None
    assert event["token_ids"] == scenario["prompt_token_ids"][:PAGE_TOKENS]
    return [f"{plain_handle(value):016x}" for value in event["block_hashes"]]


def blocks_of(held: set[Prefix], block_tokens: int) -> Resident:
    found: Resident = {}
    for salt, prefix in held:
        if len(prefix) % block_tokens:
            continue
        pages = range(len(prefix) - block_tokens + PAGE_TOKENS, len(prefix) + 1, PAGE_TOKENS)
        if not all((salt, prefix[:end]) in held for end in pages):
            continue
        identity = ModelIdentity(model="tiny", block_tokens=block_tokens, scope=salt_scope(salt))
        chain = chain_of(chain_root(identity, 0), pack_tokens(prefix), block_tokens, 0)
        found.setdefault((namespace_of(identity), Tier.GPU), set()).add(chain[-1])
    return found


def count_copies(scenario: dict[str, Any], copies: Counter[int]) -> None:
    """Follow the physical copies as the capture's own decoding tells them."""
    for message in messages_of(scenario):
        for event in plain_events(message["decoded"]):
            handles = [plain_handle(value) for value in event.get("block_hashes", [])]
            if event["type"] == "AllBlocksCleared":
                copies.clear()
            elif event.get("kv_cache_spec_kind") == "sliding_window":
                continue
            elif event["type"] == "BlockRemoved":
                copies.subtract(handles)
            elif scenario["scenario"] != "report_mode_full":
                copies.update(handles)


@pytest.mark.parametrize("index", range(RUNS))
def test_every_captured_payload_decodes_to_its_values(index: int) -> None:
    messages = [m for scenario in runs()[index]["scenarios"] for m in messages_of(scenario)]
    assert len(messages) >= 20
    for message in messages:
        assert_decodes_to(message)


@pytest.mark.parametrize("block_tokens", [PAGE_TOKENS, 2 * PAGE_TOKENS])
@pytest.mark.parametrize("index", range(RUNS))
def test_folding_gives_exactly_the_blocks_of_the_prompts(index: int, block_tokens: int) -> None:
    """A81: copies are counted, so a removal takes a page only when it was the last copy."""
    run = runs()[index]
    prefixes = page_prefixes(run)
    folder = PageFolder(ModelIdentity(model="tiny", block_tokens=block_tokens), PAGE_TOKENS)
    copies: Counter[int] = Counter()
    announced: Resident = {}
    assert len(run["scenarios"]) == 18
    for scenario in run["scenarios"]:
        count_copies(scenario, copies)
        assert min(copies.values(), default=0) >= 0
        for message in messages_of(scenario):
            batch = decode_batch(bytes.fromhex(message["payload_hex"]))
            follow(folder, batch, announced)
        held = {prefixes[handle] for handle, count in copies.items() if count}
        expected = blocks_of(held, block_tokens)
        assert folder.resident() == expected, scenario["scenario"]
        assert {key: blocks for key, blocks in announced.items() if blocks} == expected
    assert folder.counts.unknown_pages == 0


def follow(folder: PageFolder, batch: EventBatch, announced: Resident) -> None:
    fold = folder.apply(batch.events)
    if fold.is_clear:
        announced.clear()
    for change in fold.changes:
        blocks = announced.setdefault((change.namespace, change.tier), set())
        blocks -= set(change.removed)
        blocks |= set(change.stored)


def test_evictions_salts_and_resets_do_occur_in_the_capture() -> None:
    """The comparison above would be empty without them."""
    seen: Counter[str] = Counter()
    for run in runs():
        for scenario in run["scenarios"]:
            for message in messages_of(scenario):
                seen.update(event["type"] for event in plain_events(message["decoded"]))
        salts = {salt for salt, _ in page_prefixes(run).values()}
        assert salts == {"", SALT}
    assert seen["BlockRemoved"] > 100
    assert seen["AllBlocksCleared"] == RUNS


def test_a_hybrid_model_is_indexed_by_its_full_attention_group() -> None:
    scenarios = load("kv_events_hybrid.json")["scenarios"]
    for block_tokens in (PAGE_TOKENS, 2 * PAGE_TOKENS):
        folder = PageFolder(ModelIdentity(model="tiny", block_tokens=block_tokens), PAGE_TOKENS)
        copies: Counter[int] = Counter()
        prefixes: dict[int, Prefix] = {}
        for scenario in scenarios:
            tokens = scenario["prompt_token_ids"]
            for page, handle in enumerate(scenario["expected_full_hashes_int"]):
                prefixes[handle] = ("", tuple(tokens[: (page + 1) * PAGE_TOKENS]))
            count_copies(scenario, copies)
            for message in scenario["messages"]:
                assert_decodes_to(message)
                folder.apply(decode_batch(bytes.fromhex(message["payload_hex"])).events)
        held = {prefixes[handle] for handle, count in copies.items() if count}
        assert folder.resident() == blocks_of(held, block_tokens)
        assert folder.counts.other_group_events > 0


def test_the_legacy_array_format_decodes_to_its_values() -> None:
    for sample in load("kv_events_legacy_format.json")["samples"]:
        assert_decodes_to(sample)


@pytest.mark.parametrize("index", range(RUNS))
def test_replayed_frames_parse_with_and_without_their_topic(index: int) -> None:
    """B08."""
    replay = runs()[index]["replay"]
    for frames_hex in replay["first_reply_frames_hex"]:
        frames = [bytes.fromhex(frame) for frame in frames_hex]
        batch = parse_frames(frames)
        assert batch is not None
        assert batch.sequence == int(replay["request_frames_hex"][1], 16)
        assert decode_batch(batch.payload).events
        assert parse_frames([frames[0], *frames[2:]]) == batch
    for frames_hex in replay["last_reply_frames_hex"]:
        frames = [bytes.fromhex(frame) for frame in frames_hex]
        for form in (frames, [frames[0], *frames[2:]]):
            end = parse_frames(form)
            assert end is not None
            assert end.sequence == END_SEQUENCE


def test_truncated_and_damaged_payloads_never_raise_anything_else() -> None:
    payload = bytes.fromhex(messages_of(runs()[0]["scenarios"][0])[0]["payload_hex"])
    refused = 0
    for cut in range(0, len(payload), 7):
        for damaged in (payload[:cut], payload[:cut] + b"\xc1" + payload[cut + 1 :]):
            try:
                decode_batch(damaged)
            except ValueError:
                refused += 1
    assert refused > 50
    assert msgspec.msgpack.decode(payload)


@pytest.mark.parametrize("name", ["vllm_metrics_idle.txt", "vllm_metrics_under_load.txt"])
def test_a_captured_scrape_tells_load_and_cache_shape(name: str) -> None:
    text = data_file(f"kv_events/{name}").read_text("utf-8")
    plain = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
    labels = '{engine="0",model_name="tiny"}'
    found = parse_metrics(text)
    assert found.load.running == float(plain[f"vllm:num_requests_running{labels}"])
    assert found.load.queued == float(plain[f"vllm:num_requests_waiting{labels}"])
    assert found.load.kv_used_fraction == float(plain[f"vllm:kv_cache_usage_perc{labels}"])
    assert found.started_at_s == float(plain["process_start_time_seconds"])
    assert found.page_tokens == PAGE_TOKENS
    assert found.capacity_pages is not None
