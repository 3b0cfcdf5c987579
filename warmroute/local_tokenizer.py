"""Tokenizers of engines on this host: their model's own directory, used while it is proved right.

An engine on a loopback address that names a local directory as its model's root has the files that
this router would have been given by hand. It may run with another template than the directory's, so
a sample chat must have the same tokens here and at every engine that serves the model and can tell.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from prompt.codec import load_codec
from prompt.model import CodecLoadError, UnroutablePromptError
from prompt.question import TOKENIZE_PATH, WrongAnswerError, tokenized
from warmroute.admin_client import read_bounded

if TYPE_CHECKING:
    from pathlib import Path

    from prompt.codec import Codec
    from prompt.reader import PromptReader
    from router.config import Config
    from sidecar.scrape import EngineClient
    from state.model import ReplicaId
    from warmroute.engine_look import EngineLook

TOKENIZE_S: Final = 10.0
MAX_ANSWER_BYTES: Final = 1 << 20
SAMPLE: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "Naïve café №5: 1,234 €?\n\n\tdef f(x):\n        return x  # 🦙"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And <b>why</b>?"},
]
"""A chat that shows most ways in which tokenizers and templates differ."""
_log = logging.getLogger("warmroute.attend")


class LocalTokenizers:
    """The directories that engines on this host named, and which of them are in use."""

    def __init__(self, config: Config, prompts: PromptReader) -> None:
        self._prompts = prompts
        self._given = {model.name for model in config.models}
        self._is_wanted = config.tokens.source == "engine"
        self._loaded: dict[Path, Codec | None] = {}
        self._known: dict[str, tuple[Path, Codec]] = {}
        self._verdicts: dict[str, dict[ReplicaId, bool]] = {}
        self._used: set[str] = set()

    def directory(self, model: str) -> Path | None:
        """Return the directory that prompts of ``model`` are read with, if it was found here."""
        return self._known[model][0] if model in self._used else None

    async def consider(
        self, replica: ReplicaId, look: EngineLook, client: EngineClient, api_key: str | None
    ) -> bool:
        """Use what ``replica`` names, and give up what gives other tokens than it does.

        Returns whether the engine told all that was asked of it.
        """
        is_told = True
        for model, verdicts in self._verdicts.items():
            if model not in look.base_models:
                verdicts.pop(replica, None)  # it serves another one now
        for model in look.base_models if self._is_wanted else ():
            if model in self._given:
                continue
            known = self._known.get(model)
            is_new = known is None or (model not in self._used and known[0] != look.root)
            if is_new and look.root is not None:
                codec = await self._load(look.root)
                if codec is not None:
                    self._known[model] = (look.root, codec)
                    self._verdicts.pop(model, None)
            if model in self._known:
                verdict = await _gives_same(self._known[model][1], model, client, api_key)
                self._judge(model, replica, verdict=verdict)
                is_told = is_told and verdict is not None
        return is_told

    async def _load(self, directory: Path) -> Codec | None:
        if directory not in self._loaded:
            try:
                self._loaded[directory] = await asyncio.to_thread(load_codec, directory)
            except CodecLoadError:
                self._loaded[directory] = None
        return self._loaded[directory]

    def _judge(self, model: str, replica: ReplicaId, *, verdict: bool | None) -> None:
        """Use the directory of ``model`` while somebody confirms it, and nobody differs."""
        verdicts = self._verdicts.setdefault(model, {})
        if verdict is None:
            return  # it says nothing: what it said before holds
        verdicts[replica] = verdict
        is_right = all(verdicts.values())
        directory, codec = self._known[model]
        if is_right and model not in self._used:
            self._used.add(model)
            self._prompts.adopt(model, codec)
        elif not is_right and not verdict:
            if model in self._used or len(verdicts) == 1:
                _log.warning(
                    "the tokens of %s are not those of replica %s: not used", directory, replica
                )
            self._used.discard(model)
            self._prompts.adopt(model, None)


async def _gives_same(
    codec: Codec, model: str, client: EngineClient, api_key: str | None
) -> bool | None:
    """Return whether the engine's tokens of the sample are ours; None when it does not tell."""
    theirs = await _engine_tokens(model, client, api_key)
    if theirs is None:
        return None
    try:
        ours = await asyncio.to_thread(codec.chat_tokens, SAMPLE, None, options={})
    except UnroutablePromptError:
        return False
    return ours == theirs


async def _engine_tokens(model: str, client: EngineClient, api_key: str | None) -> bytes | None:
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    body = {"model": model, "messages": SAMPLE, "add_generation_prompt": True}
    timeout = aiohttp.ClientTimeout(total=TOKENIZE_S)
    try:
        async with (
            aiohttp.ClientSession(
                connector=client.connector(), timeout=timeout, trust_env=False
            ) as http,
            http.post(
                client.endpoint + TOKENIZE_PATH,
                data=msgspec.json.encode(body),
                headers=headers,
                allow_redirects=False,
            ) as answer,
        ):
            if answer.status != HTTPStatus.OK:
                return None
            return tokenized(await read_bounded(answer, MAX_ANSWER_BYTES))
    except (aiohttp.ClientError, TimeoutError, OSError, WrongAnswerError):
        return None
