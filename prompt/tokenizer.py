"""``tokenizer.json`` and its companions: text to ids and back.

Ids come from ``encode_batch_fast``: it lets other threads run, while ``encode`` holds the
interpreter for the whole text (0.65 s of event-loop lag for 900 KB). The library's thread pool
obeys ``TOKENIZERS_PARALLELISM``, which the command line sets before the first import; batches of
one text do not use the pool.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prompt.boundary import shape_of
from prompt.engine import Engine, load_pipeline
from prompt.model import CodecLoadError, PromptTokens
from prompt.native_word import word_library
from prompt.segment import DEFAULT_CACHE_BYTES, SHORT_CHARS, SegmentCache
from state.prefix import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from prompt.boundary import Shape

MIN_CACHED_CHARS: Final = 1024
"""Shorter texts cost less than remembering them."""
UNSHARED: Final = "unshared"
"""Any salt: with one no words are looked up."""
_FRAMED_PROBES: Final = ("a", "Some words", "1 <b>\n")

TOKENIZER_FILE: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
NAMED_TEMPLATES: Final = "additional_chat_templates"
_SPECIAL_NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one model that decide its tokens, as read.

    ``templates`` maps names ("default", "tool_use", ...) to sources; ``special_tokens`` are the
    template's variables.
    """

    tokenizer: bytes
    templates: dict[str, str]
    special_tokens: dict[str, object]
    digest: str


class Tokenizer:
    """One ``tokenizer.json``: texts to ids, resuming from known prefixes where that is exact.

    ``learns_words``: words that were seen before are faster, also where another text had them.
    """

    def __init__(
        self,
        definition: bytes,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        learns_words: bool = True,
    ) -> None:
        self._learns_words = learns_words
        self._pipeline = load_pipeline(definition, TOKENIZER_FILE)
        decoded: dict[str, Any] = msgspec.json.decode(definition)
        shape = shape_of(decoded)
        self._engine = Engine(self._pipeline, decoded, shape, word_library())
        self.vocabulary_size: Final = self._pipeline.get_vocab_size(with_added_tokens=True)
        self.plain: Final = self._cache(shape, (b"", b""), cache_bytes)
        self.framed: Final = self._cache(shape, self._frame(), cache_bytes)

    def _cache(
        self, shape: Shape | None, frame: tuple[bytes, bytes] | None, cache_bytes: int
    ) -> SegmentCache | None:
        if shape is None or frame is None:
            return None
        before, after = frame
        return SegmentCache(
            self._engine, shape, before=before, after=after, capacity_bytes=cache_bytes // 2
        )

    def _frame(self) -> tuple[bytes, bytes] | None:
        """Return the ids that are put around a text, packed; None where that depends on it."""
        frames = set()
        for text in _FRAMED_PROBES:
            bare = self._engine.slow_ids(text, add_special_tokens=False)
            full = self._engine.slow_ids(text, add_special_tokens=True)
            starts = [
                start
                for start in range(len(full) - len(bare) + 1)
                if full[start : start + len(bare)] == bare
            ]
            if len(starts) != 1:
                return None
            end = starts[0] + len(bare)
            frames.add((pack_tokens(full[: starts[0]]), pack_tokens(full[end:])))
        return frames.pop() if len(frames) == 1 else None

    def prompt(self, text: str, *, add_special_tokens: bool, salt: str = "") -> PromptTokens:
        """Return the ids of ``text``; special tokens that it spells out count as such.

        With a ``salt`` nothing is looked up that other salts could have brought in.
        """
        cache = self.framed if add_special_tokens else self.plain
        if cache is not None and len(text) >= MIN_CACHED_CHARS:
            return PromptTokens(run=cache.encode(text, salt=salt).tokens, is_exact=True)
        if cache is not None and salt:
            tokens = cache.resume(cache.start(), text, salt=salt).tokens
            return PromptTokens(run=tokens, is_exact=True)
        packed = self.packed(text, add_special_tokens=add_special_tokens)
        return PromptTokens(packed=packed, is_exact=True)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of ``text`` as a whole, remembering nothing."""
        if not add_special_tokens:
            return self._engine.ids(text)
        return self._engine.slow_ids(text, add_special_tokens=True)

    def packed(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the same, packed."""
        cache = self.framed if add_special_tokens else self.plain
        if cache is not None and not self._learns_words:
            return cache.resume(cache.start(), text, salt=UNSHARED).tokens.packed()
        if not add_special_tokens and len(text) <= SHORT_CHARS:
            return self._engine.packed_again(text)
        return pack_tokens(self.encode(text, add_special_tokens=add_special_tokens))

    @property
    def used_bytes(self) -> int:
        """What is kept of texts, in bytes; tokens weigh about as much again."""
        return sum(kept.used_bytes for kept in (self.plain, self.framed) if kept is not None)

    def forget(self) -> None:
        """Forget every text; single words stay."""
        self._engine.forget()
        for kept in (self.plain, self.framed):
            if kept is not None:
                kept.forget()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text that clients see: without special tokens."""
        return self._pipeline.decode(list(ids), skip_special_tokens=True)


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Read a model's tokenizer directory; raises CodecLoadError naming the file at fault."""
    definition = _read(directory / TOKENIZER_FILE)
    if definition is None:
        message = f"{directory / TOKENIZER_FILE}: no such file"
        raise CodecLoadError(message)
    raw_config = _read(directory / CONFIG_FILE)
    try:
        config = msgspec.json.decode(raw_config or b"{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        message = f"{directory / CONFIG_FILE}: {error}"
        raise CodecLoadError(message) from error
    template_files = {
        path.stem: content
        for path in sorted((directory / NAMED_TEMPLATES).glob("*.jinja"))
        if (content := _read(path)) is not None
    }
    main_template = _read(directory / TEMPLATE_FILE)
    if main_template is not None:
        template_files["default"] = main_template
    named = {TOKENIZER_FILE: definition, CONFIG_FILE: raw_config or b""}
    named |= {f"template:{name}": content for name, content in sorted(template_files.items())}
    return TokenizerFiles(
        tokenizer=definition,
        templates=_templates_of(config, template_files),
        special_tokens=_special_tokens_of(config),
        digest=_digest_of(named),
    )


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise CodecLoadError(message) from error


def _templates_of(config: dict[str, Any], files: dict[str, bytes]) -> dict[str, str]:
    """Return templates by name; files win over the config."""
    try:
        if files:
            return {name: content.decode("utf-8") for name, content in files.items()}
        template = config.get("chat_template")
        if isinstance(template, str):
            return {"default": template}
        return {str(entry["name"]): str(entry["template"]) for entry in template or ()}
    except (KeyError, TypeError, ValueError) as error:
        message = f"chat template: expected text or a list of name and template ({error})"
        raise CodecLoadError(message) from error


def _special_tokens_of(config: dict[str, Any]) -> dict[str, object]:
    tokens: dict[str, object] = {}
    for name in _SPECIAL_NAMES:
        text = _text_of(config.get(name))
        if text is not None:
            tokens[name] = text
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        tokens |= {name: text for name, value in extra.items() if (text := _text_of(value))}
    return tokens


def _text_of(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _digest_of(named: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in named.items():
        digest.update(f"{name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()[:16]
