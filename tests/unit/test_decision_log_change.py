"""The log of decisions while the policy changes: every record under the header that made it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from policies.expected_ttft import ExpectedTtft
from policies.least_loaded import LeastLoaded
from policies.weighted import Weighted
from replay.decision import replay_decisions
from replay.decision_file import DecisionLogReader, log_files
from router import line_log
from support.fleet import until
from support.logged import POLICY, Logging, open_log, record_of

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from policies.union import AnyPolicy

POLICIES: Final[tuple[AnyPolicy, ...]] = (
    LeastLoaded(),
    Weighted(w_queue=0.1, w_prefix=9.0),
    ExpectedTtft(),
)


async def test_requests_that_end_after_a_change_are_logged_under_the_rule_that_chose(
    tmp_path: Path,
) -> None:
    """They end in any order: the header goes to and fro, and the replay is exact."""
    path, logging = tmp_path / "log", Logging()
    log = open_log(path)
    open_requests = []
    for version in range(7):
        if version:
            policy = POLICIES[version % len(POLICIES)]
            logging.choosing.chooser.adopt(policy, version)
        for _ in range(9):
            open_requests.append(logging.decide_any())
            if len(open_requests) > 12:
                at = logging.rng.randrange(len(open_requests))
                choices, routed = open_requests.pop(at)
                log.add(record_of(choices, routed), choices, routed)
    for choices, routed in open_requests:
        log.add(record_of(choices, routed), choices, routed)
    await log.close()

    lines = list(DecisionLogReader(path))
    assert [one.decision.settings_version for one in lines] == [
        one.header.settings_version for one in lines
    ]
    assert {one.header.settings_version for one in lines} == set(range(7))
    assert sum(one.header != two.header for one, two in itertools.pairwise(lines)) > 7
    comparison = replay_decisions(path)
    assert (comparison.first_difference, comparison.requests) == (None, 63)


async def test_a_file_that_begins_after_a_change_begins_with_the_header_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_log, "CHUNK_BYTES", 1)
    path, logging = tmp_path / "log", Logging()
    log = open_log(path, max_bytes=1 << 20, keep_files=9)
    for number in range(400):
        if number % 90 == 45:
            logging.choosing.chooser.adopt(POLICIES[number % len(POLICIES)], number)
        choices, routed = logging.decide_any()
        log.add(record_of(choices, routed), choices, routed)
    await log.close()

    assert len(log_files(path)) > 1
    assert all(
        one.decision.settings_version == one.header.settings_version
        for one in DecisionLogReader(path)
    )
    comparison = replay_decisions(path)
    assert (comparison.first_difference, comparison.requests) == (None, 400)


async def test_what_a_full_disk_dropped_takes_no_header_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_log, "RETRY_S", 0.0)
    path, logging = tmp_path / "log", Logging()
    path.mkdir()  # stands for a disk that takes nothing
    log = open_log(path)
    logging.choosing.chooser.adopt(LeastLoaded(), 1)
    for round_number in range(2):
        for _ in range(5):
            choices, routed = logging.decide_any()
            log.add(record_of(choices, routed), choices, routed)
        log.lines._hand_over()
        if not round_number:
            await until(lambda: _is(log.dropped > 0), "dropped records")
            path.rmdir()
    await log.close()

    lines = list(DecisionLogReader(path))
    assert lines
    assert {one.header.settings_version for one in lines} == {1}
    assert replay_decisions(path).is_exact


async def _is(value: bool) -> bool:  # noqa: FBT001 - what is waited for
    return value


async def test_a_log_without_a_change_has_one_header(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await Logging(POLICY).write(path, 20)

    headers = [line for line in path.read_bytes().splitlines() if b'"warmroute"' in line]
    assert len(headers) == 1
