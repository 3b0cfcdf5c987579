"""The compiled stub replica and load generator; `make bench-quick` builds them and runs this."""

import http.client
import json
import random
from pathlib import Path

import pytest

from conversation import Conversations, write_bodies
from native import HeldStreams, NativeError, Stub, run_load

pytestmark = pytest.mark.heavy


def bodies(path: Path, count: int, stamp: str | None = None) -> Path:
    some = iter(Conversations(4_096, 2, 800, 1, stamp=stamp))
    return write_bodies(path / "bodies", [next(some) for _ in range(count)])


def ask(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(method, path, body)
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


def test_the_stub_answers_as_an_engine_does() -> None:
    with Stub(2) as stub:
        for port in stub.ports:
            assert ask(port, "GET", "/health") == (200, b"")
            assert json.loads(ask(port, "GET", "/v1/models")[1])["data"][0]["id"] == "bench"
            assert ask(port, "GET", "/healthy")[0] == 404
            assert ask(port, "POST", "/tokenize", b"{}")[0] == 404
            status, body = ask(port, "POST", "/v1/chat/completions", b"{}")
            assert status == 200
            assert json.loads(body)["choices"][0]["message"]["role"] == "assistant"
        assert stub.served() == (2, 0)


def test_the_stub_gives_equal_beginnings_equal_tokens() -> None:
    def tokens(body: bytes) -> list[int]:
        answer = ask(stub.ports[0], "POST", "/v1/chat/completions/render", body)[1]
        found: list[int] = json.loads(answer)["token_ids"]
        return found

    text = random.Random(1).randbytes(400_000)
    with Stub(1) as stub:
        whole = tokens(text)
        assert len(whole) == 100_000
        assert len(set(whole)) > 50_000
        assert tokens(text[:4_000] + b"other words here") == [
            *whole[:1_000],
            *tokens(b"other words here"),
        ]
        assert stub.served() == (0, 0)


def test_the_stub_streams_events_at_the_pace_that_is_asked_for() -> None:
    with Stub(1) as stub:
        _, body = ask(stub.ports[0], "POST", "/v1/chat/completions", b'"pace-3-1000"')
        events = body.decode().strip().split("\n\n")
        assert [event[:6] for event in events] == ["data: "] * 4
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[0][6:])["object"] == "chat.completion.chunk"
        assert stub.served() == (1, 3)


@pytest.mark.parametrize("open_loop", [(), (2_000, 1)])
def test_the_load_generator_counts_what_is_answered(
    tmp_path: Path, open_loop: tuple[int, ...]
) -> None:
    with Stub(1) as stub:
        load = run_load(stub.ports[0], bodies(tmp_path, 300), 4, 300, *open_loop)
        assert (load.answered, load.failed) == (300, 0)
        assert stub.served() == (300, 0)
        assert 0 < load.p50_us <= load.p99_us <= load.most_us <= load.wall_us


def test_the_load_generator_counts_events(tmp_path: Path) -> None:
    with Stub(1) as stub:
        load = run_load(stub.ports[0], bodies(tmp_path, 20, "pace-500-0"), 4, 20)
        assert load.events == 20 * 501
        assert stub.served() == (20, 20 * 500)


def test_a_request_that_is_not_answered_well_is_an_error(tmp_path: Path) -> None:
    with Stub(1) as stub, pytest.raises(NativeError, match="5 requests failed"):
        run_load(stub.ports[0], "GET", "/nothing", 1, 5)
    with Stub(1) as stub, pytest.raises(NativeError, match="more requests than bodies"):
        run_load(stub.ports[0], bodies(tmp_path, 3), 1, 5)


def test_streams_are_held_open_until_they_are_let_go(tmp_path: Path) -> None:
    path = bodies(tmp_path, 50, "pace-2-3600000000")
    with Stub(1) as stub:
        with HeldStreams(stub.ports[0], path, 50):
            assert stub.served() == (50, 50)
        assert ask(stub.ports[0], "GET", "/health") == (200, b"")


def test_streams_that_end_are_not_held(tmp_path: Path) -> None:
    path = bodies(tmp_path, 5)
    with Stub(1) as stub, pytest.raises(NativeError, match="5 streams could not be opened"):
        HeldStreams(stub.ports[0], path, 5)
