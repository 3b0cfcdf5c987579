"""Bugs on the way of a request: framing, headers, streams, retries, leases."""

from __future__ import annotations

from typing import Final

from bugs.bug import Bug

_LEAVES: Final = (
    "tests/e2e/test_client_leaves.py::test_a_client_that_leaves_before_the_head_frees_the_replica"
)
_EXTRA: Final = (
    "tests/e2e/test_relay_faults.py::test_bytes_after_a_response_never_reach_another_request"
)
_PROXY: Final = "tests/e2e/test_listener_limits.py::test_a_trusted_proxy_tells_who_the_client_is"
_CUT: Final = (
    "tests/e2e/test_resilience.py::test_a_stream_that_began_on_a_killed_replica_ends_with_an_error"
)
_HEDGE: Final = "tests/e2e/test_hedge.py::test_a_second_replica_answers_for_one_that_is_late"
BUGS: Final = (
    Bug(
        name="a lease is given back twice",
        file="state/lease.py",
        old="        if self.outcome is not None:\n            return False\n        self.outcome",
        new="        self.outcome",
        tests=("tests/unit/test_lease.py",),
    ),
    Bug(
        name="a lease outlives a client that left",
        file="router/attempt.py",
        old="            choice.finish(\n                outcome,",
        new=(
            "            _ = outcome is Outcome.CANCELLED or choice.finish(\n"
            "                outcome,"
        ),
        tests=(_LEAVES,),
        is_slow=True,
    ),
    Bug(
        name="the loser of a hedge keeps its lease",
        file="router/attempt.py",
        old="            choice.finish(\n                outcome,",
        new="            _ = is_lost or choice.finish(\n                outcome,",
        tests=(_HEDGE,),
        is_slow=True,
    ),
    Bug(
        name="two replicas answer one request",
        file="router/race.py",
        old="        return race.winner is self\n",
        new="        return race.winner is not None\n",
        tests=("tests/unit/test_hedge.py",),
    ),
    Bug(
        name="a client that reset its connection is not noticed",
        file="router/client.py",
        old="            self._task.cancel()\n            self._task.add_done_callback",
        new="            self._task.add_done_callback",
        tests=("tests/e2e/test_client_resets.py",),
        is_slow=True,
    ),
    Bug(
        name="Expect goes on to the replica",
        file="router/header.py",
        old='    b"expect",\n',
        new="",
        tests=("tests/unit/test_header.py",),
    ),
    Bug(
        name="headers that Connection nominates go on",
        file="router/header.py",
        old='            if lower == b"connection":',
        new='            if lower == b"":',
        tests=("tests/unit/test_header.py",),
    ),
    Bug(
        name="Transfer-Encoding beside Content-Length is let in",
        file="router/request.py",
        old="        if length is None or is_coded:",
        new="        if length is None:",
        tests=("tests/unit/test_body_length.py",),
    ),
    Bug(
        name="transfer codings other than chunked are let in",
        file="router/request.py",
        old='    if headers.transfer_coding and (headers.transfer_coding != "chunked" or version',
        new='    if headers.transfer_coding and (headers.transfer_coding == "" or version',
        tests=("tests/unit/test_intake.py",),
    ),
    Bug(
        name="anybody's X-Forwarded-For is believed",
        file="router/request.py",
        old="        if before and peer is not None and self.connection.is_trusted:",
        new="        if before and peer is not None:",
        tests=(_PROXY,),
        is_slow=True,
    ),
    Bug(
        name="a response with two framings is passed on",
        file="router/header.py",
        old='    if codings and (tuple(codings) != (b"chunked",) or lengths or version != "1.1"):',
        new='    if codings and (tuple(codings) != (b"chunked",) or version != "1.1"):',
        tests=("tests/unit/test_header.py",),
    ),
    Bug(
        name="the connection stays open after an error amid a stream",
        file="router/wire.py",
        old="        self.keep_alive = False\n        if last_words",
        new="        if last_words",
        tests=("tests/e2e/test_relay_truncation.py",),
        is_slow=True,
    ),
    Bug(
        name="a stream that was cut says [DONE]",
        file="router/exchange.py",
        old="            last_words = gap + error_event(error)",
        new='            last_words = gap + error_event(error) + b"data: [DONE]\\n\\n"',
        tests=("tests/e2e/test_relay_truncation.py",),
        is_slow=True,
    ),
    Bug(
        name="a stream without [DONE] counts as whole",
        file="router/exchange.py",
        old="        elif stream.is_done or self._outbound.done_marker is None:",
        new="        elif stream is not None:",
        tests=("tests/e2e/test_relay_truncation.py",),
        is_slow=True,
    ),
    Bug(
        name="a request is tried again after its first byte",
        file="router/attempt.py",
        old="            return relayed.response\n",
        new=(
            '            if relayed.outcome == "failed":\n'
            "                raise ReplicaBusyError(503, 0)\n"
            "            return relayed.response\n"
        ),
        tests=(_CUT,),
        is_slow=True,
    ),
    Bug(
        name="a second try needs no budget",
        file="router/retry_budget.py",
        old="            if self._balance < 1.0:",
        new="            if self._balance < -1e9:",
        tests=("tests/unit/test_retry.py",),
    ),
    Bug(
        name="what calls tools is sent twice",
        file="router/retry.py",
        old="        if not is_repeatable:\n            return Denial.UNREPEATABLE\n",
        new="",
        tests=("tests/unit/test_retry.py",),
    ),
    Bug(
        name="a connection with bytes left over is used again",
        file="router/connection.py",
        old="            and not self._has_extra\n",
        new="",
        tests=(_EXTRA,),
        is_slow=True,
    ),
    Bug(
        name="a connection that the replica ends is used again",
        file="router/connection.py",
        old="            self._will_keep_alive\n            and",
        new="            True\n            and",
        tests=("tests/e2e/test_relay_faults.py", "tests/e2e/test_relay.py"),
        is_slow=True,
    ),
    Bug(
        name="a cookie of a replica reaches clients",
        file="router/header.py",
        old='    b"set-cookie",\n',
        new="",
        tests=("tests/unit/test_header.py",),
    ),
    Bug(
        name="absent cached_tokens count as 0",
        file="router/observer.py",
        old="    return Usage(prompt, done, None)\n",
        new="    return Usage(prompt, done, 0)\n",
        tests=("tests/unit/test_observer.py",),
    ),
)
