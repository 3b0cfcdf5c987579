"""Token ids to text, piece by piece: the pieces add up to what the codec says of all ids together.

A token is not a text of its own: a character may be spread over several tokens, a decoder may drop
the space in front of the first one, and special tokens say nothing. So the ids of a short window
are decoded again with each token, and what the window says more than before is new. Text is held
back as long as another token could still change it:

- In a byte-level vocabulary that is a character whose bytes are incomplete, one replacement
  character at the end of the text.
- Where single bytes are a fallback (``<0xE4>``), a run of them is read as a whole: one wrong byte
  turns all of it into replacement characters. A run is held back until a token that is no byte
  ends it. ``Probe`` is a byte that tells: appended, it changes what is not settled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Protocol

    class Decoder(Protocol):
        """What is needed of a ``Codec``."""

        @property
        def vocabulary_size(self) -> int:
            """Ids are below this."""

        def decode(self, ids: Sequence[int]) -> str:
            """Return the text of generated ids, without special tokens."""


REPLACEMENT: Final = "\ufffd"
LONGEST_WINDOW_TOKENS: Final = 64
"""A run of byte tokens beyond this is shown, even if it may turn out to be no text."""
_CONTEXT_TOKENS: Final = 8
_CHARACTER_TOKENS: Final = (1, 2, 3, 4)
_HIGH_BYTES: Final = 128


class Probe(Struct, frozen=True):
    """A byte token that spoils the run before it; None where no token can."""

    token: int | None = None


def find_probe(codec: Decoder) -> Probe:
    """Return the probe of a vocabulary.

    Costs some 300 decodings, and one for each token of a vocabulary without partial characters;
    do it once and give the result to every ``TextStream``.
    """
    partial: list[int] = []
    for token in range(codec.vocabulary_size):
        if codec.decode([token]) == REPLACEMENT:
            partial.append(token)
            if len(partial) == _HIGH_BYTES:
                break
    if not partial:
        return Probe()
    # A leading byte and one that continues it are one incomplete character in a byte-level
    # vocabulary. Read as a run they are a whole character or two wrong bytes.
    is_byte_level = any(codec.decode([lead, partial[0]]) == REPLACEMENT for lead in partial)
    return Probe(None if is_byte_level else partial[0])


class TextStream:
    """The text of one answer as it grows. Each token costs a few decodings of a bounded window.

    Exact, except for a run of more than ``LONGEST_WINDOW_TOKENS`` byte-fallback tokens: it is cut
    there, and each part is read by itself.
    """

    def __init__(self, codec: Decoder, probe: Probe | None = None) -> None:
        self._decode = codec.decode
        self._probe = (find_probe(codec) if probe is None else probe).token
        self._window: list[int] = []
        self._shown_chars = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take more ids and return the text that is certain now."""
        return "".join(self._pieces(token_ids))

    def flush(self) -> str:
        """Return the text that was held back: there are no more ids."""
        text = self._decode(self._window)[self._shown_chars :]
        self._window, self._shown_chars = [], 0
        return text

    def _pieces(self, token_ids: Sequence[int]) -> Iterator[str]:
        for token in token_ids:
            if not self._is_silent(token):
                self._window.append(token)
                yield self._settled()

    def _is_silent(self, token: int) -> bool:
        """Tell whether a token never says anything; twice, as one leading space may be dropped."""
        return not self._decode([token, token])

    def _settled(self) -> str:
        text = self._decode(self._window)
        settled_chars = self._settled_chars(text)
        piece = text[self._shown_chars : settled_chars]
        self._shown_chars = max(self._shown_chars, settled_chars)
        if settled_chars == len(text):
            self._restart(1)
        elif len(self._window) > LONGEST_WINDOW_TOKENS:
            piece += self._cut(text)
        return piece

    def _settled_chars(self, text: str) -> int:
        """Return how many characters of the window's text no later token can change."""
        if self._probe is None:
            return len(text) - text.endswith(REPLACEMENT)
        spoilt = self._decode([*self._window, self._probe])
        return len(text[: _common_chars(text, spoilt)].rstrip(REPLACEMENT))

    def _cut(self, text: str) -> str:
        """Shorten a window that is too long, and return what must be shown for that.

        Between characters the run is shown as far as it goes; a few tokens later it is certain that
        it has wrong bytes. At most the last character is incomplete, whatever came before.
        """
        shown_chars = self._shown_chars
        for tokens in _CHARACTER_TOKENS:
            if REPLACEMENT not in self._decode(self._window[-tokens:]):
                self._restart(tokens)
                return text[shown_chars:]
        if len(self._window) <= LONGEST_WINDOW_TOKENS + len(_CHARACTER_TOKENS):
            return ""
        self._restart(_CONTEXT_TOKENS)
        self._shown_chars -= 1
        return text[shown_chars:-1]

    def _restart(self, context_tokens: int) -> None:
        """Go on with the last tokens, all of whose text was shown."""
        self._window = self._window[-context_tokens:]
        self._shown_chars = len(self._decode(self._window))


def _common_chars(left: str, right: str) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))
