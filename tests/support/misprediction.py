"""Turns beside what engines told of their pages: which engine was warm, and why a turn erred."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from state.prefix import TOKEN_BYTES
from support.engine_load import Turn
from support.vllm import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prompt.codec import Codec
    from support.page_log import Page, PageLog

WARM_PAGES: Final = 4
"""An engine is the warm one if it held so many more leading pages than every other."""


class Cause(StrEnum):
    """Why a turn found other pages than predicted; the first two are the engine's doing."""

    TOLD_LATER = "the engine told of it after the decision"
    NOT_USED = "the engine held it and did not use it"
    TOLD_BEFORE = "the engine had told of it before the decision"
    NEVER_TOLD = "the engine told nothing of such a page"


class Miss(Struct, frozen=True, kw_only=True):
    """A wrong prediction and its cause, by the first page that was there or not there.

    ``after_s``: how long after the decision the engine told of the change; negative: before it.
    ``held_pages``: the leading pages that it held at the decision, as far as it had told.
    """

    ordinal: int
    turn: Turn
    predicted_pages: int
    reported_pages: int
    held_pages: int
    cause: Cause
    after_s: float | None

    def __str__(self) -> str:
        when = "" if self.after_s is None else f" ({self.after_s * 1000:+.0f} ms)"
        turn = self.turn
        return (
            f"{self.ordinal} ({turn.phase}, talk {turn.talk}, {turn.answered.replica}): "
            f"{self.predicted_pages} pages, not {self.reported_pages}; it had told of "
            f"{self.held_pages} of {turn.answered.prompt_tokens // PAGE_TOKENS}; "
            f"{self.cause}{when}; {turn.rested_s:.2f} s after the last turn"
        )


class Examiner:
    """Knows the prompts of ``turns`` as pages, their decision records, and the engines' logs."""

    def __init__(
        self,
        turns: Sequence[Turn],
        codec: Codec,
        records: Mapping[str, Mapping[str, Any]],
        logs: Mapping[str, PageLog],
    ) -> None:
        self._turns = turns
        self._codec = codec
        self._records = records
        self._logs = logs

    def decided_s(self, turn: Turn) -> float:
        """Return when the request came in; its decision follows within some milliseconds."""
        return float(self._records[turn.answered.request_id]["started_unix_s"])

    def pages(self, turn: Turn) -> list[Page]:
        """Return the whole pages of a turn's prompt."""
        chat = [{"role": role, "content": text} for role, text in turn.messages]
        packed = memoryview(self._codec.chat_tokens(chat, None, options={})).cast("I")
        assert packed.itemsize == TOKEN_BYTES
        assert len(packed) == turn.answered.prompt_tokens
        whole = len(packed) // PAGE_TOKENS
        return [tuple(packed[at * PAGE_TOKENS : (at + 1) * PAGE_TOKENS]) for at in range(whole)]

    def warm(self, turn: Turn) -> str | None:
        """Return the engine that held clearly more of the prompt than the others, if one did."""
        pages, moment_s = self.pages(turn), self.decided_s(turn)
        runs = {name: log.run_at(pages, moment_s, turn.salt) for name, log in self._logs.items()}
        first, second = sorted(runs.values(), reverse=True)[:2]
        if first - second < WARM_PAGES:
            return None
        return max(runs, key=lambda name: runs[name])

    def could_choose(self, turn: Turn, name: str) -> bool:
        """Return whether the last decision saw live state, and ``name`` among its candidates."""
        record = self._records[turn.answered.request_id]
        [*_, last] = record["attempts"]
        names = {one["replica"] for one in last["decision"]["candidates"]}
        return record["rung"] == "live" and name in names

    def told(self, turn: Turn) -> str:
        """Return a turn's decision record, and the leading pages that engines had told of."""
        pages, moment_s = self.pages(turn), self.decided_s(turn)
        runs = {name: log.run_at(pages, moment_s, turn.salt) for name, log in self._logs.items()}
        return f"{turn.phase}, pages told: {runs}, {self._records[turn.answered.request_id]}"

    def is_free(self, turn: Turn, name: str) -> bool:
        """Return whether no engine had a shorter queue than ``name``, as the router saw it."""
        [*_, last] = self._records[turn.answered.request_id]["attempts"]
        queues = {
            one["replica"]: one["terms"]["wait"] + one["terms"]["active"]
            for one in last["decision"]["candidates"]
        }
        return bool(queues.get(name, math.inf) <= min(queues.values()))

    def misses(self) -> Iterator[Miss]:
        """Yield what went wrong, in order of time."""
        for ordinal, turn in enumerate(self._turns):
            if not turn.is_right(PAGE_TOKENS):
                yield self._miss(ordinal, turn)

    def _miss(self, ordinal: int, turn: Turn) -> Miss:
        predicted, reported = turn.pages(PAGE_TOKENS)
        pages, decided_s = self.pages(turn), self.decided_s(turn)
        ended_s = decided_s + float(self._records[turn.answered.request_id]["duration_s"])
        log = self._logs[turn.answered.replica]
        odd, was_found = min(predicted, reported), reported > predicted
        held = log.run_at(pages, decided_s, turn.salt)
        changes_s = [
            told_s - decided_s
            for told_s, came in log.history(pages[: odd + 1], turn.salt)
            if came == was_found and told_s < ended_s
        ]
        is_as_found = (held > odd) == was_found
        if is_as_found:
            before_s = [change_s for change_s in changes_s if change_s <= 0]
            cause, after_s = Cause.TOLD_BEFORE, max(before_s, default=None)
        else:
            later_s = [change_s for change_s in changes_s if change_s > 0]
            cause, after_s = Cause.TOLD_LATER, min(later_s, default=None)
        if after_s is None:
            cause = Cause.NOT_USED if held > odd else Cause.NEVER_TOLD
        return Miss(
            ordinal=ordinal,
            turn=turn,
            predicted_pages=predicted,
            reported_pages=reported,
            held_pages=held,
            cause=cause,
            after_s=after_s,
        )
