"""Well-formed inputs of the fuzz targets, and mutations of them that need no fuzzer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from state.model import Generation, ReplicaFacts, ReplicaLoad
from state.schema import Entry, EntryKind, encode_entry, encode_load, encode_record
from state.scope_epoch import unsettled_epoch
from support.fuzz_target import CODEC, RECORD

if TYPE_CHECKING:
    from random import Random

PIECES: Final = (
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b",",
        b":",
        b"\\",
        b"\\u0061",
        b"\\ud800",
        b"\0",
        b"\xff",
        b" ",
    ),
    *(b"\n", b"\r", b"\r\n", b"\n\n", b"1e999", b"-1", b"NaN", b"null", b"true", b"9" * 400, b"0"),
    *(
        b'"model":"n",',
        b'"messages":[],',
        b'"cache_salt":"t",',
        b'"usage":{',
        b'"error":',
        b"data:",
    ),
    *(
        b"[DONE]",
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
        b"chunked",
        b"Content-Length: 5\r\n",
        b"@",
        b"%00",
    ),
    *(
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\xcb\x7f\xf8" + bytes(6),
    ),
    *(
        b"[" * 2_000,
        b"\x91" * 2_000,
        b'{"a":' * 2_000,
        b"2130706433",
        b"169.254.169.254",
        b"::ffff:",
    ),
)
"""What parsers disagree on, or trip over."""


def mutated(seed: bytes, rng: Random) -> bytes:
    """Return ``seed`` after some edits: pieces put in or over, cut out, doubled, bits turned."""
    data = bytearray(seed)
    for _ in range(rng.randint(1, 6)):
        at = rng.randint(0, len(data))
        end = min(len(data), at + rng.choice((0, 1, 1, 2, 4, 16, 64)))
        edit = rng.randrange(5)
        if edit == 0:
            data[at:at] = rng.choice(PIECES)
        elif edit == 1:
            data[at:end] = rng.choice(PIECES)
        elif edit == 2:
            del data[at:end]
        elif edit == 3:
            data[at:at] = data[at:end]
        elif at < len(data):
            data[at] ^= 1 << rng.randrange(8)
    return bytes(data)


def _json(**fields: object) -> bytes:
    return msgspec.json.encode(fields)


_MESSAGES: Final = [{"role": "user", "content": "hello \u00e9 \U0001f600"}]
_TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": {"model": "x"}}}]
_CHAT: Final = _json(model="m", messages=_MESSAGES, cache_salt="s", n=1, tools=_TOOLS)
_HTTP: Final = (
    (
        b"\x07POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
        b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
    ),
    (
        b"\x02POST /x HTTP/1.1\r\nHost: a:1\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3;a=b\r\nabc\r\n0\r\nX: y\r\n\r\nGET / HTTP/1.0\r\n\r\n"
    ),
    b"\x20POST /x HTTP/1.1\r\nHost: [::1]\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n",
)
_STREAM: Final = (
    b'\x05data: {"choices":[{"delta":{"content":"x"}}]}\r\n\r\n: ping\n\n'
    b'data: {"usage":{"prompt_tokens":9,"completion_tokens":1,'
    b'"prompt_tokens_details":{"cached_tokens":7}}}\n\ndata: {"error":{"message":"x"}}\n\n'
    b"data: [DONE]\n\n"
)
_EVENTS: Final = (
    msgspec.msgpack.encode([1.0, [["BlockStored", [1, 2], None, list(range(8)), 4, None, "GPU"]]]),
    msgspec.msgpack.encode(
        [1.0, [{"type": "BlockRemoved", "block_hashes": [b"12345678"], "medium": "CPU"}], 0]
    ),
    msgspec.msgpack.encode([1.0, [["AllBlocksCleared"]], 1]),
)
_LOAD: Final = encode_load(ReplicaLoad(running=1, queued=2, kv_used_fraction=0.5))
SEEDS: Final[dict[str, tuple[bytes, ...]]] = {
    "sse": (_STREAM, _STREAM.replace(b"\n", b"\r\n"), _STREAM.replace(b"\n", b"\r")),
    "usage": (b'\x09{"id":"x","usage":{"input_tokens":5,"output_tokens":1}}',),
    "reply": (b"Content-Type: text/event-stream\nTransfer-Encoding: chunked\nRetry-After: 1",),
    "token_answer": (
        _json(count=2, max_model_len=9, tokens=[1, 2]),
        _json(token_ids=[1, 2]),
        msgspec.json.encode([{"token_ids": [1, 2]}]),
    ),
    "chat": (
        _CHAT,
        _json(model="m", messages=_MESSAGES * 3),
        _CHAT.replace(b"model", b"\\u006dodel"),
    ),
    "completion": (
        _json(model="m", prompt="x" * 5_000),
        _json(model="m", prompt=[[1, 2], [3]], cache_salt=None),
    ),
    "response": (
        _json(model="m", input=[{"role": "user", "content": "x"}], instructions="y"),
        _json(model="m", input="x", reasoning={"effort": "low"}, tools=_TOOLS),
    ),
    "message": (
        _json(model="m", max_tokens=1, messages=_MESSAGES, system="s"),
        _json(
            model="m",
            messages=[
                {"role": "assistant", "content": [{"type": "tool_use", "id": "i", "input": {}}]}
            ],
        ),
    ),
    "plain": (_json(model="m", input="x", seed=1.5), b'{"model":null}'),
    "salt": (_CHAT, _json(model="m", kv_transfer_params=None, prompt="x"), b"{}"),
    "intake": _HTTP,
    "event": _EVENTS,
    "record": (encode_record(RECORD), encode_record(RECORD).replace(b"10.0.0.7", b"[::1]")),
    "url": (b"http://10.0.0.7:8000", b"host:6379", b"redis+cluster://u:p@a:1,b:2", b"unix:/run/x"),
    "store": (
        b"\0" + _LOAD,
        b"\0" + encode_record(RECORD),
        b"\1" + msgspec.json.encode(ReplicaFacts()),
        b"\2" + msgspec.msgpack.encode({"gpu-0": (1, 2, 3, 4.5, ((1, bytes(8)),))}),
        b"\3"
        + encode_entry(
            Entry(kind=EntryKind.CHANGED, generation=Generation("g"), stored=bytes(32), sequence=1)
        ),
        b"\4" + CODEC.encode("scope", unsettled_epoch()),
        b"\5g1:0123456789abcdef:gpu",
    ),
    "trace": (
        b'{"timestamp":0,"input_length":600,"output_length":5,"hash_ids":[1,2]}\n',
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
        b'{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"y"}]}\n',
    ),
}
