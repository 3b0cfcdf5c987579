"""Completions whose prompt continues a known one: decode and tokenize only what is new of it.

The same as ``prompt.turn`` for one long text: bodies are kept up to the end of their prompt, with
marks inside of it. A mark stands where no character and no escape is cut in two, so that the JSON
string on either side of it is a string of its own; the tokens up to there are checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from prompt.model import BadPromptError
from prompt.radix import PrefixTree
from prompt.request import CompletionCall, completion_call, completion_head
from prompt.turn import is_apart

if TYPE_CHECKING:
    from prompt.radix import Found
    from prompt.segment import Checkpoint

DEFAULT_BODY_BYTES: Final = 64 * 1024 * 1024
CHUNK_BYTES: Final = 8 * 1024
MIN_PROMPT_BYTES: Final = 4 * 1024
_ATTEMPTS: Final = 16
"""More than the longest escape has bytes: two halves of a character."""
_CONTINUES: Final = 0x80
_QUOTE: Final = b'"'
_OTHER_PROMPTS: Final = (b'prompt"', b'prompt_embeds"', b"\\u00")
"""How a second key of that name, or one that outdoes it, could be spelled."""


class Mark:
    """A place in a prompt: checkpoints by tokenizer (its cache). Text before it is known."""

    __slots__ = ("begin", "checkpoints", "end")

    def __init__(self, begin: int, end: int) -> None:
        self.begin = begin
        """Where the prompt's opening quote stands in the body."""
        self.end = end
        self.checkpoints: dict[int, Checkpoint] = {}


class Passage(Struct, frozen=True, kw_only=True):
    """One completion.

    Where there are ``marks``, its only prompt is a text, and ``call`` holds what is not known of
    it: the ``chunks``, each of which ends at its mark.
    """

    call: CompletionCall
    body: bytes
    fresh_bytes: int
    known: Mark | None = None
    chunks: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()


class Passages:
    """Decodes completions. For one thread. ``capacity_bytes`` bounds the bodies that are kept."""

    def __init__(self, capacity_bytes: int = DEFAULT_BODY_BYTES) -> None:
        self._tree: PrefixTree[Mark] = PrefixTree(capacity_bytes)

    @property
    def used_bytes(self) -> int:
        """Bodies and marks; tokens weigh about as much again."""
        return self._tree.used_bytes

    def forget(self) -> None:
        """Forget every body."""
        self._tree.clear()

    def decode(self, body: bytes) -> Passage:
        """Decode one body; raises BadPromptError where the client is to blame."""
        found = self._tree.find(body)
        known = found.payload
        if known is not None and body[known.end : known.end + 1] != _QUOTE:
            begin = known.begin
            shortened = body[: begin + 1] + body[known.end :]
            try:
                passage = self._read(body, shortened, begin, known, found)
            except BadPromptError:
                passage = None  # with the known text, the error tells its place
            if passage is not None:
                return passage
        return self._begun(body, found)

    def _begun(self, body: bytes, found: Found[Mark]) -> Passage:
        head = completion_head(body)
        raw = bytes(head.prompt)
        call = completion_call(head)
        if len(raw) >= MIN_PROMPT_BYTES and raw[:1] == _QUOTE and call.unroutable is None:
            begin = body.find(raw)
            emptied = completion_head(body[:begin] + b'""' + body[begin + len(raw) :])
            if bytes(emptied.prompt) == b'""':
                passage = self._read(body, body, begin, None, found)
                if passage is not None:
                    return passage
        return Passage(call=call, body=body, fresh_bytes=len(body))

    def _read(
        self, body: bytes, shortened: bytes, begin: int, known: Mark | None, found: Found[Mark]
    ) -> Passage | None:
        """Return the passage in ``shortened``: the body without what is known of its prompt."""
        head = completion_head(shortened)
        raw = bytes(head.prompt)
        end = begin + len(raw)
        if raw[:1] != _QUOTE or shortened[begin:end] != raw:
            return None
        if any(spelling in shortened[end:] for spelling in _OTHER_PROMPTS):
            return None
        call = completion_call(head)
        if call.unroutable is not None or not is_apart(body, begin, call.salt or None):
            return None
        skipped = len(body) - len(shortened) + begin
        ends, chunks = zip(*_chunks_of(raw), strict=True)
        marks = tuple(Mark(begin, skipped + end) for end in ends)
        self._tree.insert(body, marks[-1].end, [(mark.end, mark) for mark in marks], found)
        return Passage(
            call=call,
            body=body,
            fresh_bytes=len(shortened),
            known=known,
            chunks=chunks,
            marks=marks,
        )


def _chunks_of(raw: bytes) -> list[tuple[int, str]]:
    """Return the parts of a JSON string, decoded, and where each one ends."""
    chunks = []
    position, last = 1, len(raw) - 1
    while position < last:
        target = position + CHUNK_BYTES if last - position > 2 * CHUNK_BYTES else last
        for end in range(target, target - _ATTEMPTS, -1):
            text = _decoded_part(raw[position:end]) if raw[end] & 0xC0 != _CONTINUES else None
            if text is not None:
                chunks.append((end, text))
                position = end
                break
    return chunks


def _decoded_part(part: bytes) -> str | None:
    """Return the text of a part of a JSON string; None where it ends within an escape."""
    try:
        return msgspec.json.decode(_QUOTE + part + _QUOTE, type=str)
    except msgspec.DecodeError:
        return None
