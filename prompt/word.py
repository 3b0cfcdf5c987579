r"""Short texts to ids by looking words up: the fastest way for the new end of a conversation.

Byte-level BPE never merges across the pieces that the pre-tokenizer pattern cuts. So the ids of a
text are those of its pieces, one after the other, and prose has few different ones: an engine is
asked once per piece, and the rest is one pass of the pattern and one look-up per piece.

A space behind other text begins a piece in every script (``prompt.boundary``): where no space
stands behind white space, a text is its words, each with the space before it. Other texts are done
here where they are ASCII and the patterns say the same with plain classes: letters are
``[A-Za-z]``, numbers ``[0-9]``, white space ``[\t-\r ]``, and there are no marks or other letters.
Whether that gives equal ids is tried at load (``prompt.engine``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeAlias

from prompt.native_word import NativeWords

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prompt.native_word import WordLibrary

_WordsOf: TypeAlias = "Callable[[str], bytes]"
MAX_WORDS: Final = 65_536
SHORT_CHARS: Final = 24
"""Texts up to here, such as what stands between two messages, are looked up as they are."""
MAX_SHORT: Final = 8_192
"""Of these. Few come again: more would be names and numbers, each of them met once."""
MAX_WORD_CHARS: Final = 48
"""Longer pieces are rarely seen again."""
MAX_TEXTS: Final = 2_048
MAX_TEXT_CHARS: Final = 2_048
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


_SPACED: Final = re.compile(r"\s ")
"""Python's white space is a superset of Unicode's, as for ``prompt.boundary``."""


def ascii_pattern(pattern: str) -> str:
    """Return what a known pre-tokenizer pattern means for ASCII, in the syntax of ``re``."""
    for unicode_class, ascii_class in _CLASSES:
        pattern = pattern.replace(unicode_class, ascii_class)
    return pattern


class _Words(dict[str, bytes]):
    """Piece -> packed ids; asks ``encode`` for what is not there. At most ``bound`` of them."""

    def __init__(self, encode: Callable[[str], bytes], bound: int = MAX_WORDS) -> None:
        super().__init__()
        self._encode = encode
        self._bound = bound

    def __missing__(self, word: str) -> bytes:
        packed = self._encode(word)
        if len(word) <= MAX_WORD_CHARS:
            if len(self) >= self._bound:
                self.clear()
            self[word] = packed
        return packed


class WordTable:
    """The words of one vocabulary. ``encode`` gives the packed ids of text without added tokens.

    ``added`` maps the contents of added tokens to packed ids. They must be found by one search for
    the leftmost content, whatever stands around it (``Shape.are_plain``). With a ``library`` it
    finds words, and gives the same ids (``prompt.native_word``).
    """

    def __init__(
        self,
        pattern: str,
        added: Mapping[str, bytes],
        encode: Callable[[str], bytes],
        library: WordLibrary | None = None,
    ) -> None:
        self._find = re.compile(ascii_pattern(pattern)).findall
        self._piece = _Words(encode).__getitem__
        self._short = _Words(encode, MAX_SHORT).__getitem__
        self._spaced = _Words(lambda word: encode(" " + word)).__getitem__
        self._native: tuple[_WordsOf, _WordsOf] | None = None
        """Of ASCII, and of text in which no space stands behind white space."""
        if library is not None:
            native = NativeWords(library, pattern, encode, MAX_WORDS)
            self._native = self._or_short(native.ascii), self._or_short(native.spaced)
        self._texts: dict[str, bytes] = {}
        self._added = dict(added)
        names = "|".join(map(re.escape, sorted(added)))
        self._split = re.compile(f"({names or '(?!)'})").split

    def packed(self, text: str) -> bytes | None:
        """Return the packed ids of ``text``; None where that takes the whole pattern.

        Other than ASCII it has to be as the tokenizer's normalizer leaves it.
        """
        words_of = self._words_of(text)
        return None if words_of is None else self._joined(text, words_of)

    def packed_again(self, text: str) -> bytes | None:
        """Return the same for a prompt whose messages come again: they are kept, a few thousand."""
        words_of, texts = self._words_of(text), self._texts
        if words_of is None:
            return None

        def known(part: str) -> bytes:
            packed = texts.get(part)
            if packed is None:
                packed = words_of(part)
                if SHORT_CHARS < len(part) <= MAX_TEXT_CHARS:
                    if len(texts) >= MAX_TEXTS:
                        texts.clear()
                    texts[part] = packed
            return packed

        return self._joined(text, known)

    def forget(self) -> None:
        """Forget whole texts; single words stay."""
        self._texts.clear()

    def _joined(self, text: str, words_of: _WordsOf) -> bytes:
        """Return the ids of ``text`` with its added tokens, ``words_of`` giving what is between."""
        parts = self._split(text)
        if len(parts) == 1:
            return words_of(text)
        added = self._added
        return b"".join(
            [added[part] if at & 1 else words_of(part) for at, part in enumerate(parts) if part]
        )

    def _words_of(self, text: str) -> _WordsOf | None:
        """Return what gives the ids of parts of ``text`` without added tokens, where that is here.

        A space after another character than white space begins a piece (``prompt.boundary``): where
        all do, a word and the space before it are looked up at once.
        """
        native = self._native
        if text.isascii():
            if native is not None:
                return native[0]
            return self._pieces if _is_wide(text) else self._words
        if _SPACED.search(text):
            return None
        return native[1] if native is not None else self._words

    def _or_short(self, look_up: _WordsOf) -> _WordsOf:
        """Return what looks short texts up as they are, and others by ``look_up``."""
        short = self._short
        return lambda text: short(text) if len(text) <= SHORT_CHARS else look_up(text)

    def _words(self, text: str) -> bytes:
        if len(text) <= SHORT_CHARS:
            return self._short(text)
        first, *words = text.split(" ")
        return self._short(first) + b"".join(map(self._spaced, words))

    def _pieces(self, text: str) -> bytes:
        if len(text) <= SHORT_CHARS:
            return self._short(text)
        if _is_wide(text):
            return b"".join(map(self._piece, self._find(text)))
        return self._words(text)


def _is_wide(text: str) -> bool:
    """Return whether a space stands behind other white space.

    One character is found far faster than two: what is rare is looked for alone.
    """
    return (
        "  " in text
        or "\n " in text
        or ("\t" in text and "\t " in text)
        or ("\r" in text and "\r " in text)
        or ("\x0b" in text and "\x0b " in text)
        or ("\x0c" in text and "\x0c " in text)
    )
