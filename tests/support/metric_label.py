"""What each label of a metric may be: a closed set, or names that configuration or fleet bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from policies.hold import HoldEnd
from policies.model import Reason
from router.admission_setting import Priority
from router.availability import Standing
from router.canary_keeper import ENDED, PROMOTED, ROLLED_BACK
from router.diagnosis import Kind
from router.ejection import Cause
from router.hedge import HEDGE_DENIALS, HEDGE_ENDS
from router.overload import LoadRung
from router.quota import INFLIGHT, NEW_BLOCKS
from router.retry import Denial, RetryReason
from router.saving import TOP_PREFIXES, TOP_TENANTS
from router.shadow_policy import ANSWERS
from router.shed import Shed
from router.split import Side
from router.supervisor.crew import RESTARTS
from router.token_call import Result
from router.trust import Ground
from router.warm_call import WarmEnd
from router.warm_job import JobEnd, JobKind
from sidecar.metrics import RenewalReason
from sidecar.pool import STATES
from state.direct import LookupCounts
from state.fault import Fault
from state.model import Rung
from state.seal import Fault as SealFault
from state.seal import Kind as SealKind

if TYPE_CHECKING:
    from collections.abc import Iterable

ENDS: Final = frozenset({"done", "failed", "cancelled", "refused"})
TIERS: Final = frozenset({"device", "host", "disk", "peer"})

OPEN: Final = {
    "replica": "replicas of the fleet as it is now",
    "model": "models that replicas announced; 512 series at most",
    "tenant": "configured tenants; on workers up to 16 digests of salts, `other`, and none",
    "scope": "scopes of configured tenants",
}
"""Labels that grow with the fleet or the configuration, never with what clients send."""

_CLASSES: Final = frozenset(f"{first}xx" for first in range(1, 6))

CLOSED: Final[dict[tuple[str, str], frozenset[str]]] = {
    ("warmroute_requests_total", "outcome"): ENDS,
    ("warmroute_requests_total", "code"): _CLASSES,
    ("warmroute_tenant_requests_total", "outcome"): ENDS,
    ("warmroute_decisions_total", "reason"): frozenset(Reason),
    ("warmroute_process_restarts_total", "reason"): frozenset(RESTARTS),
    ("warmroute_holds_total", "end"): frozenset(HoldEnd),
    ("warmroute_state_rung", "rung"): frozenset(Rung),
    ("warmroute_state_transitions_total", "rung"): frozenset(Rung),
    ("warmroute_state_faults_total", "kind"): frozenset(Fault),
    ("warmroute_unsealed_values_total", "kind"): frozenset(SealKind),
    ("warmroute_unsealed_values_total", "fault"): frozenset(SealFault),
    ("warmroute_state_lookups_total", "outcome"): frozenset(LookupCounts.__struct_fields__),
    ("warmroute_overload_rung", "rung"): frozenset(rung.name.lower() for rung in LoadRung),
    ("warmroute_overload_transitions_total", "rung"): frozenset(
        rung.name.lower() for rung in LoadRung
    ),
    ("warmroute_replica_state", "state"): frozenset(Standing),
    ("warmroute_ejections_total", "cause"): frozenset(Cause),
    ("warmroute_retries_total", "reason"): frozenset(RetryReason),
    ("warmroute_retries_denied_total", "reason"): frozenset(Denial),
    ("warmroute_hedges_total", "end"): frozenset(HEDGE_ENDS),
    ("warmroute_hedges_denied_total", "reason"): frozenset(HEDGE_DENIALS),
    ("warmroute_sheds_total", "reason"): frozenset(Shed),
    ("warmroute_sheds_total", "priority"): frozenset(Priority),
    ("warmroute_key_failures_total", "result"): frozenset({"refused", "limited"}),
    ("warmroute_quota_refusals_total", "quota"): frozenset({INFLIGHT, NEW_BLOCKS}),
    ("warmroute_engine_tokenizations_total", "result"): frozenset(Result),
    ("warmroute_diagnosis", "kind"): frozenset(Kind),
    ("warmroute_prediction_precision_ratio", "ground"): frozenset(Ground),
    ("warmroute_prediction_recall_ratio", "ground"): frozenset(Ground),
    ("warmroute_prediction_credit_ratio", "ground"): frozenset(Ground),
    ("warmroute_compared_tokens_total", "ground"): frozenset(Ground),
    ("warmroute_compared_tokens_total", "side"): frozenset({"predicted", "reported", "matched"}),
    ("warmroute_shadow_decisions_total", "answer"): frozenset(ANSWERS),
    ("warmroute_canary_requests_total", "side"): frozenset(Side),
    ("warmroute_canary_requests_total", "outcome"): ENDS,
    ("warmroute_canary_first_bytes_total", "side"): frozenset(Side),
    ("warmroute_canary_ttft_seconds_total", "side"): frozenset(Side),
    ("warmroute_canary_ends_total", "end"): frozenset({ROLLED_BACK, ENDED, PROMOTED}),
    ("warmroute_warm_ups_total", "kind"): frozenset(JobKind),
    ("warmroute_warm_ups_total", "end"): frozenset(JobEnd),
    ("warmroute_warm_ups_active", "kind"): frozenset(JobKind),
    ("warmroute_warm_up_requests_total", "kind"): frozenset(JobKind),
    ("warmroute_warm_up_requests_total", "end"): frozenset(WarmEnd),
    ("warmroute_warm_up_tokens_total", "kind"): frozenset(JobKind),
    ("warmroute_warm_up_tokens_total", "how"): frozenset({"computed", "cached"}),
    ("warmroute_tls_loads_total", "of"): frozenset({"listen_tls", "admin_tls", "upstream.tls"}),
    ("warmroute_tls_loads_total", "outcome"): frozenset({"done", "failed"}),
    ("warmroute_tls_handshake_failures_total", "listener"): frozenset({"listen", "admin"}),
    ("warmroute_tls_certificate_expiry_seconds", "listener"): frozenset({"listen", "admin"}),
    ("warmroute_cache_answers_total", "result"): frozenset({"hit", "miss"}),
    ("warmroute_saved_prefill_seconds_total", "ground"): frozenset({"predicted", "reported"}),
    ("warmroute_prefix_top_share_ratio", "top"): frozenset(map(str, TOP_PREFIXES)),
    ("warmroute_tenant_top_share_ratio", "top"): frozenset(map(str, TOP_TENANTS)),
    ("warmroute_sidecar_generations_total", "reason"): frozenset(RenewalReason),
    ("warmroute_kv_pages", "tier"): TIERS,
    ("warmroute_kv_pages", "state"): frozenset(STATES),
    ("warmroute_kv_bytes", "tier"): TIERS,
    ("warmroute_kv_hits_total", "tier"): TIERS,
    ("warmroute_kv_moved_bytes_total", "from"): TIERS,
    ("warmroute_kv_moved_bytes_total", "to"): TIERS,
    ("warmroute_kv_saved_seconds_total", "tier"): TIERS,
    ("warmroute_kv_spent_seconds_total", "tier"): TIERS,
    ("warmroute_kv_latency_seconds", "tier"): TIERS,
    ("warmroute_kv_bytes_per_second", "tier"): TIERS,
    ("warmroute_kv_largest_free_run_pages", "tier"): TIERS,
    ("warmroute_kv_fragmentation_ratio", "tier"): TIERS,
}


def label_values(used: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return rows of label, metrics and values for the page; KeyError for one that is not told."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, label in used:
        values = OPEN.get(label) or ", ".join(f"`{one}`" for one in sorted(CLOSED[name, label]))
        rows.setdefault((label, values), []).append(name)
    return [
        (label, "all" if label in OPEN else ", ".join(f"`{name}`" for name in names), values)
        for (label, values), names in sorted(rows.items())
    ]
