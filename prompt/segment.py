"""Texts to ids, paying only for what is new since the longest known prefix.

A text is encoded in pieces that end at cuts (see ``prompt.boundary``). The pieces of a text are
remembered as marks in a prefix tree over its UTF-8: a mark says that the tokens up to a cut are the
first so many of a run. A later text resumes from the last mark that lies within what it shares.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from prompt.model import TemplateFailureError
from prompt.radix import PrefixTree
from prompt.run import RunTokens, TokenRun
from state.prefix import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prompt.boundary import Shape
    from prompt.engine import Engine

PIECE_CHARS: Final = 1024
SHORT_CHARS: Final = 8 * 1024
"""More new text than this is mostly a new conversation: its words are not known yet."""
DEFAULT_CACHE_BYTES: Final = 128 * 1024 * 1024


class Checkpoint(Struct, frozen=True, gc=False):
    """The tokens of a text up to a point: ``count`` of ``run``, then those of ``carried``.

    ``carried`` runs from the last cut to that point; its tokens depend on what follows.
    """

    run: TokenRun
    count: int
    carried: str = ""


class Encoded(Struct, frozen=True, gc=False):
    """The ids of a text, and where asked for, checkpoints (None where none is known)."""

    tokens: RunTokens
    checkpoints: tuple[Checkpoint | None, ...]


class SegmentCache:
    """Encodes texts of one tokenizer. For several threads: they exclude each other briefly.

    ``before`` and ``after`` are the packed ids that the tokenizer puts around every text.
    """

    def __init__(
        self,
        engine: Engine,
        shape: Shape,
        *,
        before: bytes = b"",
        after: bytes = b"",
        capacity_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self._engine = engine
        self._shape = shape
        self._after = after
        self._lock = threading.Lock()
        self._tree: PrefixTree[tuple[Checkpoint, int, int]] = PrefixTree(capacity_bytes)
        self._before = before

    @property
    def used_bytes(self) -> int:
        """Texts and marks; tokens weigh about as much as the texts."""
        return self._tree.used_bytes

    def forget(self) -> None:
        """Forget every text."""
        with self._lock:
            self._tree.clear()

    def encode(self, text: str, points: Sequence[int] = (), *, salt: str = "") -> Encoded:
        """Return the ids of ``text``, with checkpoints for ascending character ``points``.

        Nothing is resumed from texts of another ``salt``: how long this takes tells nothing of
        them.
        """
        try:
            key = text.encode()
        except UnicodeEncodeError as error:
            detail = "text with a lone surrogate"
            raise TemplateFailureError(detail) from error
        is_ascii = len(key) == len(text)
        owner = _owner(salt)
        key = owner + key if owner else key
        with self._lock:
            found = self._tree.find(key)
        start, begin_byte, begin = found.payload or (self.start(), 0, 0)
        fresh = text[begin:] if begin else text
        ends = self._cuts(fresh, [point - begin for point in points], PIECE_CHARS)
        pieces = self._pieces(fresh, ends, salt)
        with self._lock:
            run = start.run.extended(start.count, b"".join(pieces[:-1]))
            marks, count, byte = [], start.count, begin_byte
            for (first, end), piece in zip(_spans(ends), pieces, strict=False):
                count += len(piece) // TOKEN_BYTES
                byte += end - first if is_ascii else len(fresh[first:end].encode())
                # What follows the cut proves it: the mark counts for texts that share it.
                seen = len(owner) + byte + len(fresh[end].encode())
                marks.append((seen, (Checkpoint(run, count), byte, begin + end)))
            self._tree.insert(key, len(key), marks, found)
        tokens = RunTokens(run, count, pieces[-1] + self._after)
        counts = [start.count, *(mark[1][0].count for mark in marks)]
        return Encoded(tokens, _checkpoints(run, fresh, [0, *ends], counts, points, begin))

    def resume(
        self, start: Checkpoint, text: str, points: Sequence[int] = (), *, salt: str = ""
    ) -> Encoded:
        """Return the ids of what ``start`` stands for and ``text`` after it.

        ``points`` count from the beginning of ``text``, which is of the same ``salt`` as ``start``.
        """
        fresh = start.carried + text
        carried = len(start.carried)
        ends = self._cuts(fresh, [point + carried for point in points], SHORT_CHARS)
        pieces = self._pieces(fresh, ends, salt)
        with self._lock:
            run = start.run.extended(start.count, b"".join(pieces[:-1]))
        counts = [start.count]
        for piece in pieces[:-1]:
            counts.append(counts[-1] + len(piece) // TOKEN_BYTES)
        tokens = RunTokens(run, counts[-1], pieces[-1] + self._after)
        return Encoded(tokens, _checkpoints(run, fresh, [0, *ends], counts, points, -carried))

    def start(self) -> Checkpoint:
        """Return where every text begins."""
        run = TokenRun().extended(0, self._before)
        return Checkpoint(run, run.count)

    def _cuts(self, text: str, points: Sequence[int], most_chars: int) -> list[int]:
        """Return cuts: the last before each point and the end, and others where these are far."""
        cuts: list[int] = []
        low = 0
        for point in (*points, len(text)):
            while point - low > most_chars:
                cut = self._shape.cut_after(text, low + most_chars - 1)
                if cut is None or cut >= point:
                    break
                cuts.append(cut)
                low = cut
            cut = self._shape.cut_before(text, low, point) if point > low else None
            if cut is not None and cut > low:
                cuts.append(cut)
                low = cut
        return cuts

    def _pieces(self, text: str, ends: Sequence[int], salt: str) -> list[bytes]:
        engine = self._engine
        # Words that were seen before are faster, whoever's they were: not where salts are.
        is_looked_up = not salt and (len(text) <= SHORT_CHARS or engine.looks_up_long_texts)

        def packed(piece: str) -> bytes:
            # One without a cut may be as long as the text, and is rare or hostile.
            if is_looked_up and len(piece) <= SHORT_CHARS:
                return engine.packed_short(piece)
            return engine.packed(piece)

        first, pieces = 0, []
        for end in ends:
            pieces.append(packed(text[first:end]))
            first = end
        pieces.append(packed(text[first:]) if first < len(text) else b"")
        return pieces


def _owner(salt: str) -> bytes:
    """Return what keys of this salt begin with; no UTF-8 has these marks."""
    return b"\xff%b\xff" % salt.encode("utf-8", "surrogatepass") if salt else b""


def _spans(ends: Sequence[int]) -> zip[tuple[int, int]]:
    return zip([0, *ends], ends, strict=False)


def _checkpoints(
    run: TokenRun,
    fresh: str,
    cuts: Sequence[int],
    counts: Sequence[int],
    points: Sequence[int],
    begin: int,
) -> tuple[Checkpoint | None, ...]:
    """Return a checkpoint per point: from the last of ``cuts`` (with ``counts``) before it."""
    checkpoints: list[Checkpoint | None] = []
    index = 0
    for point in points:
        place = point - begin
        while index + 1 < len(cuts) and cuts[index + 1] <= place:
            index += 1
        is_known = place >= 0
        checkpoints.append(
            Checkpoint(run, counts[index], fresh[cuts[index] : place]) if is_known else None
        )
    return tuple(checkpoints)
