"""What reads bytes of others, each as a function that may raise nothing: the targets of a fuzzer.

A target gets any bytes. It checks what must hold whatever they are: no exception but the documented
ones, the same result however the bytes are cut, nothing accepted that another parser reads
otherwise. ``support.fuzz_seed`` has well-formed inputs to begin with.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prompt.anthropic import decode_messages
from prompt.model import BadPromptError
from prompt.passage import Passages
from prompt.plain import read_plain
from prompt.question import WrongAnswerError, rendered, tokenized
from prompt.request import decode_chat, decode_completion
from prompt.response import decode_response
from prompt.turn import ChatTurns
from replay.format import open_trace
from replay.trace import TraceError
from router.config import LimitSettings
from router.endpoint import Endpoint
from router.error import ClientError, ReplicaProtocolError
from router.intake import Intake
from router.observer import BodyObserver, StreamObserver, parse_usage
from router.registration import AddressRule, checked, literal
from router.reply_head import read_headers
from router.salt import salt_field, salted
from sidecar.event import MalformedError, decode_batch
from state.address import parse_address, redact
from state.facts import decode_facts
from state.model import (
    Generation,
    ModelIdentity,
    ReplicaId,
    ReplicaRecord,
)
from state.registry import Registry
from state.schema import (
    decode_entry,
    decode_leases,
    decode_load,
    decode_record,
    encode_record,
    suffix_parts,
    unpack_blocks,
)
from state.scope_epoch import EpochCodec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Target = Callable[[bytes], None]

LIMITS: Final = LimitSettings(body_bytes=4_096)
LARGEST: Final = 64 * 1024
"""Bytes of one input."""
GPU: Final = ReplicaId("gpu-0")
CANARY: Final = "canary-1"
CODEC: Final = EpochCodec(bytes(32))
RECORD: Final = ReplicaRecord(
    replica=GPU,
    endpoint="http://10.0.0.7:8000",
    generation=Generation("g1"),
    identity=ModelIdentity(model="m"),
    page_tokens=16,
    sidecar="s",
    capacity_pages=100,
)
_FIELD: Final = salt_field("ours")


def pieces_of(data: bytes) -> tuple[bytes, list[bytes]]:
    """Return what follows the first byte, whole, and cut as that byte says."""
    step, rest = 1 + (data[0] if data else 0), data[1:]
    return rest, [rest[at : at + step] for at in range(0, len(rest), step)]


# Streams and answers of replicas.


def sse(data: bytes) -> None:
    """Server-sent events: a tee that is the same however the stream is cut."""
    rest, pieces = pieces_of(data)
    seen = []
    for parts in ([rest], pieces):
        stream = StreamObserver(b"[DONE]")
        for part in parts:
            stream.feed(part)
        is_between = stream.is_between_events
        stream.close()
        seen.append((stream.is_done, stream.has_error, stream.usage(), is_between))
    assert seen[0] == seen[1]


def usage(data: bytes) -> None:
    """Read the usage in a plain JSON body."""
    observer = BodyObserver()
    for piece in pieces_of(data)[1]:
        observer.feed(piece)
    observer.close()
    told = observer.usage()
    assert told == parse_usage(data[1:])
    assert told is None or all(
        count is None or count >= 0
        for count in (told.prompt_tokens, told.completion_tokens, told.cached_tokens)
    )


def reply(data: bytes) -> None:
    """Read the header lines of a replica's answer."""
    lines = [line.partition(b":") for line in data.split(b"\n")]
    received = tuple((name, value) for name, _, value in lines)
    with contextlib.suppress(ReplicaProtocolError):
        head = read_headers(received)
        assert b"\n" not in head.lines.replace(b"\r\n", b"")
        assert b"\r" not in head.lines.replace(b"\r\n", b"")


def token_answer(data: bytes) -> None:
    """Answers of an engine that was asked for tokens."""
    for path in ("/v1/completions", "/v1/chat/completions"):
        with contextlib.suppress(WrongAnswerError):
            assert len(rendered(data, path)) % 4 == 0
    with contextlib.suppress(WrongAnswerError):
        assert len(tokenized(data)) % 4 == 0


# Bodies of clients.


def _refuse_twice(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found | {"": [name for name, _ in pairs]}


def _agrees(body: bytes, model: str, once: Iterable[str]) -> None:
    """Check that Python's parser reads what was accepted, and the same model in it."""
    read = json.loads(body.decode("utf-8"), object_pairs_hook=_refuse_twice)
    named = read.get("model")
    assert (named if isinstance(named, str) else "") == model
    for name in ("model", "cache_salt", *once):
        assert read[""].count(name) <= 1


def _call(decode: Callable[[bytes], Any], body: bytes, prompt: str) -> None:
    with contextlib.suppress(BadPromptError):
        call = decode(body)
        _agrees(body, call.model, [prompt])


def chat(data: bytes) -> None:
    """Chat bodies, fresh, and as turns that go on from one another."""
    _call(decode_chat, data, "messages")
    turns = ChatTurns()
    cut = data.rfind(b"]")
    for body in (data[:cut] + b"]}", data, data):
        fresh: object = None
        with contextlib.suppress(BadPromptError):
            fresh = decode_chat(body)
        try:
            assert turns.decode(body).call == fresh
        except BadPromptError:
            assert fresh is None


def completion(data: bytes) -> None:
    """Completion bodies."""
    _call(decode_completion, data, "prompt")
    passages = Passages()
    for _ in range(2):
        with contextlib.suppress(BadPromptError):
            passages.decode(data)


def response(data: bytes) -> None:
    """Bodies of the Responses API."""
    _call(decode_response, data, "input")


def message(data: bytes) -> None:
    """Bodies of Anthropic's Messages API."""
    _call(decode_messages, data, "messages")


def plain(data: bytes) -> None:
    """Bodies of which only the model is read."""
    _call(lambda body: read_plain(body, is_json=True), data, "model")
    with contextlib.suppress(BadPromptError):
        read_plain(data, is_json=False)


def salt(data: bytes) -> None:
    """Give a tenant's body the router's salt for its only one."""
    with contextlib.suppress(ClientError):
        body = salted(data, _FIELD)
        with contextlib.suppress(BadPromptError):
            read_plain(body, is_json=True)
            _agrees(body, read_plain(body, is_json=True).model, [])
            assert json.loads(body)["cache_salt"] == "ours"


def intake(data: bytes) -> None:
    """HTTP requests, the same however they are cut."""
    rest, pieces = pieces_of(data)
    assert _requests([rest]) == _requests(pieces)


def _requests(pieces: Iterable[bytes]) -> list[object]:
    taken = Intake(LIMITS)
    found: list[object] = []
    for piece in pieces:
        taken.feed(piece)
        while (request := taken.request) is not None:
            if request.refusal is not None:
                return [*found, request.refusal.status]
            if not request.is_settled:
                break
            try:
                found.append((request.method, request.target, request.body()))
            except ClientError as error:
                return [*found, error.status]
            if not request.keep_alive:
                return found
            taken.release()
    return found


# Values of the store, and addresses.


def event(data: bytes) -> None:
    """KV events of an engine."""
    with contextlib.suppress(MalformedError):
        for one in decode_batch(data).events:
            handles = getattr(one, "handles", ())
            assert all(0 <= handle < 2**64 for handle in handles)


def record(data: bytes) -> None:
    """Read a replica's record, and the address in it."""
    found = decode_record(data, GPU)
    if found is None:
        return
    assert found.replica == GPU
    with contextlib.suppress(ValueError):
        endpoint = checked(found, AddressRule())
        assert 1 <= endpoint.port <= 65_535
        assert endpoint.authority.isascii()
        address = literal(endpoint.host)
        assert address is None or AddressRule().allows(address)


def url(data: bytes) -> None:
    """Addresses of replicas and of the store; what is logged of one has no credentials."""
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        Endpoint.configured(text)
    with contextlib.suppress(ValueError):
        parse_address(text)
    for made in (f"redis://u:{CANARY}@{text}", f"redis+cluster://{CANARY}@{text}"):
        said = redact(made)
        try:
            parse_address(made)
        except ValueError as error:
            said += str(error)
        assert CANARY not in said


def store(data: bytes) -> None:
    """Every other value of the store."""
    kind, value = (data[0] % 8 if data else 0), data[1:]
    if kind == 0:
        _registry(value)
    elif kind == 1:
        decode_facts(value)
    elif kind == 2:
        for totals in (decode_leases(value) or {}).values():
            assert min(totals.inflight, totals.uncached_tokens, totals.prefilling) >= 0
            assert 0.0 <= totals.backlog_ms <= 1e9
    elif kind == 3:
        found = decode_entry([b"e", value])
        assert found is None or len(unpack_blocks(found.stored)) * 16 == len(found.stored)
    elif kind == 4:
        assert CODEC.decode("scope", value) is None or len(value) > CODEC_BYTES
    else:
        suffix_parts(value.decode("utf-8", "replace"))


CODEC_BYTES: Final = 40


def _registry(value: bytes) -> None:
    load = decode_load(value)
    if load is not None:
        assert all(count is None or count >= 0 for count in (load.running, load.queued))
        used = load.kv_used_fraction
        assert used is None or used >= 0.0
    registry = Registry(grace_s=1.0, load_ttl_s=1.0)
    registry.observe({GPU: (encode_record(RECORD), value)}, 0.0)
    registry.observe({GPU: (value, value)}, 1.0)
    assert set(registry.view()) == {GPU}


# Lines of traces.


def trace(data: bytes) -> None:
    """Read a file of any trace format."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.jsonl"
        path.write_bytes(data)
        with contextlib.suppress(TraceError):
            for request in open_trace(path):
                assert request.prompt_tokens >= 0


TARGETS: Final[dict[str, Target]] = {
    target.__name__: target
    for target in (
        *(sse, usage, reply, token_answer),
        *(chat, completion, response, message, plain, salt, intake),
        *(event, record, url, store, trace),
    )
}
