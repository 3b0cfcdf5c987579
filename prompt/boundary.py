r"""Where a text may be cut so that its parts, tokenized apart, give the ids of the whole.

Proved for byte-level BPE behind one of the pre-tokenizer patterns below, with no normalizer or
NFC. None of those patterns has lookbehind, and no match of any of them contains

* a character that is not white space followed by a space: a space only begins a match, or stands
  in a run of white space;
* a letter after a line feed: line ends only end a match, or stand in a run of white space.

So a match always ends there, whatever the text on either side, and matching starts afresh. On the
left the end of the text decides as the space or letter would have: runs of letters, digits or signs
end either way, contractions need one of their letters, and ``\s+(?!\S)`` gives a single line feed
after other text both times (that is why one has to stand before it). Both sides of a cut are stable
under NFC: ASCII spaces, line feeds and letters after a line feed never compose with what is before.

Added tokens are found before all that. None may contain white space, so none lies across a cut.
Tokens that swallow white space beside them (``lstrip``, ``rstrip``) leave only the cut between a
letter or digit and a space, and only if no such token ends in one. ``single_word`` sees a space or
a line feed at a cut, or the end of the text, which counts the same.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, Final

from msgspec import Struct

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2_PATTERN: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SIGNS_AND_SPACE: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_PATTERN: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _SIGNS_AND_SPACE
LLAMA3_PATTERN: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _SIGNS_AND_SPACE
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K_PATTERN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_PATTERNS: Final = frozenset({GPT2_PATTERN, QWEN2_PATTERN, LLAMA3_PATTERN, O200K_PATTERN})

# Python's white space is a superset of Unicode's: what is not white space here is none there.
_CUT: Final = re.compile(r"\S(?= )|\S\n(?=[^\W\d_])")
_CUT_BESIDE_STRIPPING: Final = re.compile(r"[A-Za-z0-9](?= )")
_SEARCH_BACK_CHARS: Final = 512


class Shape(Struct, frozen=True, kw_only=True):
    """What matters of a ``tokenizer.json`` whose texts can be cut.

    ``added`` maps contents to ids. ``are_plain``: all are found by one search for the leftmost
    content, whatever stands around it.
    """

    pattern: str
    is_nfc: bool
    is_stripping: bool
    added: dict[str, int]
    are_plain: bool

    def cut_after(self, text: str, position: int) -> int | None:
        """Return the first cut that is more than ``position`` characters into ``text``."""
        match = self._cuts.search(text, position)
        return match.end() if match else None

    def cut_before(self, text: str, low: int, high: int) -> int | None:
        """Return the last cut between ``low`` and ``high``, looking back a bounded way only."""
        if high <= low:
            return None
        low = max(low, high - _SEARCH_BACK_CHARS)
        # A cut is known by the character after it: that one must lie before ``high``, too.
        space = text.rfind(" ", low + 1, high)
        while space > low and not self._ends(text[space - 1]):
            space = text.rfind(" ", low + 1, space)
        if self.is_stripping:
            return space if space > low else None
        line = text.rfind("\n", max(low, space) + 1, high - 1)
        while line > low and not (_is_letter(text[line + 1]) and not text[line - 1].isspace()):
            line = text.rfind("\n", max(low, space) + 1, line)
        cut = max(space, line + 1 if line > low else 0)
        return cut if cut > low else None

    def _ends(self, char: str) -> bool:
        """Return whether a match ends with ``char`` before a space."""
        return char.isalnum() and char.isascii() if self.is_stripping else not char.isspace()

    @property
    def _cuts(self) -> re.Pattern[str]:
        return _CUT_BESIDE_STRIPPING if self.is_stripping else _CUT


def _is_letter(char: str) -> bool:
    return char.isalnum() and not char.isdecimal()


def shape_of(definition: dict[str, Any]) -> Shape | None:
    """Return the shape of a decoded ``tokenizer.json``; None where no cut is proved safe."""
    pattern = _pattern_of(definition.get("pre_tokenizer"))
    normalizer = definition.get("normalizer")
    is_nfc = normalizer == {"type": "NFC"}
    if pattern is None or not (normalizer is None or is_nfc) or not _is_plain_bpe(definition):
        return None
    tokens = definition.get("added_tokens") or []
    contents = [str(token["content"]) for token in tokens]
    if any(not content or any(map(str.isspace, content)) for content in contents):
        return None
    if any(token.get("rstrip") and token["content"][-1].isalnum() for token in tokens):
        return None
    return Shape(
        pattern=pattern,
        is_nfc=is_nfc,
        is_stripping=any(token.get("lstrip") or token.get("rstrip") for token in tokens),
        added={str(token["content"]): int(token["id"]) for token in tokens},
        are_plain=_are_plain(tokens),
    )


def _pattern_of(pre_tokenizer: object) -> str | None:
    if not isinstance(pre_tokenizer, dict):
        return None
    if _is_byte_level(pre_tokenizer, is_splitting=True):
        return GPT2_PATTERN
    parts = pre_tokenizer.get("pretokenizers")
    if pre_tokenizer.get("type") != "Sequence" or not isinstance(parts, list) or len(parts) != 2:  # noqa: PLR2004
        return None
    split, byte_level = parts
    if not _is_byte_level(byte_level, is_splitting=False) or split.get("type") != "Split":
        return None
    pattern = (split.get("pattern") or {}).get("Regex")
    is_isolated = split.get("behavior") == "Isolated" and not split.get("invert")
    return pattern if is_isolated and pattern in KNOWN_PATTERNS else None


def _is_byte_level(part: dict[str, Any], *, is_splitting: bool) -> bool:
    return (
        part.get("type") == "ByteLevel"
        and part.get("add_prefix_space") is False
        and part.get("use_regex", True) is is_splitting
    )


def _is_plain_bpe(definition: dict[str, Any]) -> bool:
    model = definition.get("model") or {}
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and not model.get("byte_fallback")
    )


def _are_plain(tokens: list[dict[str, Any]]) -> bool:
    contents = sorted(str(token["content"]) for token in tokens)
    has_prefixes = any(longer.startswith(shorter) for shorter, longer in pairwise(contents))
    has_flags = any(
        token.get(key) for token in tokens for key in ("lstrip", "rstrip", "single_word")
    )
    kinds = {bool(token.get("normalized")) for token in tokens}
    return not has_prefixes and not has_flags and len(kinds) <= 1
