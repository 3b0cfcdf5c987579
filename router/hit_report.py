"""Notices engines that do not tell how much of a prompt they had cached: named once per replica.

An engine says so at the end of an answer only when it was started to, and vLLM only where it was
not zero. So an answer counts where its events tell that the prompt's start is there. Without these
reports no prediction can be compared with what happened.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from router.account import Call
    from router.observer import Usage
    from state.model import ReplicaId

SILENT_ANSWERS: Final = 5
"""So many answers in a row without a report are no chance."""
MOST_REPLICAS: Final = 4_096
_DONE: Final = "done"
_log = logging.getLogger(__name__)


class HitReports:
    """Counts, per replica, answers that should have had a report and had none."""

    def __init__(self) -> None:
        self._silent: dict[ReplicaId, int] = {}

    def note(self, call: Call, usage: Usage | None) -> None:
        """Look at how one request ended."""
        if usage is None or usage.prompt_tokens is None:
            return
        if not call.choices or call.outcome != _DONE:
            return
        choice = call.choices[-1]
        replica = choice.member.replica
        if usage.cached_tokens is not None:
            self._silent.pop(replica, None)
            return
        if not (choice.is_told and choice.decision.predicted_cached_tokens):
            return
        if len(self._silent) >= MOST_REPLICAS and replica not in self._silent:
            self._silent.clear()
        count = self._silent[replica] = self._silent.get(replica, 0) + 1
        if count == SILENT_ANSWERS:
            _log.warning(
                "replica %s does not report cached tokens, so its predictions cannot be checked: "
                "start it with --enable-prompt-tokens-details (vLLM) or --enable-cache-report "
                "(SGLang)",
                replica,
            )
