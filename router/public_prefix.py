"""Public prefixes: which leading blocks of a tenant's prompt all tenants may share.

The operator says what is public, and nobody else: a prompt's tokens are compared with those of the
operator's text, and only its full blocks count, so that no shared block has a token of a client's
own. A prompt begins with the whole of a prefix, or it is private from its first token on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from prompt.codec import Codec
from prompt.model import UnroutablePromptError
from prompt.public import PublicText, common_tokens
from router.branch import PublicPart
from router.config import ConfigError
from state.prefix import TOKEN_BYTES, pack_tokens
from state.public import mark_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prompt.model import ReadPrompt
    from prompt.reader import PromptReader
    from router.config import Config
    from router.public_setting import PublicPrefixSettings

_log = logging.getLogger(__name__)

READ_AGAIN_S: Final = 900
"""Templates may print the date."""
MOST_KNOWN: Final = 256
_Place: TypeAlias = "tuple[int, str | None]"
"""A codec, and the model where that has prefixes of its own."""
_Ids = list[Annotated[int, Meta(ge=0, lt=2**32)]]


class _Texts(Struct, frozen=True):
    """The packed tokens of the prefixes of one model, as they were read in ``period``."""

    codec: Codec
    period: int
    packed: tuple[bytes, ...]


class _Known(Struct, frozen=True):
    """The parts of one model, longest first, by the tokens of their first block."""

    texts: _Texts
    parts: dict[bytes, list[PublicPart]]


class PublicPrefixes:
    """Recognizes them. ``codec_of`` is how the prompts of a model are read.

    ``given`` has the packed tokens of those that are not texts, by their names. ``run`` runs
    something on a thread: the operator's texts are long to read. Until they are, prompts are
    private; while they are read again, what was read before counts. Without it they are read where
    they are asked for.
    """

    def __init__(
        self,
        settings: Sequence[PublicPrefixSettings],
        codec_of: Callable[[str], Codec],
        given: dict[str, bytes] | None = None,
        clock: Callable[[], float] = time.time,
        run: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        is_given = all(one.name in (given or {}) for one in settings)
        self._run = None if is_given else run
        self._settings = tuple(settings)
        self._codec_of = codec_of
        self._given = given or {}
        self._clock = clock
        self._models = {one.model for one in settings}
        self._texts: dict[_Place, _Texts] = {}
        self._reading: set[_Place] = set()
        self._known: dict[tuple[_Place, int], _Known] = {}
        self._told: dict[tuple[str, str], str] = {}

    def part_of(
        self, prompt: ReadPrompt, block_tokens: int, served: str | None = None
    ) -> PublicPart | None:
        """Return the longest public part that a prompt of the request begins with, in blocks.

        ``served`` is the model of the replica: that of the prompt may be an adapter of it, which a
        client names as it likes. Of several prompts the first one says which part it is.
        """
        if not prompt.prompts:
            return None
        texts = self._texts_of(prompt.model, served)
        if texts is None:
            return None
        place = (self._place(prompt.model, texts.codec), block_tokens)
        known = self._known.get(place)
        if known is None or known.texts is not texts:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            known = self._known[place] = _Known(texts, _parts(texts, block_tokens))
        tokens = prompt.prompts[0]
        for part in known.parts.get(tokens.first(block_tokens), ()):
            if part.is_start_of(tokens):
                return part
        return None

    def prepare(self, models: Iterable[str]) -> None:
        """Read the texts for these models, which takes a while: before anybody asks."""
        for model in models:
            codec = self._codec_of(model)
            self._read(self._place(model, codec), model, codec, self._period())

    def _period(self) -> int:
        return int(self._clock()) // READ_AGAIN_S

    def _place(self, model: str, codec: Codec) -> _Place:
        return id(codec), model if model in self._models else None

    def _texts_of(self, model: str, served: str | None) -> _Texts | None:
        codec, period = self._codec_of(model), self._period()
        place = self._place(model, codec)
        texts = self._texts.get(place)
        if texts is not None and texts.codec is not codec:
            texts = None  # of another one that was where this one is now
        if texts is not None and texts.period == period:
            return texts
        told = place[1] or served or model
        if self._run is None:
            self._read(place, told, codec, period)
            return self._texts[place]
        if place not in self._reading:
            self._reading.add(place)
            self._run(partial(self._read, place, told, codec, period))
        return texts

    def _read(self, place: _Place, told: str, codec: Codec, period: int) -> None:
        """Read the texts; one that cannot be read is not shared, and is tried again later."""
        packed: tuple[bytes, ...] = ()
        try:
            packed = tuple(self._packed(place[1], told, codec))
        except Exception as error:  # noqa: BLE001 - whatever a template raises
            what = f"not shared: {type(error).__name__}"
            _log.warning("public prefixes: model=%r %s", told, what)
        finally:
            if len(self._texts) >= MOST_KNOWN:
                self._texts.clear()
            self._texts[place] = _Texts(codec, period, packed)
            self._reading.discard(place)

    def _packed(self, own: str | None, told: str, codec: Codec) -> Iterator[bytes]:
        """Yield the tokens of each prefix that can be known.

        Those of all models, and of ``own`` that has some. ``told`` is what the log says.
        """
        for one in self._settings:
            if one.model not in {None, own}:
                continue
            packed = self._given.get(one.name)
            if packed is None:
                if not codec.is_exact:
                    self._tell(one.name, told, "not shared: no tokenizer here (token_ids_file)")
                    continue
                try:
                    packed = common_tokens(_text_of(one), codec)
                except UnroutablePromptError as error:
                    self._tell(one.name, told, f"not shared: {error.reason}")
                    continue
            self._tell(one.name, told, f"{len(packed) // TOKEN_BYTES} tokens")
            yield packed

    def _tell(self, name: str, model: str, what: str) -> None:
        """Log what became of a prefix: once, and when that changes."""
        if self._told.get((name, model)) == what:
            return
        if len(self._told) >= MOST_KNOWN * 4:
            self._told.clear()
        self._told[name, model] = what
        _log.info("public prefix: name=%s model=%r %s", name, model, what)


def _parts(texts: _Texts, block_tokens: int) -> dict[bytes, list[PublicPart]]:
    block_bytes = block_tokens * TOKEN_BYTES
    parts: dict[bytes, list[PublicPart]] = {}
    for packed in sorted(texts.packed, key=len, reverse=True):
        blocks = len(packed) // block_bytes
        if blocks:
            whole = packed[: blocks * block_bytes]
            part = PublicPart(blocks, whole, mark_of(whole))
            parts.setdefault(whole[:block_bytes], []).append(part)
    return parts


def _text_of(one: PublicPrefixSettings) -> PublicText:
    return PublicText(
        list(one.messages) if one.messages is not None else None,
        list(one.tools) if one.tools is not None else None,
        one.prompt,
    )


def open_public(config: Config, prompts: PromptReader) -> PublicPrefixes | None:
    """Return the public prefixes where there are any; raises ConfigError for an unusable file."""
    if not config.public_prefixes:
        return None
    given = {
        one.name: _read_ids(f"public_prefixes[{index}].token_ids_file", Path(one.token_ids_file))
        for index, one in enumerate(config.public_prefixes)
        if one.token_ids_file is not None
    }
    public = PublicPrefixes(config.public_prefixes, prompts.codec_of, given, run=_on_a_thread)
    public.prepare(each.name for each in config.models)
    return public


def _on_a_thread(work: Callable[[], None]) -> object:
    return asyncio.get_running_loop().run_in_executor(None, work)


def _read_ids(key: str, path: Path) -> bytes:
    try:
        return pack_tokens(msgspec.json.decode(path.read_bytes(), type=_Ids))
    except OSError as error:
        message = f"{key}: {path}: {error.strerror}"
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = f"{key}: {path}: expected a JSON list of token ids"
    raise ConfigError(message)
