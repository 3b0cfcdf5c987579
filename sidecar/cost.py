"""What computing and fetching pages costs on this engine, learned from what it took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sidecar.bandwidth import FIRST_FIT, PrefillModel, TransferModel

if TYPE_CHECKING:
    from sidecar.clock import StepCost, StepLoad
    from sidecar.runner import Outcome
    from sidecar.tiers import SourceName

FIRST_LATENCY_MS: Final[dict[SourceName, float]] = {"host": 0.02, "disk": 0.2, "peer": 1.0}
FIRST_BYTES_PER_S: Final[dict[SourceName, float]] = {"host": 4e9, "disk": 5e8, "peer": 5e8}
"""What is assumed until something was moved: plain memory copies, a SATA disk, a loopback."""
_REFRESH_STEPS: Final = 16


class MeasuredCosts:
    """Prices of this engine (see ``tiers.Costs``); ``prior`` holds until steps were observed."""

    def __init__(self, prior: StepCost, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._prefill = PrefillModel(prior)
        self._links = {
            source: TransferModel(FIRST_LATENCY_MS[source], FIRST_BYTES_PER_S[source])
            for source in FIRST_LATENCY_MS
        }
        self._peer_ratio = 1.0
        self._cost = prior
        self._steps = 0

    def link(self, source: SourceName) -> TransferModel:
        """Return what is known about fetching from ``source``."""
        return self._links[source]

    def fetch_ms(self, source: SourceName, pages: int) -> float:
        """See ``tiers.Costs``."""
        if not pages:
            return 0.0
        predicted_ms = self._links[source].predict_ms(pages * self._page_bytes)
        return predicted_ms * (self._peer_ratio if source == "peer" else 1.0)

    def prefill_ms(self, tokens: int, context_tokens: int) -> float:
        """See ``tiers.Costs``: what the tokens add to steps that run anyway."""
        pairs = tokens * context_tokens + tokens * (tokens + 1) // 2
        cost = self._cost
        return cost.prefill_token_ms * tokens + cost.attention_pair_ms * pairs

    def observe_step(self, load: StepLoad, outcome: Outcome, loaded_pages: int) -> None:
        """Learn from a step that ran."""
        if load.prefill_tokens or load.decode_sequences:
            self._prefill.observe(load, outcome.compute_s)
            self._steps += 1
            if self._steps % _REFRESH_STEPS == 0 or self._steps <= _REFRESH_STEPS:
                self._cost = self._prefill.cost()
        if loaded_pages:
            self.observe_fetch("host", loaded_pages, outcome.load_s)

    def observe_fetch(self, source: SourceName, pages: int, seconds: float) -> None:
        """Learn from a fetch that ended.

        While there are too few from peers for a fit, the latest one scales what is assumed: a slow
        link disappoints once. Of this machine's own memory and disk, one hiccup is not believed.
        """
        link = self._links[source]
        moved_bytes = pages * self._page_bytes
        if source == "peer":
            is_early = link.observations + 1 < FIRST_FIT
            predicted_ms = link.predict_ms(moved_bytes)
            self._peer_ratio = 1e3 * seconds / predicted_ms if is_early else 1.0
        link.observe(moved_bytes, seconds)
