"""One question for tokens to one replica: which of its paths, and what its answer is worth."""

from __future__ import annotations

import enum
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from prompt.question import RENDER_SUFFIX, TOKENIZE_PATH, WrongAnswerError, rendered, tokenized
from prompt.reader import COMPLETION_PATH
from router.error import ReplicaError
from router.upstream import fetch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prompt.question import Question
    from router.endpoint import Endpoint
    from router.upstream import UpstreamPool
    from state.breaker import Breaker

    InThread = Callable[[int, Callable[[], bytes]], Awaitable[bytes]]

CALL_S: Final = 2.0
"""When a question is given up, whoever waited for it."""
UNABLE_S: Final = 60.0
"""How long a replica that has no such path is not asked for it again."""
MAX_REFUSALS: Final = 3
"""A path that never answered and refused so many questions is another one of that name."""
_OK: Final = 200
_BUSY: Final = 429
_SERVER_ERROR: Final = 500
_NOT_THERE: Final = frozenset({401, 403, 404, 405, 501})


class Result(enum.StrEnum):
    """How asking for tokens ended."""

    ANSWERED = "answered"
    KNOWN = "known"
    SLOW = "slow"
    FAILED = "failed"
    REFUSED = "refused"
    WRONG = "wrong"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    MIXED = "mixed"
    DISTRUSTED = "distrusted"


class Reply(Struct, frozen=True):
    """What a replica made of a question; ``packed`` ids where it answered."""

    result: Result
    packed: bytes = b""


class Respondent:
    """A replica as one to ask. ``open_calls`` are its questions without an answer.

    Which of the paths it has is found by trying. Clients cannot make it look worse than it is: a
    question that is refused (4xx) says nothing of a path that has answered before.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        breaker: Breaker,
        pool: UpstreamPool,
        clock: Callable[[], float],
        in_thread: InThread,
    ) -> None:
        self.endpoint = endpoint
        self.breaker = breaker
        self.open_calls = 0
        self._pool = pool
        self._clock = clock
        self._in_thread = in_thread
        self._unable_until_s: dict[str, float] = {}
        self._refusals: dict[str, int] = {}
        self._has_answered: set[str] = set()

    def can_answer(self, path: str, question: Question) -> bool:
        """Return whether there may be a path to ask for the prompt of a call to ``path``."""
        return self._is_able(_rendering(path)) or (
            question.body is not None and self._is_able(_tokenizing(path))
        )

    def _is_able(self, kind: str) -> bool:
        return self._clock() >= self._unable_until_s.get(kind, 0.0)

    async def reply(self, path: str, body: bytes, question: Question) -> Reply:
        """Return what the replica answers to the question of a call; the better path first."""
        reply = Reply(Result.UNAVAILABLE)
        if self._is_able(_rendering(path)):
            decode = partial(rendered, path=path)
            reply = await self._asked(_rendering(path), path + RENDER_SUFFIX, body, decode)
        is_open = reply.result is Result.UNAVAILABLE and self._is_able(_tokenizing(path))
        if is_open and question.body is not None:
            kind = _tokenizing(path)
            reply = await self._asked(kind, TOKENIZE_PATH, question.body, tokenized)
        return reply

    async def _asked(
        self, kind: str, target: str, body: bytes, decode: Callable[[bytes], bytes]
    ) -> Reply:
        try:
            status, _, answer = await fetch(self.endpoint, target, self._pool, CALL_S, body)
        except ReplicaError:
            return Reply(Result.FAILED)
        if status == _OK:
            try:
                packed = await self._in_thread(len(answer), partial(decode, answer))
            except WrongAnswerError:
                return Reply(Result.WRONG)
            self._has_answered.add(kind)
            return Reply(Result.ANSWERED, packed)
        if status in _NOT_THERE:
            self._unable_until_s[kind] = self._clock() + UNABLE_S
            return Reply(Result.UNAVAILABLE)
        if status == _BUSY or status >= _SERVER_ERROR:
            return Reply(Result.FAILED)
        self._refuse(kind)
        return Reply(Result.REFUSED)

    def _refuse(self, kind: str) -> None:
        if kind in self._has_answered:
            return
        self._refusals[kind] = self._refusals.get(kind, 0) + 1
        if self._refusals[kind] >= MAX_REFUSALS:
            del self._refusals[kind]
            self._unable_until_s[kind] = self._clock() + UNABLE_S


def _rendering(path: str) -> str:
    return path + RENDER_SUFFIX


def _tokenizing(path: str) -> str:
    """Return what tells the kinds of ``/tokenize`` apart: an engine may know texts only."""
    return f"{TOKENIZE_PATH} for {'texts' if path == COMPLETION_PATH else 'chats'}"
