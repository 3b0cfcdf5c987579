"""What each of the processes gets of what is configured for all of them together.

A bound on a sum is divided and rounded down, so that no bound becomes larger than it was told; what
every process needs at least one of has to be enough for all. Bounds that all routers keep together
through the shared state (a tenant's rate, a replica's places) need no division. Files get a name
for each process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import structs

from router.memory import group_limit_bytes
from router.recording import LEAST_BYTES
from router.warm_setting import LEAST_KEPT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.admission_setting import AdmissionSettings
    from router.config import Config, LimitSettings
    from router.quota_setting import QuotaSettings
    from router.retry_setting import RetrySettings
    from router.tenant import TenantSettings
    from router.warm_setting import WarmUpSettings

LOG_FILE_LEAST_BYTES: Final = 1 << 20
PROMPTS_LEAST_BYTES: Final = 1 << 20
STDERR: Final = "stderr"


def share_fault(config: Config) -> str | None:
    """Return which bound is too small for so many processes, beginning with its key; else None."""
    processes = config.processes
    for key, value in _counted(config):
        if value is not None and value < processes:
            return f"{key}: expected at least {processes}, one for each of processes"
    limits = config.limits
    if processes > 1 and limits.buffered_bytes // processes < limits.body_bytes:
        least = processes * limits.body_bytes
        return (
            f"limits.buffered_bytes: expected at least {least}, limits.body_bytes for each of"
            " processes"
        )
    return None


def _counted(config: Config) -> Iterator[tuple[str, int | None]]:
    """Yield the bounds of which each process gets one at the least."""
    yield "limits.connections", config.limits.connections
    yield "limits.connections_per_address", config.limits.connections_per_address
    yield "admission.max_inflight", config.admission.max_inflight
    yield "hold.max_queue", config.hold.max_queue
    for index, tenant in enumerate(config.tenants):
        yield f"tenants[{index}].quota.max_inflight", tenant.quota.max_inflight


def share_of(config: Config) -> Config:
    """Return what one of ``config.processes`` goes by; the configuration itself where it is one."""
    processes = config.processes
    if processes == 1:
        return config
    recording_bytes = config.recording.max_bytes
    if recording_bytes:
        recording_bytes = max(LEAST_BYTES, recording_bytes // processes)
    return structs.replace(
        config,
        limits=_limits(config.limits, processes),
        admission=_admission(config.admission, processes),
        hold=structs.replace(config.hold, max_queue=config.hold.max_queue // processes),
        retry=_retry(config.retry, processes),
        tenants=tuple(_tenant(tenant, processes) for tenant in config.tenants),
        decisions_kept=-(-config.decisions_kept // processes),
        decisions=structs.replace(
            config.decisions, max_bytes=_log_bytes(config.decisions.max_bytes, processes)
        ),
        access_log=structs.replace(
            config.access_log, max_bytes=_log_bytes(config.access_log.max_bytes, processes)
        ),
        recording=structs.replace(config.recording, max_bytes=recording_bytes),
        warm_up=_warm_up(config.warm_up, processes),
        prompt_bytes=max(PROMPTS_LEAST_BYTES, config.prompt_bytes // processes),
        tracing=structs.replace(
            config.tracing, parents_per_s=config.tracing.parents_per_s / processes
        ),
    )


def _limits(limits: LimitSettings, processes: int) -> LimitSettings:
    return structs.replace(
        limits,
        connections=limits.connections // processes,
        connections_per_address=limits.connections_per_address // processes,
        buffered_bytes=limits.buffered_bytes // processes,
    )


def _admission(admission: AdmissionSettings, processes: int) -> AdmissionSettings:
    most = admission.max_inflight
    memory_bytes = admission.overload.memory_bytes or group_limit_bytes()
    overload = structs.replace(
        admission.overload,
        memory_bytes=None if memory_bytes is None else memory_bytes // processes,
    )
    return structs.replace(
        admission,
        max_inflight=None if most is None else most // processes,
        pending=admission.pending // processes,
        overload=overload,
    )


def _warm_up(warm_up: WarmUpSettings, processes: int) -> WarmUpSettings:
    """Share the memory; the budgets are kept in the store, which all of them ask."""
    return structs.replace(
        warm_up, kept_bytes=max(LEAST_KEPT_BYTES, warm_up.kept_bytes // processes)
    )


def _retry(retry: RetrySettings, processes: int) -> RetrySettings:
    """Share the second tries; one at a time is left to each process where there are any."""
    return structs.replace(
        retry,
        reserve=max(min(1, retry.reserve), retry.reserve // processes),
        per_s=max(1.0, retry.per_s / processes),
    )


def _tenant(tenant: TenantSettings, processes: int) -> TenantSettings:
    return structs.replace(tenant, quota=_quota(tenant.quota, processes))


def _quota(quota: QuotaSettings, processes: int) -> QuotaSettings:
    most, rate, index_bytes = quota.max_inflight, quota.new_blocks_per_s, quota.index_bytes
    return structs.replace(
        quota,
        max_inflight=None if most is None else most // processes,
        new_blocks_per_s=None if rate is None else rate / processes,
        index_bytes=None if index_bytes is None else index_bytes // processes,
    )


def _log_bytes(max_bytes: int, processes: int) -> int:
    return max(LOG_FILE_LEAST_BYTES, max_bytes // processes)


def seated(config: Config, number: int) -> Config:
    """Return the configuration of process ``number``: its own files, its own draws, all limits."""

    def own(path: str | None) -> str | None:
        return path if path is None or path == STDERR else f"{path}.p{number}"

    return structs.replace(
        config,
        decisions=structs.replace(config.decisions, path=own(config.decisions.path)),
        access_log=structs.replace(config.access_log, path=own(config.access_log.path)),
        audit_log=own(config.audit_log),
        seed=None if config.seed is None else config.seed + number,
    )
