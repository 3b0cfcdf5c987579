"""A vocabulary in the manner of sentencepiece: ``▁`` for spaces and single bytes as a fallback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tokenizers import AddedToken, Tokenizer, decoders, models

if TYPE_CHECKING:
    from collections.abc import Sequence

SPECIAL_TOKENS: Final = ("<unk>", "<s>", "</s>")
FIRST_BYTE: Final = len(SPECIAL_TOKENS)
WORDS: Final = ("▁", "▁▁", "▁the", "the", "▁a", "x", "é", "你", ",", "\ufffd")


class ByteFallbackCodec:
    """What a ``TextStream`` needs of a codec, over such a vocabulary."""

    def __init__(self) -> None:
        texts = (*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS)
        vocabulary = {text: token for token, text in enumerate(texts)}
        bpe = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")  # noqa: S106 - no secret
        self._tokenizer = Tokenizer(bpe)
        self._tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        self._tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
        self.words: Final = {text: vocabulary[text] for text in WORDS}
        self.vocabulary_size: Final = len(vocabulary)

    def spelled(self, text: str) -> list[int]:
        """Return the byte tokens of ``text``."""
        return [FIRST_BYTE + byte for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)
