"""Bugs in who is asked, who may ask, and what is known: fleet, tenants, quotas, state."""

from __future__ import annotations

from typing import Final

from bugs.bug import Bug

_QUOTA: Final = (
    "tests/e2e/test_tenant_quota.py"
    "::test_requests_beyond_a_quota_are_refused_before_any_work_is_done"
)
_RECEIPTS: Final = (
    "tests/e2e/test_tenants.py"
    "::test_a_tenant_sees_receipts_where_its_settings_say_so_and_only_there"
)
BUGS: Final = (
    Bug(
        name="a replica that is down is a candidate",
        file="router/fleet.py",
        old="            and is_up(member.replica)\n            and (",
        new="            and (",
        tests=("tests/unit/test_fleet_table.py",),
    ),
    Bug(
        name="a bad request is held against the replica",
        file="router/verdict.py",
        old="    return Verdict.NEUTRAL if relayed.status >= BAD_REQUEST else Verdict.SUCCESS",
        new="    return Verdict.FAILURE if relayed.status >= BAD_REQUEST else Verdict.SUCCESS",
        tests=("tests/unit/test_verdict.py",),
    ),
    Bug(
        name="a busy replica counts as a failing one",
        file="router/verdict.py",
        old="    if relayed.status in BUSY_STATUSES:\n        return Verdict.PRESSURE",
        new="    if relayed.status in BUSY_STATUSES:\n        return Verdict.FAILURE",
        tests=("tests/unit/test_verdict.py",),
    ),
    Bug(
        name="the whole fleet may be ejected",
        file="router/ejection.py",
        old="        return sum(map(self.is_held, peers)) < self._most(peers)",
        new="        return self._most(peers) >= 0",
        tests=("tests/unit/test_ejection.py",),
    ),
    Bug(
        name="too few replicas are no reason to panic",
        file="router/panic.py",
        old="            is_short = count.up > 0 and count.available < self._fraction * count.all",
        new="            is_short = count.up < 0",
        tests=("tests/unit/test_availability.py",),
    ),
    Bug(
        name="a slot of a tenant is kept when its request fails",
        file="router/proxy.py",
        old="            if call.slot is not None:\n                call.slot.end(",
        new=(
            '            if call.slot is not None and call.outcome == "done":\n'
            "                call.slot.end("
        ),
        tests=(_QUOTA,),
        is_slow=True,
    ),
    Bug(
        name="a quota counts nobody",
        file="router/quota.py",
        old="        account.open_slots.add(slot)\n",
        new="",
        tests=("tests/unit/test_quota.py",),
    ),
    Bug(
        name="a place is given although all are taken",
        file="router/admission.py",
        old="        return self._parts.leases.open_count >= self.cap",
        new="        return self._parts.leases.open_count > self.cap",
        tests=("tests/unit/test_admission.py",),
    ),
    Bug(
        name="a client's own salt stays",
        file="router/salt.py",
        old="        if found is not None:\n            return body[: found.start] + field",
        new="        if found is not None:\n            return body[:] or body + field",
        tests=("tests/property/test_salt.py",),
    ),
    Bug(
        name="a prompt begins with a public prefix that it only begins like",
        file="router/branch.py",
        old="        return tokens.first(self.mark.tokens) == self.packed",
        new="        return tokens.first(1) == self.packed[:4]",
        tests=("tests/unit/test_public_prefix.py",),
    ),
    Bug(
        name="a worker believes what a header calls public",
        file="sidecar/scope.py",
        old="            if not mark.is_start_of(packed_prompt):",
        new="            if mark.tokens < 1:",
        tests=("tests/unit/test_public_prefix.py",),
    ),
    Bug(
        name="what follows a public prefix is public, too",
        file="router/outlook.py",
        old="        tail = tail_root(head[-1], scope, self.keys.of(scope))",
        new='        tail = tail_root(head[-1], "", self.keys.of(""))',
        tests=("tests/unit/test_public_chooser.py",),
    ),
    Bug(
        name="users whom a tenant keeps apart share",
        file="router/gate.py",
        old="            if user is not None:  # nothing",
        new="            if user is None:  # nothing",
        tests=("tests/unit/test_user_scope.py",),
    ),
    Bug(
        name="a salt is that of an epoch that ended",
        file="router/gate.py",
        old="        if known is None or known[0] != epoch:\n            field",
        new="        if known is None:\n            field",
        tests=("tests/unit/test_gate.py",),
    ),
    Bug(
        name="a warm-up has the salt of an epoch that ended",
        file="router/gate.py",
        old="        if known is None or known[0] != epoch:\n            salt =",
        new="        if known is None:\n            salt =",
        tests=("tests/unit/test_gate.py",),
    ),
    Bug(
        name="a key is good after its last day",
        file="router/gate.py",
        old="                if until_s is None or self._unix_clock() < until_s:",
        new="                if until_s is None or self._unix_clock() >= 0:",
        tests=("tests/unit/test_gate.py",),
    ),
    Bug(
        name="receipts are shown to every tenant",
        file="router/attempt.py",
        old="if call.tenant is None else call.tenant.receipts",
        new="if call.tenant is None else True",
        tests=(_RECEIPTS,),
        is_slow=True,
    ),
    Bug(
        name="the scope is no part of a chain's root",
        file="state/prefix.py",
        old='    "scope",\n',
        new="",
        tests=("tests/unit/test_prefix.py",),
    ),
    Bug(
        name="a block's id does not name what stands before it",
        file="state/prefix.py",
        old="        block.update(parent + packed_tokens[end - block_bytes : end])",
        new="        block.update(packed_tokens[end - block_bytes : end])",
        tests=("tests/unit/test_secret.py",),
    ),
    Bug(
        name="residency outlives a restart",
        file="state/mirror_sync.py",
        old="            self._residency.drop(follow.replica)\n            follow.generation",
        new="            follow.generation",
        tests=("tests/unit/test_mirror_sync.py",),
    ),
    Bug(
        name="an event of an earlier life is applied",
        file="state/mirror_sync.py",
        old="            elif entry.generation == follow.generation:\n",
        new="            elif entry.generation:\n",
        tests=("tests/unit/test_mirror_sync.py",),
    ),
    Bug(
        name="a gap in the events is passed over",
        file="state/mirror_sync.py",
        old="                if not follow.continues(entry):",
        new="                if entry is None:",
        tests=("tests/unit/test_mirror_sync.py",),
    ),
    Bug(
        name="a request waits for the state server",
        file="router/proxy.py",
        old="        parts.recovery.admit(call, call.body, prompt.choices)\n",
        new=(
            "        parts.recovery.admit(call, call.body, prompt.choices)\n"
            '        client = getattr(parts.reader, "_client", None)\n'
            "        if client is not None:\n"
            "            await client.ping()\n"
        ),
        tests=("tests/e2e/test_field_outage.py",),
        is_slow=True,
    ),
    Bug(
        name="a canary's candidate decides for the control too",
        file="router/chooser.py",
        old="        if routed.assigned is not None and routed.assigned.side is CANDIDATE:",
        new="        if routed.assigned is not None:",
        tests=("tests/unit/test_canary.py",),
    ),
    Bug(
        name="a user is not part of a salt",
        file="state/secret.py",
        old="        parts.append(hashlib.sha256(user",
        new="        _ = parts.append, (hashlib.sha256(user",
        tests=("tests/unit/test_user_scope.py",),
    ),
    Bug(
        name="a metadata service is dialled",
        file="router/registration.py",
        old="    return not (is_special or address.is_reserved or address in METADATA)",
        new="    return not address.is_multicast",
        tests=("tests/unit/test_registration.py",),
    ),
    Bug(
        name="headers of a request are logged",
        file="router/proxy.py",
        old="        self.open_requests += 1\n",
        new=(
            "        self.open_requests += 1\n"
            '        __import__("logging").getLogger(__name__).info("%s", request.headers)\n'
        ),
        tests=("tests/e2e/test_canary.py",),
        is_slow=True,
    ),
    Bug(
        name="a refusal repeats the key",
        file="router/gate.py",
        old="            raise UnauthenticatedError(_UNKNOWN)",
        new='            raise UnauthenticatedError(f"{_UNKNOWN}, got {key!r}")',
        tests=("tests/unit/test_gate.py",),
    ),
    Bug(
        name="a distrusted replica keeps its credit",
        file="router/trust.py",
        old="        return min(1.0, self.precision.by_token or 0.0)",
        new="        return 1.0",
        tests=("tests/unit/test_feedback.py",),
    ),
)
