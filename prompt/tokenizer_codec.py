"""A model's own tokenizer and chat templates as a codec; apart, as its libraries load slowly."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from prompt.dialogue import ChatEncoder
from prompt.model import PromptTokens, Unroutable, UnroutablePromptError
from prompt.request import decode_completion
from prompt.template import ChatTemplate
from prompt.tokenizer import Tokenizer, TokenizerFiles, read_tokenizer_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from prompt.passage import Passage
    from prompt.segment import Checkpoint, SegmentCache
    from prompt.turn import Turn


def load_tokenizer_codec(
    directory: Path, *, clock: Callable[[], float], learns_words: bool
) -> TokenizerCodec:
    """Return the codec of a tokenizer directory; raises CodecLoadError."""
    files = read_tokenizer_files(directory)
    return TokenizerCodec(files, clock=clock, learns_words=learns_words)


class TokenizerCodec:
    """A model's own tokenizer and chat templates."""

    def __init__(
        self,
        files: TokenizerFiles,
        *,
        clock: Callable[[], float] = time.time,
        learns_words: bool = True,
    ) -> None:
        self._tokenizer = Tokenizer(files.tokenizer, learns_words=learns_words)
        self._templates = {
            name: ChatTemplate(source, special_tokens=files.special_tokens, clock=clock)
            for name, source in files.templates.items()
        }
        plain = self._tokenizer.plain
        self._encoders: dict[str, ChatEncoder] = {}
        if plain is not None:
            self._encoders = {
                name: ChatEncoder(template, plain, self._tokenizer.framed)
                for name, template in self._templates.items()
            }
        self.vocabulary_size: Final = self._tokenizer.vocabulary_size
        self.digest: Final = files.digest
        self.is_exact: Final = True

    def chat_text(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        options: Mapping[str, object],
    ) -> str:
        """Return the rendered conversation."""
        template = self._templates.get(self._template_name(tools))
        if template is None:
            raise UnroutablePromptError(Unroutable.NO_TEMPLATE)
        return template.render(messages, tools, options=options)

    def takes_parts(self, tools: list[dict[str, Any]] | None) -> bool:
        """Return whether the template of such a chat is given the parts of a content."""
        template = self._templates.get(self._template_name(tools))
        return template is not None and template.is_structured

    def chat_tokens(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        options: Mapping[str, object],
    ) -> bytes:
        """See ``Codec``."""
        text = self.chat_text(messages, tools, options=options)
        # The template writes the special tokens itself.
        return self.text_tokens(text, add_special_tokens=bool(options.get("add_special_tokens")))

    @property
    def used_bytes(self) -> int:
        """See ``PrefixCodec``."""
        return self._tokenizer.used_bytes

    def forget(self) -> None:
        """See ``PrefixCodec``."""
        self._tokenizer.forget()

    def is_known(self, passage: Passage) -> bool:
        """See ``PrefixCodec``."""
        cache = self._cache_of(passage)
        return cache is not None and _checkpoint_of(passage, cache) is not None

    def passage_prompt(self, passage: Passage) -> PromptTokens:
        """See ``PrefixCodec``."""
        cache = self._cache_of(passage)
        start = None if cache is None else _checkpoint_of(passage, cache)
        if cache is None or start is None:
            call = decode_completion(passage.body)
            text = str(call.prompts[0])
            return self.text_prompt(
                text, add_special_tokens=call.add_special_tokens, salt=call.salt
            )
        tokens = None
        for chunk, mark in zip(passage.chunks, passage.marks, strict=True):
            encoded = cache.resume(start, chunk, [len(chunk)], salt=passage.call.salt)
            (point,) = encoded.checkpoints
            if point is not None:
                mark.checkpoints[id(cache)] = start = point
            tokens = encoded.tokens
        return PromptTokens(run=tokens, is_exact=True)

    def _cache_of(self, passage: Passage) -> SegmentCache | None:
        tokenizer = self._tokenizer
        return tokenizer.framed if passage.call.add_special_tokens else tokenizer.plain

    def turn_prompt(self, turn: Turn) -> PromptTokens:
        """See ``PrefixCodec``."""
        encoder = self._encoder(turn)
        if encoder is not None and turn.conversation is not None and turn.variant is not None:
            known = (turn.call.messages, turn.conversation, turn.variant)
            salt = turn.call.salt
            tokens = encoder.tail(*known, salt=salt) or encoder.whole(*known, salt=salt)
            if tokens is not None:
                return tokens
        call = turn.call
        text = self.chat_text(call.messages, call.tools, options=call.options)
        has_added = bool(call.options.get("add_special_tokens"))
        return self.text_prompt(text, add_special_tokens=has_added, salt=call.salt)

    def turn_tail(self, turn: Turn) -> PromptTokens | None:
        """See ``PrefixCodec``."""
        encoder = self._encoder(turn)
        if encoder is None or turn.conversation is None or turn.variant is None:
            return None
        call = turn.call
        return encoder.tail(call.messages, turn.conversation, turn.variant, salt=call.salt)

    def _encoder(self, turn: Turn) -> ChatEncoder | None:
        return self._encoders.get(self._template_name(turn.call.tools))

    def _template_name(self, tools: list[dict[str, Any]] | None) -> str:
        return "tool_use" if tools is not None and "tool_use" in self._templates else "default"

    def text_tokens(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """See ``Codec``."""
        return self._tokenizer.packed(text, add_special_tokens=add_special_tokens)

    def text_prompt(self, text: str, *, add_special_tokens: bool, salt: str = "") -> PromptTokens:
        """See ``PrefixCodec``."""
        return self._tokenizer.prompt(text, add_special_tokens=add_special_tokens, salt=salt)

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Codec``."""
        return self._tokenizer.decode(ids)


def _checkpoint_of(passage: Passage, cache: SegmentCache) -> Checkpoint | None:
    if passage.known is None:
        return cache.start()
    return passage.known.checkpoints.get(id(cache))
