"""A tiny model that sees: its tokenizer and template, pictures, and chats about them.

A picture becomes 93, 166, 239 or 312 tokens, by its shape: 312 where it is square.
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import TYPE_CHECKING, Any, Final

from support.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, write_tokenizer
from support.vllm import made_by

if TYPE_CHECKING:
    from pathlib import Path

Json = dict[str, Any]

IMAGE_MARK: Final = "<image>"
TILES: Final = 4
"""In a row and in a column, at most: see ``tiny_idefics``."""
SIGHT_TOKENS: Final = (
    *SPECIAL_TOKENS,
    IMAGE_MARK,
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row + 1}_col_{column + 1}>" for row in range(TILES) for column in range(TILES)),
)
_SHOWN: Final = """{%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<image>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}"""
SIGHT_TEMPLATE: Final = CHAT_TEMPLATE.replace(
    "message.role + '\\n' + message.content }}", f"message.role + '\\n' }}}}\n    {_SHOWN}"
)
"""The same for chats of texts; contents are given in parts."""


def write_sighted_tokenizer(folder: Path) -> Path:
    """Write its tokenizer; returns the folder."""
    return write_tokenizer(
        folder,
        chat_template=SIGHT_TEMPLATE,
        config={"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL_TOKENS[0]},
        special_tokens=SIGHT_TOKENS,
    )


def write_sighted_model(folder: Path, vllm: Path) -> Path:
    """Write the model, with random weights, to ``folder``."""
    return made_by("tiny_idefics.py", write_sighted_tokenizer(folder), vllm)


def png(width: int, height: int, seed: int) -> bytes:
    """Return a picture of some colours, the same for the same ``seed`` up to 2^24."""
    red, green, blue = seed.to_bytes(3, "big")
    rows = b"".join(
        b"\0" + b"".join(bytes(((red + x) % 256, (green + y) % 256, blue)) for x in range(width))
        for y in range(height)
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (_chunk(b"IHDR", head), _chunk(b"IDAT", zlib.compress(rows)), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    sum_of = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", sum_of)


def picture(seed: int, width: int = 64, height: int = 64) -> Json:
    """Return the content part of a picture, as a data URL."""
    return linked("data:image/png;base64," + base64.b64encode(png(width, height, seed)).decode())


def linked(url: str) -> Json:
    """Return the content part of a picture at ``url``."""
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> Json:
    """Return the content part of a text."""
    return {"type": "text", "text": words}


def user(*parts: Json) -> Json:
    """Return a user's message."""
    return {"role": "user", "content": list(parts)}
