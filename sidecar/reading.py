"""Prompts of request bodies to packed token ids."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from sidecar.api import ApiError
from state.prefix import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prompt.codec import Codec
    from prompt.request import ChatCall, CompletionCall

LONG_TEXT_BYTES: Final = 64 * 2**10
"""Texts beyond this are tokenized in a thread, off the event loop."""


class PromptReader:
    """Reads prompts with one codec; all methods raise ApiError that names the field to blame."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    async def chat(self, call: ChatCall, body_bytes: int) -> bytes:
        """Return the ids of a conversation that came in a body of ``body_bytes``."""
        if call.unroutable is not None:
            message = f"These messages cannot be read here: {call.unroutable}."
            raise ApiError(400, message, "messages")

        def encode() -> bytes:
            return self._codec.chat_tokens(call.messages, call.tools, options=call.options)

        packed = encode() if body_bytes <= LONG_TEXT_BYTES else await asyncio.to_thread(encode)
        return _some(packed, "messages")

    async def completion(self, call: CompletionCall) -> list[bytes]:
        """Return the ids of each prompt."""
        if call.unroutable is not None:
            raise ApiError(400, f"This prompt cannot be read here: {call.unroutable}.", "prompt")
        return [
            await self.prompt(prompt, add_special_tokens=call.add_special_tokens)
            for prompt in call.prompts
        ]

    async def prompt(self, prompt: str | list[int], *, add_special_tokens: bool) -> bytes:
        """Return the ids of one prompt."""
        if not isinstance(prompt, str):
            self.check_vocabulary(prompt, "prompt")
            return pack_tokens(prompt)

        def encode() -> bytes:
            return self._codec.text_tokens(prompt, add_special_tokens=add_special_tokens)

        packed = encode() if len(prompt) <= LONG_TEXT_BYTES else await asyncio.to_thread(encode)
        return _some(packed, "prompt")

    def check_vocabulary(self, token_ids: Sequence[int], field: str) -> None:
        """Refuse ids that the vocabulary has not."""
        if token_ids and max(token_ids) >= self._codec.vocabulary_size:
            message = f"{field}: token id {max(token_ids)} is out of vocabulary"
            raise ApiError(400, message, field)


def _some(packed: bytes, field: str) -> bytes:
    if not packed:
        raise ApiError(400, f"{field}: it has no tokens", field)
    return packed
