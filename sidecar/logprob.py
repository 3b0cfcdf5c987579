"""Log probabilities of tokens as the two kinds of call write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prompt.codec import Codec
    from sidecar.runner import Sampled

    Spell = Callable[[int], str]

LOWEST_LOGPROB: Final = -9999.0
"""What stands for minus infinity, which JSON has not."""


class TokenSpeller:
    """Texts of single tokens, as they are in the middle of a text."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        tokens = ((token, codec.decode([token])) for token in range(codec.vocabulary_size))
        found = next(((token, text) for token, text in tokens if text.isalnum()), None)
        self._anchor = [] if found is None else [found[0]]
        self._anchor_text = "" if found is None else found[1]

    def spelled(self, token: int) -> str:
        """Return the text of ``token``: replacement characters for part of a character.

        Decoders drop a space at the start, so the token is decoded after another one.
        """
        text = self._codec.decode([*self._anchor, token])
        if text.startswith(self._anchor_text):
            return text[len(self._anchor_text) :]
        return self._codec.decode([token])


def numbered(token: int) -> str:
    """Return the form that tells tokens apart whose text is the same."""
    return f"token_id:{token}"


def chat_logprobs(sampled: Sequence[Sampled], tops: int, spell: Spell) -> dict[str, Any]:
    """Return the ``logprobs`` object of a chat choice: ``tops`` alternatives, best first."""
    return {
        "content": [
            _chat_token(each.token, each.logprob, spell)
            | {"top_logprobs": [_chat_token(*pair, spell) for pair in each.top[:tops]]}
            for each in sampled
        ]
    }


def _chat_token(token: int, logprob: float | None, spell: Spell) -> dict[str, Any]:
    text = spell(token)
    return {
        "token": text,
        "logprob": _finite(logprob),
        "bytes": list(text.encode("utf-8", "replace")),
    }


def completion_logprobs(
    sampled: Sequence[Sampled], tops: int, spell: Spell, start_chars: int
) -> dict[str, Any]:
    """Return the ``logprobs`` object of a completion choice.

    Alternatives are the ``tops`` best and the token itself; offsets count the characters of all
    tokens of the choice, ``start_chars`` of which came before.
    """
    tokens = [spell(each.token) for each in sampled]
    offsets = [start_chars]
    for text in tokens[:-1]:
        offsets.append(offsets[-1] + len(text))
    return {
        "text_offset": offsets[: len(tokens)],
        "token_logprobs": [_finite(each.logprob) for each in sampled],
        "tokens": tokens,
        "top_logprobs": [_alternatives(each, tops, spell) for each in sampled],
    }


def _alternatives(sampled: Sampled, tops: int, spell: Spell) -> dict[str, float]:
    """Return the alternatives by text; of several with one text, the most probable."""
    found: dict[str, float] = {}
    for token, logprob in (*sampled.top[:tops], (sampled.token, sampled.logprob)):
        text = spell(token)
        found[text] = max(_finite(logprob), found.get(text, LOWEST_LOGPROB))
    return found


def _finite(logprob: float | None) -> float:
    if logprob is None or not logprob >= LOWEST_LOGPROB:  # which no NaN is
        return LOWEST_LOGPROB
    return logprob
