r"""Short ASCII texts to ids by looking words up: the fastest way for the new end of a conversation.

Byte-level BPE never merges across the pieces that the pre-tokenizer pattern cuts. So the ids of a
text are those of its pieces, one after the other, and prose has few different ones: an engine is
asked once per piece, and the rest is one pass of the pattern and one look-up per piece.

Only ASCII is done here, where the patterns say the same with plain classes: letters are
``[A-Za-z]``, numbers ``[0-9]``, white space ``[\t-\r ]``, and there are no marks or other letters.
Whether that gives equal ids is tried at load (``prompt.engine``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

MAX_WORDS: Final = 65_536
SHORT_CHARS: Final = 24
"""Texts up to here, such as what stands between two messages, are looked up as they are."""
MAX_WORD_CHARS: Final = 48
"""Longer pieces are rarely seen again."""
_WIDE_SPACES: Final = ("  ", "\n ", "\t ", "\r ", "\x0b ", "\x0c ")
_CLASSES: Final = (
    (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", "[A-Z]"),
    (r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", "[a-z]"),
    (r"[^\s\p{L}\p{N}]", r"[^\t-\r A-Za-z0-9]"),
    (r"[^\r\n\p{L}\p{N}]", r"[^\r\nA-Za-z0-9]"),
    (r"\p{L}", "[A-Za-z]"),
    (r"\p{N}", "[0-9]"),
    (r"\S", r"[^\t-\r ]"),
    (r"\s", r"[\t-\r ]"),
)


def ascii_pattern(pattern: str) -> str:
    """Return what a known pre-tokenizer pattern means for ASCII, in the syntax of ``re``."""
    for unicode_class, ascii_class in _CLASSES:
        pattern = pattern.replace(unicode_class, ascii_class)
    return pattern


class _Words(dict[str, bytes]):
    """Piece -> packed ids; asks ``encode`` for what is not there. Bounded."""

    def __init__(self, encode: Callable[[str], bytes]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, word: str) -> bytes:
        packed = self._encode(word)
        if len(word) <= MAX_WORD_CHARS:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = packed
        return packed


class WordTable:
    """The words of one vocabulary. ``encode`` gives the packed ids of text without added tokens.

    ``added`` maps the contents of added tokens to packed ids. They must be found by one search for
    the leftmost content, whatever stands around it (``Shape.are_plain``).
    """

    def __init__(
        self, pattern: str, added: Mapping[str, bytes], encode: Callable[[str], bytes]
    ) -> None:
        self._find = re.compile(ascii_pattern(pattern)).findall
        self._piece = _Words(encode).__getitem__
        self._short = _Words(encode).__getitem__
        self._spaced = _Words(lambda word: encode(" " + word)).__getitem__
        self._added = dict(added)
        leads = {content[0] for content in added}
        self._lead = leads.pop() if len(leads) == 1 else ""
        self._match = re.compile("|".join(map(re.escape, sorted(added))) or r"(?!)")

    def packed(self, text: str) -> bytes | None:
        """Return the packed ids of ``text``; None where it is not ASCII."""
        if not text.isascii():
            return None
        if self._lead and self._lead not in text:
            return self._words(text)
        parts: list[bytes] = []
        position = 0
        for begin, end in self._found(text):
            if begin > position:
                parts.append(self._words(text[position:begin]))
            parts.append(self._added[text[begin:end]])
            position = end
        parts.append(self._words(text[position:]))
        return b"".join(parts)

    def _words(self, text: str) -> bytes:
        """Return the ids of a text without added tokens.

        A space after another character than white space begins a piece (``prompt.boundary``): where
        all do, a word and the space before it are looked up at once.
        """
        if len(text) <= SHORT_CHARS:
            return self._short(text)
        for two in _WIDE_SPACES:
            if two in text:
                return b"".join(map(self._piece, self._find(text)))
        first, *words = text.split(" ")
        return self._short(first) + b"".join(map(self._spaced, words))

    def _found(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield where added tokens stand in ``text``."""
        if not self._lead:
            for match in self._match.finditer(text):
                yield match.span()
            return
        begin = text.find(self._lead)
        while begin >= 0:
            token = self._match.match(text, begin)
            if token is not None:
                yield token.span()
            begin = text.find(self._lead, begin + 1 if token is None else token.end())
