"""A worker's parts from its settings, and settings that exclude each other."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.assembly import Assembly, assemble
from sidecar.audit import AuditReplay
from sidecar.audit_file import replay_files
from sidecar.eviction import ByteBenefit, TenantQuota
from sidecar.generation import Delta, Generation, Halted
from sidecar.setting import SettingError, WorkerSettings
from state.prefix import pack_tokens, salt_scope

if TYPE_CHECKING:
    from pathlib import Path

HELLO = pack_tokens(range(100, 140))


def _built(**changes: Any) -> Assembly:
    base: dict[str, Any] = {"model": "tiny", "page_tokens": 16, "threads": 1, "pages": 64}
    return assemble(WorkerSettings(**base | changes), lambda _: None)


def _close(built: Assembly) -> None:
    built.ledger.close()
    built.runner.close()
    if built.disk is not None:
        built.disk.close()


async def _tokens(built: Assembly, packed_prompt: bytes = HELLO) -> list[int]:
    deltas: asyncio.Queue[Delta | Halted] = asyncio.Queue()
    generation = Generation(packed_prompt=packed_prompt, max_output_tokens=4, ignore_eos=True)
    running = asyncio.create_task(built.engine.run())
    built.engine.submit(generation, deltas.put_nowait)
    token_ids: list[int] = []
    try:
        async with asyncio.timeout(30):
            while True:
                delta = await deltas.get()
                assert isinstance(delta, Delta)
                token_ids += delta.token_ids
                if delta.finish is not None:
                    return token_ids
    finally:
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"eviction": "quota", "tenant_quotas": "a=60,b=5"}, "tenant_quotas: 65 pages of 64"),
        ({"tenant_quotas": "s=1"}, "tenant_quotas: they need eviction quota"),
        ({"eviction": "quota", "tenant_quotas": "s=x"}, "tenant_quotas: expected TENANT=PAGES"),
        ({"disk_dir": "/nowhere"}, "disk_dir: .* set host_mib"),
        ({"disk_dir": "/nowhere", "host_mib": 1, "compute": "synthetic"}, "disk_dir: synthetic"),
        ({"compute": "numpy", "dtype": "bfloat16"}, "dtype: NumPy computes in float32"),
        ({"max_model_len": 10**9}, "max_model_len: the model has .* positions"),
        ({"public_prefixes": "/nowhere/list.json"}, "public_prefixes: .*No such file"),
        ({"audit": "/nowhere/audit.jsonl"}, "audit: .*No such file"),
        ({"audit": "/proc"}, "audit: /proc: it is there and no file"),
        ({"model": "models/mistyped"}, "model: models/mistyped is no directory"),
        ({"model": "~no-such-user"}, "model: ~no-such-user is no directory"),
        ({"transfer_peers": "10.0.0.7:8000"}, "transfer_peers: expected http://host:port"),
        ({"transfer_peers": "http://h:1,http://h:x"}, "transfer_peers: .* got 'http://h:x'"),
        ({"transfer_port": 0, "compute": "synthetic"}, "transfer_port: synthetic"),
        ({"pages": 10**12}, "pages: expected at most"),
        ({"host_mib": 10**9}, "host_mib: expected at most"),
        ({"host_mib": 1, "disk_dir": "/nowhere/at/all", "disk_mib": 10**12}, "disk_mib: expected"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_the_setting(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(SettingError, match=f"^{told}"):
        _built(**{"compute": "numpy"} | changes)


@pytest.mark.parametrize("content", ["{", '[{"texts": []}]', '{"messages": []}'])
def test_a_list_of_public_prefixes_that_cannot_be_read_is_refused(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "public.json"
    path.write_text(content)
    with pytest.raises(SettingError, match=f"public_prefixes: {path}"):
        _built(compute="synthetic", public_prefixes=str(path))


def test_the_eviction_is_the_one_that_was_asked_for() -> None:
    built = _built(compute="synthetic", eviction="benefit")
    assert isinstance(built.engine.scheduler.cache.pool.eviction, ByteBenefit)
    _close(built)
    tenant = salt_scope("s").removeprefix("salt:")[:12]
    built = _built(compute="synthetic", eviction="quota", tenant_quotas=f"{tenant}=8")
    eviction = built.engine.scheduler.cache.pool.eviction
    assert isinstance(eviction, TenantQuota)
    assert eviction.quotas_pages[built.engine.parts.scopes.place(HELLO, "s").tenant] == 8
    _close(built)


def test_a_public_conversation_is_public_up_to_where_users_differ(tmp_path: Path) -> None:
    path = tmp_path / "public.json"
    system = {"role": "system", "content": "You are a helpful assistant. " * 4}
    path.write_text(json.dumps([{"messages": [system]}, {"prompt": "x" * 64}]))
    built = _built(compute="synthetic", public_prefixes=str(path))
    scopes = built.engine.parts.scopes
    assert scopes.public_prefixes == 2
    pages = set()
    for text in ("a question", "Another"):
        packed = built.codec.chat_tokens(
            [system, {"role": "user", "content": text}], None, options={}
        )
        pages.add(scopes.place(packed, "s").public_pages)
    assert len(pages) == 1
    assert min(pages) >= 6
    other = built.codec.chat_tokens([{"role": "user", "content": "hello" * 40}], None, options={})
    assert scopes.place(other, "s").public_pages == 0
    _close(built)


def test_namespaces_are_equal_where_pages_mean_the_same_and_nowhere_else() -> None:
    same = [_built(compute="synthetic").namespace for _ in range(2)]
    assert same[0] == same[1]
    for changes in (
        {"seed": 1},
        {"page_tokens": 32},
        {"served_model_name": "other"},
        {"compute": "numpy"},
    ):
        assert _built(**{"compute": "synthetic"} | changes).namespace != same[0]


async def test_a_whole_worker_computes_keeps_pages_on_disk_and_proves_its_audit(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {
        "compute": "numpy",
        "pages": 6,
        "host_mib": 1,
        "disk_dir": str(tmp_path / "pages"),
        "disk_mib": 64,
        "audit": str(tmp_path / "audit.jsonl"),
    }
    built = _built(**settings)
    first = await _tokens(built)
    for number in range(1, 4):
        await _tokens(built, pack_tokens(range(10 * number, 10 * number + 60)))
    assert built.mover is not None
    assert await _tokens(built) == first
    assert built.mover.counts["host"].hit_pages == 2
    _close(built)
    replay = AuditReplay()
    assert replay_files(replay, [tmp_path / "audit.jsonl"]) == []
    assert replay.is_closed
    assert replay.summary().ended_requests == {"done": 5}
