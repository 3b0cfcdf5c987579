"""Tokens of models without a tokenizer directory: asked of a replica, within bounds.

An engine is asked only where its tokens are worth a round trip: for one prompt of some length, of a
model of which a replica tells what it holds (without events, bytes find the same prefixes), and
where all those replicas announce one tokenizer. A request waits for a limited time, then its prefix
is known by its bytes alone. An answer that comes later is kept all the same.

The wait is worth it while it is short beside the prefill that a known prefix may save: a vLLM
tokenizes some 500,000 tokens per second, 2 us each, and engines prefill 10,000 to 40,000, 25 to
100 us each. So patience grows with the body, by about what a byte of it takes.

Wrong tokens are worse than none. An answer must be well formed; and what an engine says at the end
of a request, how many tokens its prompt had, must be what it said before.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import Struct, structs

from prompt.known import KnownTokens
from prompt.model import PromptTokens, Unroutable
from prompt.question import question_of
from router.metrics import Counts
from router.rank import one_of_each_engine
from router.tally import Tally
from router.token_call import Respondent, Result
from state.breaker import Admission, Breaker
from state.rhythm import Backoff

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from prometheus_client import CollectorRegistry

    from prompt.model import ReadPrompt
    from prompt.question import Question
    from router.config import TokenSettings, TokensFrom
    from router.fleet import FleetTable, Member, Pulse
    from router.observer import Usage
    from router.upstream import UpstreamPool
    from state.model import ReplicaId

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

MIN_BODY_BYTES: Final = 1024
"""Under some 250 tokens: their prefill takes no longer than the question."""
MAX_BODY_BYTES: Final = 2 * 1024 * 1024
"""Above, the answer may be larger than what ``fetch`` takes."""
THREAD_BYTES: Final = 64 * 1024
"""Bodies and answers from here on are taken apart in a thread."""
MAX_OPEN: Final = 64
MAX_OPEN_PER_REPLICA: Final = 8
DISTRUST_S: Final = 600.0
MAX_MISMATCHES: Final = 3
BACKOFF_BASE_S: Final = 1.0
BACKOFF_CAP_S: Final = 30.0


class Answer(Struct, frozen=True):
    """How a question ended, with tokens where it was answered."""

    result: Result
    tokens: PromptTokens | None = None


@dataclass(slots=True, eq=False)
class _Call:
    """One question to one replica, for whoever waits for it; judged by its breaker once."""

    respondent: Respondent
    admission: Admission
    task: asyncio.Task[Answer] | None = None
    is_judged: bool = False

    def judge(self, result: Result, now_s: float) -> None:
        if self.is_judged:
            return
        self.is_judged = True
        breaker = self.respondent.breaker
        if result is Result.SLOW:
            breaker.late(self.admission, now_s)
        elif result in (Result.FAILED, Result.WRONG):
            breaker.failed(self.admission, now_s)
        else:
            breaker.answered(self.admission)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSourceParts:
    """What the source works with; ``sources`` are those of models with settings of their own."""

    fleet: FleetTable
    pulse: Pulse
    pool: UpstreamPool
    settings: TokenSettings
    sources: Mapping[str, TokensFrom]
    registry: CollectorRegistry
    clock: Callable[[], float]
    rng: random.Random


class TokenSource:
    """Asks replicas for tokens. Close it before the pool."""

    def __init__(self, parts: TokenSourceParts) -> None:
        self._parts = parts
        self._known = KnownTokens()
        self._respondents: dict[ReplicaId, Respondent] = {}
        self._calls: dict[tuple[str, bytes], _Call] = {}
        self._turn = 0
        self._mismatches: dict[str, int] = {}
        self._distrusted_until_s: dict[str, float] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokens")
        self._results = Tally(
            "warmroute_engine_tokenizations",
            "Prompts whose tokens an engine was to tell, by result.",
            ["result"],
        )
        parts.registry.register(Counts(self._results))

    async def close(self) -> None:
        """Give up every open question."""
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def refined(self, path: str, body: bytes, prompt: ReadPrompt) -> ReadPrompt:
        """Return ``prompt``, which was read as bytes, with an engine's tokens where they help."""
        sources, base = self._parts.sources, self._parts.fleet.adapters.base_of(prompt.model)
        source = sources.get(prompt.model) or sources.get(base or "", self._parts.settings.source)
        if source == "off":
            return structs.replace(prompt, prompts=(), unroutable=Unroutable.NO_TOKENIZER)
        is_fit = MIN_BODY_BYTES <= len(body) <= MAX_BODY_BYTES and len(prompt.prompts) == 1
        members = self._members(prompt.model) if source == "engine" and is_fit else ()
        if not members:
            return prompt
        answer = await self._answer(path, body, prompt, members)
        self._results.add(1, (answer.result.value,))
        if answer.result is Result.WRONG:
            return structs.replace(prompt, prompts=(), unroutable=Unroutable.WRONG_TOKENS)
        if answer.tokens is None:
            return prompt
        return structs.replace(prompt, prompts=(answer.tokens,), shadows=prompt.prompts)

    def check(self, prompt: ReadPrompt, usage: Usage | None) -> None:
        """Compare what an engine said of a prompt with the length that it reports at the end."""
        is_other = has_other_length(prompt, usage) if prompt.shadows else None
        if is_other is None:
            return
        model = prompt.model
        if not is_other:
            self._mismatches.pop(model, None)
            return
        self._results.add(1, (Result.WRONG.value,))
        self._mismatches[model] = self._mismatches.get(model, 0) + 1
        if self._mismatches[model] >= MAX_MISMATCHES:
            _log.warning("prompts have other lengths than the engines told: bytes are used")
            del self._mismatches[model]
            self._distrusted_until_s[model] = self._parts.clock() + DISTRUST_S
            self._known = KnownTokens()

    def forget(self) -> None:
        """Forget the tokens of every prompt."""
        self._known = KnownTokens()

    def _members(self, model: str) -> list[Member]:
        """Return the replicas that tell what they hold of ``model``; forget those that left."""
        parts = self._parts
        if not parts.fleet.have_events and not self._respondents:
            return []
        there = parts.fleet.members()
        for replica in [replica for replica in self._respondents if replica not in there]:
            del self._respondents[replica]
        candidates = parts.fleet.candidates(model, parts.pulse)
        return one_of_each_engine(member for member in candidates if member.has_events)

    async def _answer(
        self, path: str, body: bytes, prompt: ReadPrompt, members: Sequence[Member]
    ) -> Answer:
        tokenizers = {member.identity.tokenizer for member in members if member.identity}
        if len(tokenizers) != 1:
            return Answer(Result.MIXED)
        if self._parts.clock() < self._distrusted_until_s.get(prompt.model, 0.0):
            return Answer(Result.DISTRUSTED)
        question = await self._in_thread(len(body), partial(question_of, path, body))
        if question is None:
            return Answer(Result.REFUSED)
        # Answers that others waited for are others' where salts keep them apart.
        key = (tokenizers.pop(), question.digest + prompt.salt.encode("utf-8", "surrogatepass"))
        known = self._known.get(key)
        if known is not None:
            return Answer(Result.KNOWN, known)
        call = self._calls.get(key) or self._begun(key, path, body, question, members)
        if isinstance(call, Result):
            return Answer(call)
        return await self._waited(call, len(body))

    def _begun(
        self,
        key: tuple[str, bytes],
        path: str,
        body: bytes,
        question: Question,
        members: Sequence[Member],
    ) -> _Call | Result:
        """Return a call that was just begun, or why there is none."""
        if len(self._calls) >= MAX_OPEN:
            return Result.BUSY
        call = self._pick(path, question, members)
        if call is None:
            return Result.UNAVAILABLE
        self._calls[key] = call
        call.respondent.open_calls += 1
        task = asyncio.create_task(self._ask(call.respondent, key, path, body, question))
        task.add_done_callback(partial(self._ended, key, call))
        call.task = task
        return call

    def _pick(self, path: str, question: Question, members: Sequence[Member]) -> _Call | None:
        """Return a call to the next replica that may answer now; None where there is none."""
        self._turn += 1
        first = self._turn % len(members)
        for member in (*members[first:], *members[:first]):
            respondent = self._respondent(member)
            is_free = respondent.open_calls < MAX_OPEN_PER_REPLICA
            if not is_free or not respondent.can_answer(path, question):
                continue
            admission = respondent.breaker.admit(self._parts.clock())
            if admission is not Admission.REFUSED:
                return _Call(respondent, admission)
        return None

    def _respondent(self, member: Member) -> Respondent:
        known = self._respondents.get(member.replica)
        if known is None or known.endpoint != member.endpoint:
            parts = self._parts
            breaker = Breaker(Backoff(BACKOFF_BASE_S, BACKOFF_CAP_S, parts.rng))
            known = Respondent(member.endpoint, breaker, parts.pool, parts.clock, self._in_thread)
            self._respondents[member.replica] = known
        return known

    async def _ask(
        self,
        respondent: Respondent,
        key: tuple[str, bytes],
        path: str,
        body: bytes,
        question: Question,
    ) -> Answer:
        reply = await respondent.reply(path, body, question)
        tokens = self._known.put(key, reply.packed) if reply.packed else None
        return Answer(reply.result, tokens)

    def _ended(self, key: tuple[str, bytes], call: _Call, task: asyncio.Task[Answer]) -> None:
        del self._calls[key]
        call.respondent.open_calls -= 1
        call.judge(_outcome(task).result, self._parts.clock())

    async def _waited(self, call: _Call, body_bytes: int) -> Answer:
        """Wait for an answer while patience lasts; whoever leaves does not end the question."""
        settings = self._parts.settings
        wished_s = settings.patience_s + settings.patience_per_mib_s * body_bytes / 2**20
        patience_s = min(settings.patience_cap_s, wished_s)
        if call.task is None:
            return Answer(Result.FAILED)
        done, _ = await asyncio.wait((call.task,), timeout=patience_s)
        if not done:
            call.judge(Result.SLOW, self._parts.clock())
            return Answer(Result.SLOW)
        return _outcome(call.task)

    async def _in_thread(self, size_bytes: int, work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns: done here where it is short, else in a thread."""
        if size_bytes < THREAD_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def has_other_length(prompt: ReadPrompt, usage: Usage | None) -> bool | None:
    """Return whether an engine counted other prompt tokens than are known; None: it did not say."""
    if usage is None or usage.prompt_tokens is None or not prompt.prompts:
        return None
    return usage.prompt_tokens != sum([tokens.count for tokens in prompt.prompts])


def _outcome(task: asyncio.Task[Answer]) -> Answer:
    """Return what a task that is done came to; a fault of ours fails no request."""
    if task.cancelled():
        return Answer(Result.FAILED)
    fault = task.exception()
    if fault is not None:
        _log.error("asking for tokens failed", exc_info=fault)
        return Answer(Result.FAILED)
    return task.result()
