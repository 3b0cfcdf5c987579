"""A tenant that keeps its users apart: what its requests say divides its scope, and no other."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.error import ClientError
from router.gate import Gate
from router.tenant import TenantSettings, tenant_fault, tenant_of
from router.user import USER_CHARACTERS, user_of
from state.secret import engine_salt
from support.tenant import SECRET, digest_of, key_of

if TYPE_CHECKING:
    from router.tenant import Tenant

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"


def settings(name: str, share: str) -> TenantSettings:
    """Return a tenant's settings."""
    return TenantSettings(name=name, key_digests=(digest_of(key_of(name)),), share=share)


def gate_of(*tenants: TenantSettings, epoch: str = "") -> Gate:
    """Return a gate in one epoch of all scopes."""
    epochs: Any = SimpleNamespace(of=lambda _: epoch)
    return Gate(tenants, SECRET, clock=time.monotonic, unix_clock=time.time, epochs=epochs)


def body_of(path: str, user: object, **fields: object) -> bytes:
    """Return a body that names a user as the API of ``path`` does; none for None."""
    named = {} if user is None else {"user": user}
    if path == MESSAGES and user is not None:
        named = {"metadata": {"user_id": user}}
    return json.dumps({"model": "m", **named, **fields}).encode()


def salt_of(tenant: Tenant, user: object, path: str = CHAT, epoch: str = "", **more: object) -> str:
    """Return the salt that an engine gets."""
    body = gate_of(epoch=epoch).salted(tenant, body_of(path, user, **more), path)
    salt: str = json.loads(body)["cache_salt"]
    return salt


BY_USER = tenant_of(settings("acme", "user"))
OTHER = tenant_of(settings("other", "user"))
PLAIN = tenant_of(settings("acme", "tenant"))
GROUP = tenant_of(settings("acme", "g"))
TEXTS = st.text(min_size=1, max_size=40)


@given(TEXTS, TEXTS, st.sampled_from([CHAT, MESSAGES, "/v1/responses", "/v1/embeddings"]))
def test_users_of_one_tenant_share_with_themselves_alone(one: str, two: str, path: str) -> None:
    """S-01: equal users have one salt on every path, in whichever of the APIs."""
    first, second = salt_of(BY_USER, one, path), salt_of(BY_USER, two, CHAT)
    assert (first == second) is (one == two)
    assert first not in {salt_of(BY_USER, None, path), salt_of(OTHER, one, path)}
    assert first != salt_of(BY_USER, one, path, epoch="2")


@given(TEXTS, st.sampled_from([CHAT, MESSAGES]))
def test_a_user_divides_no_other_scope(user: str, path: str) -> None:
    """S-01: of tenants that share otherwise it says nothing, and nobody's own scope is reached."""
    for tenant in (PLAIN, GROUP):
        plain = salt_of(tenant, None, path)
        assert salt_of(tenant, user, path) == plain == engine_salt(SECRET, tenant.scope, "")
        assert salt_of(BY_USER, user, path) != plain
    headers = {"x_user": user, "cache_salt": user, "scope": user}
    assert salt_of(BY_USER, user, path, **headers) == salt_of(BY_USER, user, path)


def test_requests_without_a_user_are_the_tenants_own() -> None:
    plain = salt_of(PLAIN, None)
    for body in (b"{}", b'{"user":null}', b'{"user":""}', b'{"metadata":{"user_id":"u"}}'):
        assert json.loads(gate_of().salted(BY_USER, body, CHAT))["cache_salt"] == plain
    for body in (b"{}", b'{"metadata":null}', b'{"metadata":{"user_id":null}}', b'{"user":"u"}'):
        assert json.loads(gate_of().salted(BY_USER, body, MESSAGES))["cache_salt"] == plain


def test_a_user_is_the_same_however_it_is_spelled() -> None:
    spelled = b'{"us\\u0065r":"\\u0075"}'
    assert user_of(CHAT, spelled) == user_of(CHAT, b'{"user":"u"}') == "u"


@pytest.mark.parametrize("user", [5, True, ["u"], {"id": "u"}, "u" * (USER_CHARACTERS + 1)])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_user_that_is_none_is_refused_by_its_field_and_not_repeated(
    path: str, user: object
) -> None:
    with pytest.raises(ClientError) as caught:
        salt_of(BY_USER, user, path)
    assert caught.value.param == ("metadata.user_id" if path == MESSAGES else "user")
    assert "uu" not in str(caught.value)
    assert salt_of(PLAIN, user, path) == salt_of(PLAIN, None, path)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"[" * 5000, b"\xef\xbb\xbf{}"),
        b'{"user":"\xff","metadata":{"user_id":"\xff"}}',
        b'{"user":"\\ud800","metadata":{"user_id":"\\ud800"}}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_no_body_makes_anything_but_a_client_error(path: str, body: bytes) -> None:
    with pytest.raises(ClientError):
        gate_of().salted(BY_USER, body, path)


def test_a_tenant_that_keeps_its_users_apart_is_administered_as_one() -> None:
    assert (BY_USER.scope, BY_USER.is_by_user) == ("tenant:acme", True)
    assert (PLAIN.scope, PLAIN.is_by_user) == ("tenant:acme", False)
    assert tenant_fault([settings("acme", "user")], []) is None
    for name in ("user", "tenant"):
        fault = tenant_fault([], [name])
        assert fault is not None
        assert fault.startswith("groups[0]")
