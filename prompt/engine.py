"""Engines behind one vocabulary: ``tokenizers``, and faster ones where they give equal ids.

``tiktoken`` is four times as fast. It takes a vocabulary whose merges follow the order of its ids;
whether that makes it equal is tried at load on up to 20,000 entries of the vocabulary and on a
corpus of scripts, signs and runs. It does not normalise, and dies on long runs without a cut: such
texts, and characters that one of the engines may not know yet, go to ``tokenizers``. Short ASCII
texts are looked up word by word (``prompt.word``), proved in the same way.
"""

from __future__ import annotations

import sys
import unicodedata
from typing import TYPE_CHECKING, Any, Final

import tokenizers
from tiktoken._tiktoken import CoreBPE

from prompt.model import CodecLoadError, TemplateFailureError
from prompt.word import WordTable
from state.prefix import pack_tokens, unpack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prompt.boundary import Shape
    from prompt.native_word import WordLibrary

MAX_FAST_CHARS: Final = 16 * 1024
"""Longer texts without a cut are hostile or rare; ``tiktoken`` panics on a million spaces."""
MAX_PIECE_CHARS: Final = 256
"""Pieces up to here are beyond what makes ``tiktoken`` fail."""
_PANIC: Final = "PanicException"
_BATCH: Final = 4096
_PROBED_ENTRIES: Final = 20_000
_ASCII: Final = bytes(range(128))
_BYTES: Final = 256
_NONE_ADDED: Final[frozenset[str]] = frozenset()
_IS_LITTLE: Final = sys.byteorder == "little"
_CORPUS: Final = (
    "Hello, world! It's 12345 o'clock; you'll've seen THEY'RE 3.14159 and x_y-z.",
    "  indented\n\tcode = {'a': [1, 2], \"b\": None}\r\n\r\n    return f(x)  \n\n\n",
    "https://example.org/a/b?c=d&e=%20#f //comment /* block */ <!-- x --> !!!\n/next",
    "naïve café ÄÖÜ ß Straße привет мир Ελληνικά שלום مرحبا नमस्ते สวัสดี",
    "你好世界。这是测试 日本語テキスト 한국어 텍스트 \uff11\uff12\uff13 Ⅳ ½ ²",
    "🦙🚀👩‍👩‍👧 e\u0301 \u00a0\u2003\u3000 \u200b x\u0300",
    "CamelCaseWords ABCdef XMLHttpRequest iPhone McDonald's O'NEILL'S don'T",
)


class Engine:
    """Text to ids with the fastest engine that is proved equal.

    ``library``: the compiled helper for words, None for words in Python.
    """

    def __init__(
        self,
        pipeline: tokenizers.Tokenizer,
        definition: Mapping[str, Any],
        shape: Shape | None,
        library: WordLibrary | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._is_nfc = shape is not None and shape.is_nfc
        self._assigned: set[str] = set()
        self._fast = _converted(definition, shape)
        self._added = frozenset(shape.added) if shape is not None else frozenset()
        self._added_begins = tuple(sorted({content[0] for content in self._added}))
        if self._fast is not None and not self._is_proved(definition, self.ids):
            self._fast = None
        self._library = library
        self._words = self._table(definition, shape)

    @property
    def looks_up_long_texts(self) -> bool:
        """Whether ``packed_short`` is the faster way for long texts as well, piece by piece."""
        return self._library is not None and self._words is not None

    @property
    def is_fast(self) -> bool:
        """Whether ``tiktoken`` does the common texts."""
        return self._fast is not None

    def ids(self, text: str) -> list[int]:
        """Return the ids of ``text``, which spells out added tokens, nothing put around it."""
        if self._fast is not None and len(text) <= MAX_FAST_CHARS and self._is_common(text):
            ids = _tried(self._fast, text, self._added)
            if ids is not None:
                return ids
        return self.slow_ids(text, add_special_tokens=False)

    def packed(self, text: str) -> bytes:
        """Return the same, packed."""
        if self._fast is not None and len(text) <= MAX_FAST_CHARS and self._is_common(text):
            packed = _tried_packed(self._fast, text, self._added_in(text))
            if packed is not None:
                return packed
        return pack_tokens(self.slow_ids(text, add_special_tokens=False))

    def _added_in(self, text: str) -> frozenset[str]:
        """Return the added tokens where ``text`` may have one: to be given them takes time."""
        for begin in self._added_begins:
            if begin in text:
                return self._added
        return _NONE_ADDED

    def packed_short(self, text: str) -> bytes:
        """Return the same; the faster way for text of a few thousand characters."""
        words = self._words
        packed = words.packed(text) if words is not None and self._is_common(text) else None
        return self.packed(text) if packed is None else packed

    def packed_again(self, text: str) -> bytes:
        """Return the same for a short prompt, parts of which come again with the next one."""
        words = self._words
        packed = words.packed_again(text) if words is not None and self._is_common(text) else None
        return self.packed(text) if packed is None else packed

    def forget(self) -> None:
        """Forget whole texts; single words stay."""
        if self._words is not None:
            self._words.forget()

    def _piece(self, text: str) -> bytes:
        """Return the packed ids of one piece of common text, which holds no added token."""
        if self._fast is None or len(text) > MAX_PIECE_CHARS:
            return self.packed(text)
        return pack_tokens(self._fast.encode_ordinary(text))

    def slow_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids by ``tokenizers``."""
        try:
            batch = self._pipeline.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:  # how the library refuses text that has no UTF-8
            detail = "text with a lone surrogate"
            raise TemplateFailureError(detail) from error
        return batch[0].ids

    def _is_common(self, text: str) -> bool:
        """Return whether both engines see the same characters in ``text``."""
        if text.isascii():
            return True
        if self._is_nfc and not unicodedata.is_normalized("NFC", text):
            return False
        try:
            others = text.encode().translate(None, _ASCII).decode()
        except UnicodeEncodeError:
            return False
        if self._assigned.issuperset(others):
            return True
        # The engines may know newer Unicode versions than this Python, and not the same ones.
        unknown = set(others) - self._assigned
        if any(unicodedata.category(char) == "Cn" for char in unknown):
            return False
        self._assigned |= unknown
        return True

    def _is_proved(
        self, definition: Mapping[str, Any], ids: Callable[[str], list[int] | None]
    ) -> bool:
        """Return whether ``ids`` agrees with ``tokenizers`` on vocabulary entries and a corpus.

        None stands for a text that another way is taken for.
        """
        for texts in _batches(_probes(definition)):
            slow = self._pipeline.encode_batch_fast(texts, add_special_tokens=False)
            for text, encoding in zip(texts, slow, strict=True):
                if self._is_common(text) and ids(text) not in (encoding.ids, None):
                    return False
        return True

    def _table(self, definition: Mapping[str, Any], shape: Shape | None) -> WordTable | None:
        """Return the table of words; None where that is not proved to give equal ids."""
        if shape is None or not shape.are_plain:
            return None
        added = {content: pack_tokens((token,)) for content, token in shape.added.items()}
        probed = WordTable(shape.pattern, added, self._piece, self._library)

        def looked_up(text: str) -> list[int] | None:
            packed = probed.packed(text)
            return None if packed is None else unpack_tokens(packed)

        if not self._is_proved(definition, looked_up):
            return None
        return WordTable(shape.pattern, added, self._piece, self._library)


def _tried(fast: Any, text: str, added: frozenset[str]) -> list[int] | None:
    packed = _tried_packed(fast, text, added)
    return None if packed is None else unpack_tokens(packed)


def _tried_packed(fast: Any, text: str, added: frozenset[str]) -> bytes | None:
    """Return the packed ids by ``tiktoken``, which gives them as numbers of this machine."""
    try:
        packed = bytes(fast.encode_to_tiktoken_buffer(text, added))
    except ValueError:  # no UTF-8, or too much backtracking
        return None
    except BaseException as error:
        # A Rust panic derives from BaseException, and its class cannot be imported.
        if type(error).__name__ != _PANIC:
            raise
        return None
    return packed if _IS_LITTLE else pack_tokens(memoryview(packed).cast("I"))


def _byte_alphabet() -> dict[str, int]:
    """Return the characters that byte-level vocabularies write for bytes."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(_BYTES) if byte not in set(shown)]
    alphabet = {chr(byte): byte for byte in shown}
    return alphabet | {chr(_BYTES + index): byte for index, byte in enumerate(hidden)}


def _converted(definition: Mapping[str, Any], shape: Shape | None) -> Any:
    """Return a ``CoreBPE`` with the vocabulary as ranks; None where ids cannot serve as ranks."""
    if shape is None or not shape.are_plain:
        return None
    model = definition["model"]
    ranks = _ranks_of(model["vocab"], shape.added)
    if ranks is None or not _follows_ids(model["vocab"], model["merges"]):
        return None
    try:
        # What the public class calls: its own overhead is as large as a short text's work.
        return CoreBPE(ranks, shape.added, shape.pattern)
    except ValueError:
        return None


def _ranks_of(vocabulary: Mapping[str, int], added: Mapping[str, int]) -> dict[bytes, int] | None:
    """Return ids by the bytes that they stand for; None unless all bytes are there, once each."""
    alphabet = _byte_alphabet()
    try:
        ranks = {
            bytes(alphabet[char] for char in entry): token
            for entry, token in vocabulary.items()
            if entry not in added
        }
    except KeyError:
        return None
    has_bytes = all(bytes((byte,)) in ranks for byte in range(_BYTES))
    are_unique = len({*ranks.values(), *added.values()}) == len(ranks) + len(added)
    return ranks if has_bytes and are_unique else None


def _follows_ids(vocabulary: Mapping[str, int], merges: Sequence[Any]) -> bool:
    """Return whether the merges make entries in the order of their ids."""
    last = -1
    for merge in merges:
        merged = merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)
        token = vocabulary.get(merged)
        if token is None or token < last:
            return False
        last = token
    return True


def _probes(definition: Mapping[str, Any]) -> Iterator[str]:
    yield from _CORPUS
    yield "\n".join(_CORPUS)
    alphabet = _byte_alphabet()
    entries = list(definition["model"]["vocab"])
    for entry in entries[:: len(entries) // _PROBED_ENTRIES + 1]:
        try:
            yield bytes(alphabet[char] for char in entry).decode()
        except (KeyError, UnicodeDecodeError):
            continue


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    yield batch


def load_pipeline(definition: bytes, name: str) -> tokenizers.Tokenizer:
    """Return the ``tokenizers`` pipeline of a ``tokenizer.json`` called ``name``."""
    try:
        pipeline = tokenizers.Tokenizer.from_buffer(definition)
    except Exception as error:  # the library raises nothing narrower
        message = f"{name}: {error}"
        raise CodecLoadError(message) from error
    # Engines truncate and pad by their own rules, never by the file's.
    pipeline.no_truncation()
    pipeline.no_padding()
    return pipeline
