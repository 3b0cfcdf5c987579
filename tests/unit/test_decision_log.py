"""The decision log: what a record holds, and that writing it never gets in the way of a request."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from policies.model import Decision, ReplicaView, RoutingRequest
from policies.weighted import Weighted
from replay import decision_file
from router import decision_log, line_log
from router.config import Config, ConfigError, decode_config
from router.decision_log import LoggedDecision, open_decision_log
from router.log_file import LogFile
from router.process import serve
from support.choosing import chain_for
from support.fleet import until
from support.logged import Logging, lines_of, open_log, record_of

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_record_holds_the_whole_snapshot_the_decision_and_the_outcome(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    choices, routed = Logging().decide(range(1_000))
    log = open_log(path)
    log.add(record_of(choices, routed), choices, routed)
    await log.close()
    header, record = lines_of(path)
    assert (header["warmroute"], header["version"], header["router"]) == (
        "decisions",
        1,
        "router-1",
    )
    assert header["policy"] == msgspec.to_builtins(Weighted())
    assert msgspec.convert(record["request"], RoutingRequest) == choices[0].request
    assert msgspec.convert(record["views"], tuple[ReplicaView, ...]) == choices[0].views
    assert msgspec.convert(record["decision"], Decision) == choices[0].decision
    assert record["result"] == {
        "status": 200,
        "outcome": "done",
        "ttft_s": 0.1,
        "held_s": 0.0,
        "duration_s": 0.3,
        "prompt_tokens": 1_000,
        "cached_tokens": 0,
        "output_tokens": 20,
    }
    assert (record["attempt"], record["ended"], record["prompts"]) == (1, "done", None)
    assert log.written == 1


async def test_every_attempt_has_a_record_and_the_last_one_the_result(tmp_path: Path) -> None:
    path = tmp_path / "log"
    choices, routed = Logging().decide(range(1_000), attempts=3)
    log = open_log(path)
    log.add(record_of(choices, routed), choices, routed)
    await log.close()
    records = lines_of(path)[1:]
    assert [one["attempt"] for one in records] == [1, 2, 3]
    assert [one["ended"] for one in records] == ["failed", "failed", "done"]
    assert [one["result"] is None for one in records] == [True, True, False]
    assert [len(one["views"]) for one in records] == [8, 7, 6]


async def test_chains_are_the_ids_of_the_full_blocks_of_each_prompt(tmp_path: Path) -> None:
    path = tmp_path / "log"
    choices, routed = Logging().decide(range(200), range(500, 564))
    log = open_log(path, chains=True)
    log.add(record_of(choices, routed), choices, routed)
    await log.close()
    record = msgspec.json.decode(path.read_bytes().splitlines()[1], type=LoggedDecision)
    assert record.block_tokens == 64
    assert record.prompts is not None
    assert [one.tokens for one in record.prompts] == [200, 64]
    assert record.prompts[0].chain == b"".join(chain_for(range(200)))
    assert record.prompts[1].chain == b"".join(chain_for(range(500, 564)))


async def test_neither_the_clients_words_nor_its_ids_are_logged(tmp_path: Path) -> None:
    """S-13."""
    path = tmp_path / "log"
    await Logging().write(path, 5)
    assert b"CANARY" not in path.read_bytes()


async def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "log"
    choices, routed = Logging(replicas=1).decide(range(10))
    [choice] = choices
    log = open_log(path)
    odd = [0.1 + 0.2, 1e-320, 5e-324, 2**53 + 0.0, 1 / 3, -0.0, 1.7976931348623157e308]
    for value in odd:
        choice.views = (msgspec.structs.replace(choice.views[0], backlog_ms=value),)
        log.add(record_of(choices, routed), choices, routed)
    await log.close()
    read = list(decision_file.DecisionLogReader(path))
    assert [line.decision.views[0].backlog_ms.hex() for line in read] == [v.hex() for v in odd]


async def test_a_sample_is_of_whole_requests_and_about_as_large_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = await Logging().write(path, 2_000, sample=0.25)
    records = lines_of(path)[1:]
    requests = {one["id"] for one in records}
    assert 420 <= len(requests) <= 580
    lasts = [one["id"] for one in records if one["result"] is not None]
    assert len(lasts) == len(requests)
    assert (log.written, log.dropped) == (len(records), 0)
    none = await Logging().write(tmp_path / "none", 50, sample=0.0)
    assert (none.written, none.dropped) == (0, 0)


def test_reader_and_writer_know_the_same_fields() -> None:
    for name in ("LogHeader", "LoggedPrompt", "LoggedResult", "LoggedDecision"):
        wrote, read = (getattr(side, name) for side in (decision_log, decision_file))
        assert wrote.__struct_fields__ == read.__struct_fields__


async def test_only_its_user_can_read_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch(mode=0o644)
    await Logging().write(path, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    old = os.umask(0)
    try:
        await Logging().write(tmp_path / "new", 1)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


async def test_a_path_that_cannot_be_written_drops_and_counts_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(line_log, "RETRY_S", 0.0)
    log = open_log(tmp_path / "missing" / "log")
    logging = Logging()
    for _ in range(3):
        choices, routed = logging.decide_any()
        log.add(record_of(choices, routed), choices, routed)
        log.lines._hand_over()
    await log.close()
    assert (log.written, log.dropped) == (0, 3)
    told = [one.message for one in caplog.records if "cannot write" in one.message]
    assert len(told) == 1
    assert "No such file or directory" in told[0]


async def test_a_path_of_no_use_is_told_before_there_is_anything_to_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await open_log(tmp_path / "missing" / "log").close()
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    await open_log(tmp_path / "log").close()
    assert [one["warmroute"] for one in lines_of(tmp_path / "log")] == ["decisions"]


async def test_a_pipe_and_a_directory_are_no_place_for_a_log(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        log = await Logging().write(path, 1)
        assert (log.written, log.dropped) == (0, 1)


@pytest.mark.parametrize("key", ["decisions", "access_log"])
async def test_a_router_does_not_start_with_a_directory_for_a_log(tmp_path: Path, key: str) -> None:
    config = decode_config({key: {"path": str(tmp_path)}})
    with pytest.raises(ConfigError, match=rf"^{key}\.path: expected a file"):
        await serve(config, lambda _: None)


async def test_a_disk_that_hangs_makes_nobody_wait_and_what_is_too_much_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def hanging(_: LogFile, __: bytes) -> None:
        goes_on.wait(20)

    monkeypatch.setattr(LogFile, "write", hanging)
    monkeypatch.setattr(line_log, "MAX_QUEUED_BYTES", 300_000)
    monkeypatch.setattr(line_log, "CLOSE_S", 0.05)
    logging = Logging()
    log = open_log(tmp_path / "log")
    for _ in range(200):
        choices, routed = logging.decide_any()
        log.add(record_of(choices, routed), choices, routed)
    assert log.dropped > 50
    assert log.lines._backlog_bytes() < 300_000 + 20_000
    registry = CollectorRegistry()
    registry.register(log)
    assert registry.get_sample_value("warmroute_decision_log_dropped_total") == log.dropped
    await asyncio.wait_for(log.close(), 20)
    dropped = log.dropped
    log.add(record_of(choices, routed), choices, routed)
    assert log.dropped > dropped, "what comes after the end is counted, too"
    goes_on.set()
    log.lines._thread.join(5)
    assert not log.lines._thread.is_alive()


async def test_what_json_cannot_say_and_what_is_far_too_long_is_dropped_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    logging = Logging()
    log = open_log(path)
    for changes in ({"session": "\ud800"}, {"session": "x" * 600_000}, {}):
        choices, routed = logging.decide(range(100))
        assert choices[0].request is not None
        choices[0].request = msgspec.structs.replace(choices[0].request, **changes)
        log.add(record_of(choices, routed), choices, routed)
    await log.close()
    assert (log.written, log.dropped) == (1, 2)
    assert [one["id"] for one in lines_of(path)[1:]] == ["r3"]


async def test_what_waits_is_written_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = open_log(path)
    running = asyncio.create_task(log.run())
    choices, routed = Logging().decide(range(100))
    log.add(record_of(choices, routed), choices, routed)

    async def is_written() -> bool:
        return log.written > 0

    await until(is_written, "the record is in the file")
    assert len(lines_of(path)) == 2
    running.cancel()
    await log.close()
    assert log.lines._backlog_bytes() == 0
    await log.close()


def test_without_a_path_there_is_no_log_and_no_thread() -> None:
    before = threading.active_count()
    assert open_decision_log(Config().decisions, Weighted(), "", clock=float, unix_s=0.0) is None
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "wrong", [{"sample": 1.5}, {"keep_files": 0}, {"max_bytes": 10}, {"folder": "/x"}]
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="decisions"):
        decode_config({"decisions": wrong})
