"""What replicas of the chaos rig say, so that everybody can prove it. The standard library alone.

A prompt carries a mark with the request's nonce; an answer is made of pieces that are signed with
it: ``nonce.sequence.mac``. Who has the key of the run can tell whose answer a piece belongs to and
which place it has there.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from typing import Any, Final

MODEL: Final = "chaos-model"
PATH: Final = "/v1/chat/completions"
POISON: Final = "DEADLYPOISON"
NONCE: Final = re.compile(r"zq[0-9a-f]{14}")
"""Every nonce and every tenant's canary looks like this, and nothing else does."""
MARK: Final = re.compile(
    r"\[id=(?P<request>[\w-]+) tenant=(?P<tenant>\w+) nonce=(?P<nonce>zq[0-9a-f]{14})\]"
)
BLOCK_TOKENS: Final = 64
DONE: Final = b"data: [DONE]\n\n"


def rendered(messages: list[dict[str, Any]]) -> bytes:
    """Return the prompt of a chat as the template of the rig's tokenizer has it, a byte a token."""
    return "".join(f"<{one['role']}>{one['content']}\n" for one in messages).encode() + b"<a>"


TEMPLATE: Final = (
    "{%- for m in messages %}{{- '<' + m.role + '>' + m.content + '\\n' }}{%- endfor %}{{- '<a>' }}"
)
"""``rendered`` in Jinja."""


def piece(key: bytes, nonce: str, sequence: int) -> str:
    """Return one signed piece of an answer."""
    told = f"{nonce}.{sequence}"
    return f"{told}.{hmac.new(key, told.encode(), hashlib.sha256).hexdigest()[:16]} "


def chunk(attempt: str, text: str, *, is_last: bool = False) -> bytes:
    """Return one event of a stream."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop" if is_last else None}
    event = {"id": attempt, "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    told = json.dumps(event | {"choices": [choice]}, separators=(",", ":"))
    return b"data: " + told.encode() + b"\n\n"


def usage(prompt: int, cached: int, output: int) -> dict[str, Any]:
    """Return the usage of an answer, in tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def whole(attempt: str, text: str, told: dict[str, Any]) -> bytes:
    """Return an answer that is no stream."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
    }
    head = {"id": attempt, "object": "chat.completion", "created": 1, "model": MODEL}
    return json.dumps(head | {"choices": [choice], "usage": told}).encode()


def block_ids(salt: str, prompt: bytes) -> list[bytes]:
    """Return the names of a prompt's full blocks in a replica's cache."""
    parent = hashlib.sha256(b"root" + salt.encode()).digest()[:16]
    ids = []
    for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
        parent = hashlib.sha256(parent + prompt[end - BLOCK_TOKENS : end]).digest()[:16]
        ids.append(parent)
    return ids
