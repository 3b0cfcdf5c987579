"""Texts that are hard on tokenizers, for hypothesis: edits, joins, scripts, added tokens."""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st

PARTS: Final = (
    *("a", "b", "Ab", "X", "word", " ", "  ", "\n", "\n\n", "\r", "\r\n", "\t", "'s", "'RE", "'"),
    *("1", "23", "4567", "!", "?", "/", ".", "...", "<|im_start|>", "<|im_end|>", "<|im", "_end|>"),
    *("<tool_call>", "</tool_call>", "<|end|>", "<", ">", "é", "e\u0301", "\u0301", "\u0338"),
    *("你", "好。", "한", "\u1100\u1161", "\u3000", "\xa0", "\u2003", "\u2000", "\u200b", "\x1c"),
    *("\x85", "🦙", "👩‍👩‍👧", "\u01c5", "²", "Ⅳ", "\u0600", "\U00016d63", "\u2126", "\ufeff"),
)


def texts(max_parts: int = 60) -> st.SearchStrategy[str]:
    """Return texts of parts that interact, and of any characters."""
    anything = st.text(max_size=12)
    return st.lists(st.one_of(st.sampled_from(PARTS), anything), max_size=max_parts).map("".join)


@st.composite
def histories(draw: st.DrawFn) -> list[str]:
    """Return texts of which each is an edit of one before it; some are long."""
    filler = draw(st.sampled_from(("The quick brown fox. ", "x", "你好世界", "a\nB c\n", "   ")))
    known = [filler * draw(st.integers(0, 400))]
    for _ in range(draw(st.integers(1, 6))):
        base = draw(st.sampled_from(known))
        at = draw(st.integers(0, len(base)))
        dropped = draw(st.sampled_from((0, 1, 7, len(base))))
        known.append(base[:at] + draw(texts(20)) + base[at + dropped :])
    return known
