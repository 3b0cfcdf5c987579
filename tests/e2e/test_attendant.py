"""Who attends replicas: when a sidecar is started, when not, and what happens as it ends."""

from __future__ import annotations

import asyncio
import logging
import random
import subprocess
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from prompt.codec import load_codec
from prompt.reader import PromptReader
from router.config import Config, StaticReplica
from router.fleet import FleetTable
from sidecar.scrape import EngineClient, EngineError
from state.memory import MemoryState
from state.model import Generation, ModelIdentity, ReplicaId, ReplicaRecord, RouterId, Rung
from state.rhythm import Backoff
from state.timing import StoreTiming
from support.kv_engine import KvEngine
from support.plain_engine import MODEL as PLAIN_MODEL
from support.plain_engine import PlainEngine
from support.port import free_port
from support.sglang_engine import MODEL, SglangEngine
from support.token_engine import TokenEngine
from support.tokenizer import write_tokenizer
from warmroute import attend
from warmroute.attend import Attendant
from warmroute.engine_look import EngineLook, look_at
from warmroute.environment import ENGINE_KEY_VARIABLE, REDIS_VARIABLE
from warmroute.local_tokenizer import LocalTokenizers
from warmroute.serve import attending

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

STATE_URL = "unix:///run/valkey.sock?password=secret"
TIMEOUT_S = 60.0


async def eventually(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_so():  # noqa: ASYNC110 - processes and counters are polled
            await asyncio.sleep(0.01)


class Stand:
    """An attendant's surroundings: a registry, and launched programs that end as they are told."""

    def __init__(self, engine: KvEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.state = MemoryState(time.monotonic, StoreTiming(record_ttl_s=600.0))
        self.config = Config(replicas=(StaticReplica(url=engine.url, name="r1"),))
        self.rung = Rung.LIVE
        self.script = "sleep 60"
        self.launched: list[tuple[list[str], Mapping[str, str]]] = []
        self.prompts = PromptReader({}, load_codec(None))
        reader = self.state.reader(RouterId("router"))
        monkeypatch.setattr(reader, "freshness", lambda: (self.rung, 0.0))
        self.app: Any = SimpleNamespace(
            reader=reader, fleet=FleetTable(reader, self.config.replicas), prompts=self.prompts
        )
        monkeypatch.setattr(attend, "launch", self._launch)
        for name, seconds in (
            ("POLL_S", 0.02),
            ("LOOK_S", 0.1),
            ("UNREACHED_LOOK_S", 0.05),
            ("ADOPT_S", 0.1),
            ("RESTART_BASE_S", 0.05),
            ("RESTART_CAP_S", 60.0),
        ):
            monkeypatch.setattr(attend, name, seconds)

    def _launch(
        self, command: list[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        self.launched.append((command, environment))
        return subprocess.Popen(["/bin/sh", "-c", f"exec {self.script}"])

    @asynccontextmanager
    async def attending(self) -> AsyncIterator[None]:
        """Attend; whatever was launched has ended afterwards."""
        environment = {"STATE": STATE_URL}
        rng = random.Random(1)
        async with Attendant(self.config, self.app, environment, "info", rng):
            yield

    async def register(self, generation: str) -> None:
        """Let somebody else's sidecar register the replica."""
        await self.state.register(
            ReplicaRecord(
                replica=ReplicaId("r1"),
                endpoint=self.engine.url,
                generation=Generation(generation),
                identity=ModelIdentity(model="tiny"),
                page_tokens=4,
                sidecar="theirs",
            )
        )

    async def pause(self) -> None:
        """Wait for many rounds of the attendant."""
        await asyncio.sleep(0.4)


@pytest.fixture
async def stand(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    async with KvEngine() as engine:
        yield Stand(engine, monkeypatch)


async def test_one_sidecar_is_started_and_the_states_url_is_in_no_list_of_processes(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with stand.attending():
        await eventually(lambda: bool(stand.launched))
        await stand.pause()
    [(command, environment)] = stand.launched
    assert command[1:4] == ["-m", "warmroute", "sidecar"]
    assert command[command.index("--engine") + 1] == stand.engine.url
    assert command[command.index("--replica") + 1] == "r1"
    assert "secret" not in " ".join(command)
    assert environment == {"STATE": STATE_URL}
    told = [record.getMessage() for record in caplog.records]
    assert len([line for line in told if "replica r1:" in line]) == 1
    assert "secret" not in " ".join(told)


async def test_a_replica_that_has_a_sidecar_gets_none_until_it_has_none(stand: Stand) -> None:
    await stand.register("g1")
    async with stand.attending():
        await stand.pause()
        assert stand.launched == []
        await stand.state.deregister(ReplicaId("r1"), Generation("g1"))
        await eventually(lambda: bool(stand.launched))


async def test_a_fenced_sidecar_is_left_to_the_one_that_fenced_it(stand: Stand) -> None:
    stand.script = "sh -c 'sleep 0.2; exit 3'"
    async with stand.attending():
        await eventually(lambda: bool(stand.launched))
        await stand.register("g2")
        await asyncio.sleep(0.2)
        await stand.pause()
        assert len(stand.launched) == 1
        stand.script = "sleep 60"
        await stand.state.deregister(ReplicaId("r1"), Generation("g2"))
        await eventually(lambda: len(stand.launched) == 2)
        await stand.pause()
        assert len(stand.launched) == 2


async def test_a_fenced_sidecar_is_not_started_before_the_registry_shows_who_fenced_it(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Routers that share a state must not take a replica from each other in turns."""
    monkeypatch.setattr(attend, "ADOPT_S", 60.0)
    stand.script = "sh -c 'exit 3'"
    async with stand.attending():
        await eventually(lambda: bool(stand.launched))
        await stand.pause()
    assert len(stand.launched) == 1
    assert "sidecar ended" not in caplog.text


async def test_a_sidecar_that_crashes_is_started_again_and_wrong_settings_wait(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C70: the pause grows with each crash, and is a time that does not move."""
    pauses: list[float] = []

    def next_s(_: Backoff) -> float:
        pauses.append(0.01 * 2 ** len(pauses))
        return pauses[-1]

    monkeypatch.setattr(Backoff, "next_s", next_s)
    stand.script = "false"
    async with stand.attending():
        await eventually(lambda: len(stand.launched) >= 4)
        assert len(pauses) >= 3
        stand.script = "sh -c 'exit 2'"
        crashed = len(stand.launched)
        await eventually(lambda: len(stand.launched) == crashed + 1)
        await stand.pause()
        assert len(stand.launched) == crashed + 1


async def test_what_a_killed_sidecar_left_registered_is_no_other_ones(stand: Stand) -> None:
    """Its time to live is not waited for."""
    stand.script = "sh -c 'sleep 0.3; kill -9 $$'"
    async with stand.attending():
        await eventually(lambda: bool(stand.launched))
        await stand.register("its-own")
        await eventually(lambda: len(stand.launched) == 2)
        assert stand.app.reader.replicas()


async def test_nothing_is_started_where_events_are_off_or_out_of_reach(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    """B50: what is missing is named, and looked for again."""
    caplog.set_level(logging.INFO)
    stand.engine.has_sources = False
    async with stand.attending():
        await stand.pause()
        assert stand.launched == []
        await stand.engine.close_sockets()
        stand.engine.has_sources = True
        await eventually(lambda: "cannot be reached" in caplog.text)
        assert stand.launched == []
        stand.engine.open_sockets()
        await eventually(lambda: bool(stand.launched))
    assert '"enable_kv_cache_events":true' in caplog.text
    assert f"tcp://127.0.0.1:{stand.engine.events_port} cannot be reached" in caplog.text
    assert "an endpoint with a *" in caplog.text


async def test_an_engine_that_is_not_there_yet_is_waited_for(stand: Stand) -> None:
    """A59: nor is one that serves no model yet."""
    stand.engine.is_healthy = False
    async with stand.attending():
        await stand.pause()
        assert stand.launched == []
        stand.engine.is_healthy = True
        await eventually(lambda: bool(stand.launched))


async def test_an_engine_that_never_comes_holds_up_no_other(stand: Stand) -> None:
    """A54."""
    dead = StaticReplica(url=f"http://127.0.0.1:{free_port()}", name="dead")
    stand.config = Config(replicas=(dead, *stand.config.replicas))
    async with stand.attending():
        await eventually(lambda: bool(stand.launched))
        await stand.pause()
    assert len(stand.launched) == 1


async def test_an_engine_that_wants_a_key_is_shown_it(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A55: by the attendant, and by the sidecar, which gets it where no list of processes shows."""
    key = "engine-key-of-this-test"
    raw = msgspec.to_builtins(stand.config)
    raw["upstream"]["api_key"] = key
    stand.config = msgspec.convert(raw, Config)
    looks: list[str | None] = []
    asked = EngineClient

    def client_of(url: str, *, api_key: str | None = None, **_: object) -> EngineClient:
        looks.append(api_key)
        return asked(url, api_key=api_key)

    monkeypatch.setattr(attend, "EngineClient", client_of)
    async with attending(stand.config, "info", stand.app, STATE_URL):
        await eventually(lambda: bool(stand.launched))
    [(command, environment)] = stand.launched
    assert looks == [key]
    assert environment == {REDIS_VARIABLE: STATE_URL, ENGINE_KEY_VARIABLE: key}
    assert key not in " ".join(command)
    async with PlainEngine(key=key) as engine:
        assert (await look_of(engine.url, key)).base_models == (PLAIN_MODEL,)
        with pytest.raises(EngineError):
            await look_of(engine.url)


async def test_of_several_processes_only_the_one_that_leads_starts_sidecars(stand: Stand) -> None:
    """The others find out what the engine is all the same: its tokenizer and its capacity."""
    other = Attendant(stand.config, stand.app, {}, "info", random.Random(1))
    other.may_launch = lambda: False
    looked = asyncio.Event()
    learn = stand.app.fleet.learn_capacity
    stand.app.fleet.learn_capacity = lambda *told: (learn(*told), looked.set())  # type: ignore[func-returns-value]
    async with other:
        await looked.wait()
        await asyncio.sleep(2 * attend.POLL_S)
        assert stand.launched == []
        other.may_launch = lambda: True
        await eventually(lambda: bool(stand.launched))


async def test_while_the_state_is_not_live_nothing_is_started(stand: Stand) -> None:
    """Whether somebody else follows the replica is not known then."""
    stand.rung = Rung.LOCAL
    async with stand.attending():
        await stand.pause()
        assert stand.launched == []
        stand.rung = Rung.LIVE
        await eventually(lambda: bool(stand.launched))


async def test_the_capacity_that_an_engine_tells_is_taken(stand: Stand) -> None:
    async with stand.attending():
        await eventually(
            lambda: stand.app.fleet.members()[ReplicaId("r1")].capacity_tokens == 4_000
        )


async def test_a_hanging_sidecar_is_killed_at_the_end(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend, "STOP_S", 0.2)
    stand.script = "sh -c 'trap \"\" TERM; while :; do sleep 0.05; done'"
    began_s = time.monotonic()
    async with stand.attending():
        await eventually(lambda: bool(stand.launched))
        await asyncio.sleep(0.1)
    assert time.monotonic() - began_s < TIMEOUT_S


async def look_of(url: str, api_key: str | None = None) -> EngineLook:
    async with EngineClient(url, api_key=api_key) as client:
        return await look_at(client)


async def test_a_directory_is_used_while_every_engine_agrees_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B42: wrong tokens are worse than none."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    async with SglangEngine(tokenizer) as engine, TokenEngine() as other:
        prompts = PromptReader({}, load_codec(None))
        tokenizers = LocalTokenizers(Config(), prompts)
        look = await look_of(engine.url)
        assert look.root == tokenizer
        assert await tokenizers.consider(ReplicaId("a"), look, EngineClient(engine.url), None)
        assert tokenizers.directory(MODEL) == tokenizer
        assert prompts.digests() == {MODEL: load_codec(tokenizer).digest}
        other.statuses["/tokenize"] = 404
        assert not await tokenizers.consider(ReplicaId("b"), look, EngineClient(other.url), None)
        assert tokenizers.directory(MODEL) == tokenizer  # it says nothing against it
        del other.statuses["/tokenize"]
        await tokenizers.consider(ReplicaId("b"), look, EngineClient(other.url), None)
        assert tokenizers.directory(MODEL) is None
        assert prompts.digests() == {}
        assert "not those of replica b" in caplog.text
        await tokenizers.consider(ReplicaId("a"), look, EngineClient(engine.url), None)
        assert prompts.digests() == {}
        prompts.close()


async def test_a_directory_is_used_as_soon_as_its_engine_tells_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that is busy at first is asked again; once its sidecar runs, too."""
    caplog.set_level(logging.INFO)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    async with KvEngine() as unused, SglangEngine(tokenizer) as engine:
        stand = Stand(unused, monkeypatch)
        stand.config = Config(replicas=(StaticReplica(url=engine.url, name="r1"),))
        engine.is_telling_tokens = False
        async with stand.attending():
            await eventually(lambda: bool(stand.launched))
            await stand.pause()
            assert stand.prompts.digests() == {}
            engine.is_telling_tokens = True
            await eventually(lambda: "prompts read with" in caplog.text)
        assert list(stand.prompts.digests()) == [MODEL]
        assert len(stand.launched) == 1


@pytest.mark.parametrize(
    "config",
    [
        {"models": [{"name": MODEL, "tokens": "bytes"}]},
        {"tokens": {"source": "bytes"}},
        {"tokens": {"source": "off"}},
    ],
)
async def test_who_said_where_tokens_come_from_is_obeyed(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    async with SglangEngine(tokenizer) as engine:
        prompts = PromptReader({}, load_codec(None))
        tokenizers = LocalTokenizers(msgspec.convert(config, Config), prompts)
        client = EngineClient(engine.url)
        await tokenizers.consider(ReplicaId("a"), await look_of(engine.url), client, None)
        assert prompts.digests() == {}
        prompts.close()
