"""``warmroute doctor`` on a real fleet that one thing is wrong with at a time."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from state.model import Rung
from support.fleet import MODEL, until
from support.kv_engine import KvEngine, stored
from support.meddler import Meddler
from support.port import free_port
from support.tokenizer import CHAT_TEMPLATE, write_tokenizer
from support.valkey import ValkeyProcess
from support.ward import WORDS, Ward, codes, examined, nobody, open_ward, said
from warmroute.doctor_case import Code

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ward(
    tmp_path_factory: pytest.TempPathFactory, valkey: ValkeyProcess
) -> AsyncIterator[Ward]:
    async with open_ward(tmp_path_factory.mktemp("doctor"), valkey) as running:
        yield running


async def test_nothing_is_wrong_with_a_healthy_fleet(ward: Ward) -> None:
    """By all that can be looked at, with a probe, and once the replica was used."""
    await ward.fleet.settled()
    case, report = await examined(ward.settings(redis=ward.fleet.state_url, does_probe=True))
    assert report.findings == ()
    assert report.unchecked == ()
    [replica] = case.replicas
    assert replica.probe is not None
    reported, predicted = replica.probe.reported_tokens, replica.probe.predicted_tokens
    assert reported is not None
    assert predicted is not None
    assert abs(reported - predicted) <= 64 < reported
    assert replica.tokens[0].texts == replica.tokens[0].chats == 3
    assert replica.record is not None
    assert replica.engine is not None
    assert replica.engine.deaf == ()


async def test_an_engine_that_keeps_no_prefixes_is_named(ward: Ward) -> None:
    async with Meddler(ward.engine) as engine:
        engine.is_caching = False
        async with ward.sidecar("broken", engine.url):
            await ward.told("broken")
            assert await codes(ward.settings(engine.url)) == [Code.CACHING_OFF]


async def test_an_engine_without_events_is_named(ward: Ward) -> None:
    """B50: with a sidecar, and with none."""
    async with Meddler(ward.engine) as engine:
        engine.sources = {}
        async with ward.sidecar("broken", engine.url):
            await ward.told("broken", events=None)
            assert await codes(ward.settings(engine.url)) == [Code.EVENTS_OFF]
        assert await codes(ward.settings(engine.url)) == [Code.EVENTS_OFF]


async def test_a_sidecar_that_follows_another_port_is_named(ward: Ward) -> None:
    """B50."""
    wrong = f"tcp://127.0.0.1:{free_port()}"
    async with Meddler(ward.engine) as engine, ward.sidecar("broken", engine.url, events=wrong):
        await ward.told("broken", events=wrong)
        [finding] = (await examined(ward.settings(engine.url)))[1].findings
        assert finding.code is Code.WRONG_EVENT_PORT
        assert finding.replica == "broken"
        assert wrong in finding.seen
        assert "warmroute sidecar --engine" in finding.fix


async def test_an_engine_that_works_and_is_never_heard_is_named(ward: Ward) -> None:
    """B50: it names a port where nobody publishes."""
    async with Meddler(ward.engine) as engine:
        engine.sources = {"0": {"endpoint": f"tcp://127.0.0.1:{free_port()}"}}
        async with ward.sidecar("broken", engine.url):
            await ward.told("broken", is_silent=False)
            await ward.ask(engine.url, "one " + WORDS)
            await asyncio.sleep(0.2)
            await ward.ask(engine.url, "two " + WORDS)
            await ward.told("broken", is_silent=True)
            assert await codes(ward.settings(engine.url)) == [Code.EVENTS_SILENT]
        assert await codes(ward.settings(engine.url, admin=nobody())) == [Code.EVENTS_SILENT]


async def test_pages_that_do_not_fit_the_blocks_are_named(ward: Ward) -> None:
    """A71, B14, C44: before the first event, and after."""
    async with (
        Meddler(ward.engine) as engine,
        ward.sidecar("broken", engine.url, page_tokens=24, block_tokens=24),
    ):
        await ward.told("broken", page_tokens=24)
        await ward.ask(engine.url, "pages " + WORDS)
        await ward.told("broken", has_unfit_pages=True)
        assert await codes(ward.settings(engine.url)) == [Code.PAGE_MISMATCH]


async def test_a_sidecar_with_another_key_is_named(ward: Ward) -> None:
    """C45: both sides are whole, and no id of the one is known to the other."""
    async with Meddler(ward.engine) as engine, ward.sidecar("broken", engine.url, chain_seed=7):
        await ward.told("broken")
        await ward.ask(engine.url, "keys " + WORDS)
        assert await codes(ward.settings(engine.url)) == [Code.KEYS_DIFFER]


async def test_an_engine_without_a_sidecar_is_named(ward: Ward) -> None:
    [finding] = (await examined(ward.settings(ward.engine)))[1].findings
    assert finding.code is Code.NO_SIDECAR
    assert ward.engine in finding.fix


async def test_another_tokenizer_and_another_template_are_told_apart(
    ward: Ward, tmp_path: Path
) -> None:
    """B42: the directory that is compared is not the one that the engine has."""
    other = write_tokenizer(tmp_path / "other", vocabulary_size=400)
    settings = ward.settings(ward.healthy, models={MODEL: str(other)})
    [finding] = (await examined(settings))[1].findings
    assert finding.code is Code.TOKENIZER_MISMATCH
    assert str(other) in finding.seen
    template = CHAT_TEMPLATE.replace("assistant", "model")
    again = write_tokenizer(tmp_path / "again", chat_template=template)
    settings = ward.settings(ward.healthy, models={MODEL: str(again)})
    assert await codes(settings) == [Code.TEMPLATE_MISMATCH]


async def test_answers_without_cached_tokens_are_named(ward: Ward) -> None:
    """By a probe, and by what the router saw."""
    async with Meddler(ward.engine) as engine, ward.sidecar("broken", engine.url):
        engine.hides_hits = True
        await ward.told("broken")
        settings = ward.settings(engine.url)
        assert await codes(settings) == []
        probing = ward.settings(engine.url, does_probe=True, admin=nobody())
        assert await codes(probing) == [Code.HITS_UNREPORTED]
        for number in range(3):
            await ward.ask(ward.fleet.router.url, f"hits {number} {WORDS}")
        assert await codes(settings) == [Code.HITS_UNREPORTED]


async def test_a_salt_that_gets_lost_on_its_way_is_named(ward: Ward) -> None:
    """B19, C46: requests have one, and the engine's pages have none."""
    async with Meddler(ward.engine) as engine, ward.sidecar("salted", engine.url):
        engine.drops_salt = True
        await ward.told("salted")
        for _ in range(3):
            await ward.ask(ward.fleet.router.url, "salt " + WORDS, cache_salt="pepper")
        facts = await ward.told("salted", salted_pages=0)
        assert facts["counts"]["plain_pages"] > 0
        assert await codes(ward.settings(engine.url)) == [Code.SALT_MISMATCH]


async def test_a_replica_whose_predictions_fail_is_named(ward: Ward) -> None:
    """A77: it reports nothing of what its own events say that it has."""
    async with Meddler(ward.engine) as engine, ward.sidecar("liar", engine.url):
        engine.hits = 0
        await ward.told("liar")
        for _ in range(16):
            await ward.ask(ward.fleet.router.url, "lies " + WORDS)
        [finding] = (await examined(ward.settings(engine.url)))[1].findings
        assert finding.code is Code.UNTRUSTED
        assert "no_hits" in finding.seen


async def test_events_of_another_engine_are_noticed_by_a_probe(ward: Ward) -> None:
    """All is as it should be, but what is heard is not what happens."""
    sources = await ward.fleet.get(f"{ward.healthy}/kv_event_sources")
    async with Meddler(ward.engine) as engine:
        engine.sources = sources
        async with ward.sidecar("deaf", engine.url):
            await ward.told("deaf", events=sources["0"]["endpoint"])
            assert await codes(ward.settings(engine.url)) == []
            [finding] = (await examined(ward.settings(engine.url, does_probe=True)))[1].findings
            assert finding.code is Code.PREDICTION_WRONG
            assert finding.seen.endswith("the router expected 0.")


async def test_a_cache_that_is_too_small_for_its_prompts_is_named(ward: Ward) -> None:
    """By pages that were computed again after they had been evicted, and not by evictions alone."""
    flags = ("--served-model-name", "small", "--pages", "64")
    worker = await ward.fleet.start_worker("small", *flags).ready()
    engine = worker.words[0]
    async with ward.sidecar("small", engine):
        for number in range(8):
            await ward.ask(engine, f"{number} {WORDS}", model="small")
        await ward.told("small", returned_pages=0)
        assert await codes(ward.settings(engine)) == []
        for number in (*range(8), *range(8)):
            await ward.ask(engine, f"{number} {WORDS}", model="small")

        async def is_seen() -> bool:
            return await codes(ward.settings(engine)) == [Code.CACHE_TOO_SMALL]

        await until(is_seen, "a cache that is too small")


async def test_events_that_got_lost_and_media_that_nobody_knows_are_named(ward: Ward) -> None:
    """B06, B22: a gap without a replay, and a store to a medium without credit."""
    async with KvEngine(has_replay=False) as engine, ward.sidecar("odd", engine.url):
        await ward.told("odd")
        await engine.publish(stored([1, 2], [7] * 8))
        await ward.told("odd", last_sequence=0)
        assert await codes(ward.settings(engine.url)) == []
        await engine.publish(stored([3], [8] * 4, medium="WARP"))
        facts = await ward.told("odd", unknown_media=["WARP"])
        assert facts["media"] == ["GPU", "WARP"]
        assert await codes(ward.settings(engine.url)) == [Code.UNKNOWN_MEDIUM]
        engine.lose(stored([4], [9] * 4))
        await engine.publish(stored([5], [1] * 4))
        await ward.told("odd", reason="lost", gaps=1)
        assert await codes(ward.settings(engine.url)) == [Code.EVENTS_LOST]


async def test_two_stores_are_named(ward: Ward) -> None:
    """C33: the sidecar writes to one, the router reads another."""
    with ValkeyProcess() as elsewhere:
        router = await ward.fleet.start_router(
            state={"redis": elsewhere.url}, replicas=[{"url": ward.healthy}], attend_sidecars=False
        )
        await ward.fleet.all_up(router, 1)
        settings = ward.settings(admin=router.admin_url, redis=ward.fleet.state_url)
        case, report = await examined(settings)
        ours = [each for each in report.findings if each.replica == "w0"]
        assert [each.code for each in ours] == [Code.OTHER_STATE]
        assert len(case.replicas) == len(report.replicas) == 1
        assert await codes(ward.settings(admin=router.admin_url)) == [Code.NO_SIDECAR]
        assert await asyncio.to_thread(ward.fleet.processes.stop, router.child) == 0


async def test_an_index_that_lost_its_blocks_is_named(ward: Ward) -> None:
    """A store that evicts what nobody reads: a new router finds a replica that seems empty."""
    await ward.fill("index " + WORDS)
    keys = await ward.redis.execute_command("KEYS", "wr:1:{w0}:blocks:*")
    assert keys
    await ward.redis.execute_command("DEL", *keys)
    router = await ward.fleet.start_router()
    await ward.fleet.all_up(router, 1)
    settings = ward.settings(admin=router.admin_url, redis=ward.fleet.state_url)

    async def is_seen() -> bool:
        return await codes(settings) == [Code.INDEX_EMPTY]

    await until(is_seen, "an empty index")
    for number in range(10):
        text = f"{number} {WORDS}"
        await ward.ask(router.url, text, model=MODEL, status=400, chat_template="{{ 1 }}")
    assert Code.PROMPTS_UNREAD in await codes(settings)
    for number in range(12):
        await ward.ask(router.url, f"{number}", model=MODEL)
    assert Code.PROMPTS_SHORT in await codes(settings)
    assert await asyncio.to_thread(ward.fleet.processes.stop, router.child) == 0


async def test_a_store_that_stops_is_named(ward: Ward, valkey: ValkeyProcess) -> None:
    """R-03."""
    valkey.freeze()
    try:
        seen = await codes(ward.settings(ward.healthy), Rung.STALE)
        assert seen == [Code.STATE_NOT_LIVE]
        settings = ward.settings(ward.healthy, redis=ward.fleet.state_url)
        seen = await codes(settings, Rung.STALE)
        assert seen == [Code.STATE_UNREACHABLE, Code.STATE_NOT_LIVE]
    finally:
        valkey.thaw()

    async def is_healthy() -> bool:
        return await codes(ward.settings(ward.healthy)) == []

    await until(is_healthy, "a live view")


async def test_a_probe_of_tenants_goes_through_the_router_with_a_key(
    ward: Ward, tmp_path: Path
) -> None:
    """S-05: without a key nothing is learned, with one the tenant's own prefix is found again."""
    key_file = tmp_path / "deployment.key"
    key_file.write_text("k" * 40)
    key_file.chmod(0o600)
    digest = hashlib.sha256(b"secret of a").hexdigest()
    router = await ward.fleet.start_router(
        tenants=[{"name": "a", "key_digests": [digest]}], deployment_key_file=str(key_file)
    )
    await ward.fleet.all_up(router, 1)
    changes = {"admin": router.admin_url, "does_probe": True}
    case, report = await examined(ward.settings(**changes))
    assert "401" in report.unchecked[-1].why
    assert case.replicas[0].probe is None
    case, report = await examined(ward.settings(**changes, router_key="secret of a"))
    assert report.unchecked == ()
    probe = case.replicas[0].probe
    assert probe is not None
    assert (probe.reported_tokens or 0) > 64
    assert [finding.code for finding in report.findings] == [Code.KEYS_DIFFER]
    assert probe.predicted_tokens == 0
    assert await asyncio.to_thread(ward.fleet.processes.stop, router.child) == 0


async def test_each_side_alone_is_enough_and_says_what_it_could_not_see(ward: Ward) -> None:
    silent = nobody()
    case, report = await examined(ward.settings(ward.healthy, admin=silent))
    assert report.findings == ()
    assert {each.what for each in report.unchecked} == {"the router's side", "sidecars"}
    assert case.replicas[0].engine is not None
    given = ward.settings(ward.healthy, admin=silent, is_admin_given=True)
    assert await codes(given) == [Code.ROUTER_UNREACHABLE]
    assert await codes(ward.settings(silent)) == [Code.ENGINE_UNREACHABLE]


async def test_the_command_says_it_in_words_in_json_and_by_its_exit_code(
    ward: Ward, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line is wider than the terminal."""
    monkeypatch.setenv("COLUMNS", "60")
    router = await ward.fleet.start_router()  # whom no replica of another test left
    await ward.fleet.all_up(router, 1)
    admin, well = router.admin_url, "1 replica examined: nothing wrong was found\n"
    assert await said(capsys, "doctor", "--admin", admin) == (0, well, "")
    code, out, _ = await said(capsys, "doctor", "--admin", admin, "--replica", ward.engine)
    assert code == 1
    assert out.startswith("no_sidecar: ")
    assert out.endswith("1 replica examined: 1 finding\n")
    assert max(len(line) for line in out.splitlines() if "--engine" not in line) <= 60
    code, out, _ = await said(
        capsys, "doctor", "--admin", admin, "--replica", ward.engine, "--json"
    )
    assert code == 1
    [finding] = json.loads(out)["findings"]
    assert {*finding} == {"code", "replica", "seen", "meaning", "fix"}
    silent = nobody()
    code, out, _ = await said(capsys, "doctor", "--admin", silent)
    assert code == 1
    assert out.startswith("router_unreachable: the router")
    monkeypatch.setattr("warmroute.doctor.DEFAULT_ADMIN", silent.removeprefix("http://"))
    code, out, err = await said(capsys, "doctor")
    assert (code, out) == (2, "")
    assert "no --replica is named" in err
    for words, flag in (
        (("--admin", "ftp://x"), "--admin"),
        (("--replica", "http://x/path"), "--replica"),
        (("--model", "x"), "--model"),
        (("--model", "x=/nowhere"), "tokenizer.json"),
        (("--redis", "http://x", "--replica", ward.engine), "--redis"),
    ):
        code, _, err = await said(capsys, "doctor", *words)
        assert code == 2
        assert flag in err


async def test_replicas_are_shown_wide_narrow_and_as_json(
    ward: Ward, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was detected is what the engine does."""
    await ward.told("w0", last_sequence=(await ward.view("w0"))["facts"]["counts"]["last_sequence"])
    admin = ward.fleet.router.admin_url
    code, out, _ = await said(capsys, "replicas", "--admin", admin, "--json")
    assert code == 0
    [shown] = json.loads(out)
    facts = shown["facts"]
    assert (facts["engine"], facts["encodings"], facts["hash_kinds"]) == (
        "warmroute",
        ["map"],
        ["int"],
    )
    assert (facts["media"], facts["page_tokens"], facts["capacity_pages"]) == (["GPU"], 16, 8192)
    assert (facts["counts"]["gaps"], facts["is_silent"], facts["has_replay"]) == (0, False, True)
    assert facts["counts"]["batches"] > 0
    assert facts["key_check"] == ""
    assert shown["same_keys"] is True
    assert facts["generation"] == shown["generation"]
    for columns in ("60", "160"):
        monkeypatch.setenv("COLUMNS", columns)
        code, out, _ = await said(capsys, "replicas", "--admin", admin)
        assert code == 0
        lines = out.splitlines()
        assert lines[0].startswith("state live (")
        assert max(map(len, lines)) <= int(columns)
        assert "warmroute worker" in " ".join(out.split())
        assert shown["generation"] in out.replace("\n", "")
    code, _, err = await said(capsys, "replicas", "--admin", nobody())
    assert code == 2
    assert "no router answers at" in err
    code, _, err = await said(capsys, "replicas", "--admin", ward.fleet.router.url)
    assert code == 2
    assert "is this the address of --admin" in err
