"""A decision in words: the same on the command line and on the operators' page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from router.trace import DecisionRecord

WORDS: Final = {
    "prefix": "it holds the longest part of the prompt and its queue does not cost more",
    "spill": "another replica holds more of the prompt, but costs more or is to be relieved",
    "load": "no replica holds more of the prompt than the others, so load decided",
    "rule": "the policy does not look at prefixes",
}


def headline(record: DecisionRecord) -> list[str]:
    """Return what happened to a request, as lines of text."""
    kind = "tokens" if record.is_exact else "tokens (estimated from bytes)"
    hot = "no hot prefix"
    if record.hot_prefix_tokens is not None:
        holders = ", ".join(record.hot_holders)
        hot = f"hot prefix of {record.hot_prefix_tokens} tokens, wanted on {holders}"
    known = "" if record.unroutable is None else f"; routed by load: {record.unroutable}"
    ttft = "no first byte" if record.ttft_s is None else f"first byte after {record.ttft_s:.3f} s"
    reported = record.reported_cached_tokens
    told = "the engine did not report" if reported is None else f"the engine reported {reported}"
    whose = f", tenant {record.tenant}" if record.tenant is not None else ""
    side = f" ({record.side} of a canary)" if record.side is not None else ""
    state = f"{record.rung.value} ({record.state_age_s:.2f} s old)"
    lines = [
        f"request {record.request_id}: {record.path} model {record.model or '-'}{whose}",
        f"  {record.prompt_tokens} prompt {kind}{known}; {hot}",
        f"  policy {record.policy}{side}, state {state}",
    ]
    for attempt in record.attempts:
        decision = attempt.decision
        lines.append(
            f"  -> {decision.replica} by {decision.reason.value}: {WORDS[decision.reason.value]}"
        )
        fetched = ""
        if decision.predicted_lower_tier_tokens:
            fetched = f" and {decision.predicted_lower_tier_tokens} in lower tiers"
        cached = f"{decision.predicted_cached_tokens} cached tokens{fetched}"
        lines.append(f"     predicted {cached}; {told}")
        if attempt.promised_tokens is not None:
            credit = 100.0 * attempt.credits.get(decision.replica, 1.0)
            promised = f"{attempt.promised_tokens} are on record there"
            lines.append(
                f"     {promised}, but such predictions came true for {credit:.0f} % lately"
            )
        if attempt.kv_source is not None:
            lines.append(f"     told to fetch KV pages from {attempt.kv_source}")
        if attempt.is_hedge:
            lines.append("     sent beside the attempt before it, which had not answered for long")
        if attempt.error:
            lines.append(f"     {attempt.outcome}: {attempt.error}")
    lines.append(f"  {record.outcome}, status {record.status}, {ttft}, {record.duration_s:.3f} s")
    return lines
