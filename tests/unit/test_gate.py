"""API keys: whose they are, until when, and what those get who have none."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.app import App
from router.config import ConfigError, decode_config, load_config
from router.error import ForbiddenError, RateLimitedError, UnauthenticatedError, error_body
from router.gate import FAILURES_AT_ONCE, Failures, Gate, load_secret, open_gate
from router.metrics import Metrics
from router.reply import Response, own_response
from router.request import read_headers
from router.state_reader import build_mirror
from router.tenant import KeyDigest, TenantSettings, tenant_of
from state.prefix import salt_scope
from state.secret import engine_salt
from support.tenant import SECRET, digest_of, key_of, tenant_config

if TYPE_CHECKING:
    from router.request import Request

KEYED = frozenset({b"authorization", b"x-api-key"})


class Clocks:
    """Both clocks of a gate, set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.unix_s = 1_000_000.0

    def gate(self, *tenants: TenantSettings, **options: Any) -> Gate:
        return Gate(
            tenants,
            SECRET,
            clock=lambda: self.now_s,
            unix_clock=lambda: self.unix_s,
            **options,
        )


def tenant(name: str, *keys: str | KeyDigest, **fields: Any) -> TenantSettings:
    digests = tuple(digest_of(key) if isinstance(key, str) else key for key in keys)
    return TenantSettings(name=name, key_digests=digests or (digest_of(key_of(name)),), **fields)


def asked(*headers: tuple[str, str], peer: str = "10.0.0.1", target: str = "/") -> Request:
    """Return a request of which a gate looks at the headers and the address."""
    received = tuple((name.encode(), value.encode("latin-1")) for name, value in headers)
    plain: Any = SimpleNamespace(
        headers=read_headers((*received, (b"Host", b"router"))),
        peer=peer,
        target=target,
        keep_alive=True,
    )
    request: Request = plain
    return request


def with_key(key: str, **fields: str) -> Request:
    return asked(("Authorization", f"Bearer {key}"), **fields)


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", f"Bearer {key_of('acme')}")],
        [("authorization", f"bearer   {key_of('acme')} ")],
        [("X-Api-Key", key_of("acme"))],
        [("X-Api-Key", key_of("acme")), ("Authorization", f"Bearer {key_of('acme')}")],
    ],
)
def test_a_key_is_its_tenant_s_in_either_header(headers: list[tuple[str, str]]) -> None:
    gate = Clocks().gate(tenant("acme"), tenant("other"))
    assert gate.admit(asked(*headers)).name == "acme"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "")],
        [("Authorization", "Bearer")],
        [("Authorization", "Bearer ")],
        [("Authorization", "Bearer nobody")],
        [("Authorization", key_of("acme"))],
        [("Authorization", f"Basic {key_of('acme')}")],
        [("Authorization", f"Bearer {digest_of(key_of('acme'))}")],
        [("Authorization", f"Bearer {key_of('acme')[:-1]}")],
        [("Authorization", f"Bearer {key_of('acme')} x")],
        [("Authorization", f"Bearer {key_of('acme')}"), ("Authorization", "Bearer x")],
        [("Authorization", f"Bearer {key_of('acme')}"), ("X-Api-Key", key_of("other"))],
        [("Authorization", "Bearer \xff\x80")],
        [("X-Tenant", "acme")],
        [("Cookie", key_of("acme"))],
    ],
)
def test_whatever_is_wrong_with_a_key_the_answer_is_the_same(
    headers: list[tuple[str, str]],
) -> None:
    """S-09: one 401 for all."""
    gate = Clocks().gate(tenant("acme"), tenant("other"))
    with pytest.raises(UnauthenticatedError) as refused:
        gate.admit(asked(*headers))
    with pytest.raises(UnauthenticatedError) as other:
        gate.admit(with_key("never seen"))
    assert error_body(refused.value) == error_body(other.value)


def test_two_keys_are_good_while_one_takes_the_other_s_place_and_then_the_old_one_ends() -> None:
    """S-03: a key's end is an instant; no restart, no tenant without a key in between."""
    clocks = Clocks()
    end = datetime.fromtimestamp(clocks.unix_s + 60, UTC)
    old = KeyDigest(digest=digest_of("old"), until=end)
    gate = clocks.gate(tenant("acme", old, "new"))
    assert gate.admit(with_key("old")) is gate.admit(with_key("new"))
    clocks.unix_s += 59.9
    assert gate.admit(with_key("old")).name == "acme"
    clocks.unix_s += 0.1
    with pytest.raises(UnauthenticatedError):
        gate.admit(with_key("old"))
    assert gate.admit(with_key("new")).name == "acme"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["X-Tenant", "x-scope", "Cookie", "User-Agent", "OpenAI-Organization", "X-User"]
            ),
            st.sampled_from(["acme", "other", "tenant:acme", "group:g", key_of("other"), "1"]),
        ),
        max_size=6,
    ),
    st.sampled_from(["acme", "other"]),
    st.sampled_from([b"acme", b"other", b"", b"tenant:other"]),
    st.sampled_from(["10.0.0.1", "::1", "unix"]),
)
def test_the_scope_of_a_request_follows_from_its_key_alone(
    headers: list[tuple[str, str]], owner: str, named: bytes, peer: str
) -> None:
    """S-01: no header, no field of the body, no address says anything about it."""
    gate = Clocks().gate(tenant("acme"), tenant("other", share="g"))
    plain = gate.admit(with_key(key_of(owner)))
    request = asked(*headers, ("Authorization", f"Bearer {key_of(owner)}"), peer=peer)
    found = gate.admit(request)
    assert found is plain
    assert found.scope == {"acme": "tenant:acme", "other": "group:g"}[owner]
    body = b'{"user":"%b","cache_salt":"%b","metadata":{"tenant":"%b"}}' % (named, named, named)
    salt = engine_salt(SECRET, found.scope, "").encode()
    assert b'"cache_salt":"%b"' % salt in gate.salted(found, body)


def test_tenants_of_one_group_share_a_salt_and_no_others_do() -> None:
    """S-02: a tenant and a group of one name are two scopes."""
    gate = Clocks().gate(
        tenant("a", share="g"), tenant("b", share="g"), tenant("g"), tenant("c"), tenant("a:b")
    )
    salts = [
        gate.salted(gate.admit(with_key(key_of(name))), b"{}")
        for name in ("a", "b", "g", "c", "a:b")
    ]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 4


def test_another_epoch_is_another_salt_from_the_next_request_on() -> None:
    class Turned:
        epoch = ""

        def of(self, scope: str) -> str:
            return self.epoch if scope == "tenant:acme" else ""

    epochs = Turned()
    gate = Clocks().gate(tenant("acme"), tenant("other"), epochs=epochs)
    acme, other = (gate.admit(with_key(key_of(name))) for name in ("acme", "other"))
    before = gate.salted(acme, b"{}"), gate.salted(other, b"{}")
    assert gate.salt_of("tenant:acme").encode() in before[0]
    epochs.epoch = "2"
    after = gate.salted(acme, b"{}"), gate.salted(other, b"{}")
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert gate.salt_of("tenant:acme").encode() in after[0]
    assert gate.salt_of("tenant:other").encode() in after[1]


PAIRS = [
    (("org_1", "2345"), ("org_12345", "")),
    (("a", "b"), ("ab", "")),
    (("", "ab"), ("a", "b")),
    (("tenant:x", "1"), ("group:x", "1")),
]


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_scopes_and_epochs_that_read_alike_have_other_salts(
    left: tuple[str, str], right: tuple[str, str]
) -> None:
    """S-02: every part is framed by its length."""
    salts = {engine_salt(SECRET, *pair) for pair in (left, right)}
    assert len(salts) == 2
    assert len({salt_scope(salt) for salt in salts}) == 2


def test_an_address_that_fails_often_waits_and_its_good_keys_stay_good() -> None:
    """S-09."""
    clocks = Clocks()
    gate = clocks.gate(tenant("acme"))
    for _ in range(FAILURES_AT_ONCE):
        with pytest.raises(UnauthenticatedError):
            gate.admit(with_key("wrong"))
    limited = with_key("wrong")
    with pytest.raises(RateLimitedError):
        gate.admit(limited)
    assert not limited.keep_alive
    assert gate.admit(with_key(key_of("acme"))).name == "acme"
    with pytest.raises(UnauthenticatedError):
        gate.admit(with_key("wrong", peer="10.0.0.2"))
    clocks.now_s += 1.0
    with pytest.raises(UnauthenticatedError):
        gate.admit(with_key("wrong"))
    with pytest.raises(RateLimitedError):
        gate.admit(with_key("wrong"))


def test_addresses_that_failed_take_a_bounded_amount_of_memory() -> None:
    failures = Failures(lambda: 0.0, at_once=1, addresses=10)
    for number in range(100):
        assert failures.allow(f"10.0.0.{number}")
    assert len(failures) == 10
    assert not failures.allow("10.0.0.99")


def test_all_addresses_of_one_ipv6_network_are_one() -> None:
    failures = Failures(lambda: 0.0, at_once=1)
    assert failures.allow("2001:db8:1:2::1")
    assert not failures.allow("2001:db8:1:2:ffff::2%eth0")
    assert failures.allow("2001:db8:1:3::1")
    assert failures.allow("::ffff:10.0.0.1")
    assert not failures.allow("10.0.0.1")


async def test_paths_behind_the_gate_need_a_key_and_some_are_not_there() -> None:
    """C57."""

    async def answer(_: Request) -> Response:
        return own_response(b"", "text/plain")

    paths = ("/v1/models", "/metrics", "/livez", "/v1/audio/transcriptions", "/v1/chat/completions")
    gate = Clocks().gate(tenant("acme"))
    table = gate.guarded({path: {"GET": answer} for path in paths})
    assert set(paths) - set(table) == {"/metrics"}
    assert table["/livez"]["GET"] is answer
    models, audio = table["/v1/models"]["GET"], table["/v1/audio/transcriptions"]["GET"]
    for handler in (models, audio):
        refused = await handler(asked())
        assert isinstance(refused, Response)
        assert refused.status == 401
        assert b"WWW-Authenticate: Bearer\r\n" in refused.lines
    allowed = await models(with_key(key_of("acme")))
    assert isinstance(allowed, Response)
    assert allowed.status == 200
    with pytest.raises(ForbiddenError):
        await audio(with_key(key_of("acme")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deployment_key_file": None}, "deployment_key_file: expected the path of a key"),
        ({"tenants": [{"name": "a"}]}, "tenants[0]: Object missing required field `key_digests`"),
        ({"tenants": [{"name": "a", "key_digests": []}]}, "tenants[0].key_digests"),
        (
            {"tenants": [{"name": "a", "key_digests": ["sk-a-real-key"]}]},
            "tenants[0].key_digests[0]: expected the SHA-256 of an API key in 64 lower-case hex",
        ),
        (
            {"tenants": [{"name": "a", "key_digests": ["AB" * 32]}]},
            "tenants[0].key_digests[0]: expected the SHA-256",
        ),
        (
            {"tenants": [{"name": "a", "key_digests": [{"digest": "0" * 64, "until": "soon"}]}]},
            "tenants[0].key_digests[0].until",
        ),
        (
            {
                "tenants": [
                    {
                        "name": "a",
                        "key_digests": [{"digest": "0" * 64, "until": "2027-01-01T00:00:00"}],
                    }
                ]
            },
            "tenants[0].key_digests[0].until",
        ),
        (
            {"tenants": [{"name": "a", "key_digests": ["0" * 64], "share": "b"}]},
            "tenants[0].share: expected 'tenant', 'user' or one of groups, got 'b'",
        ),
        (
            {"tenants": [{"name": n, "key_digests": ["0" * 64]} for n in "ab"]},
            "tenants[1].key_digests[0]: expected one that is nobody's, tenants[0] has it",
        ),
        (
            {"tenants": [{"name": "a", "key_digests": [d * 64]} for d in "01"]},
            "tenants[1].name: 'a' occurs twice",
        ),
        (
            {"tenants": [{"name": "a b", "key_digests": ["0" * 64]}]},
            "tenants[0].name: expected a name",
        ),
        ({"tenants": [{"name": "a", "key_digests": ["0" * 64], "key": "x"}]}, "tenants[0]"),
        ({"groups": ["g", "g"]}, "groups[1]: expected another name than 'g'"),
        ({"groups": ["tenant"]}, "groups[0]: expected another name than 'tenant'"),
        ({"upstream": {"api_key": "a b"}}, "upstream.api_key: expected a key of ASCII"),
    ],
)
def test_a_wrong_tenant_is_named_by_its_path(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_config(tenant_config(tmp_path, "acme") | change)
    assert str(caught.value).startswith(message)


def test_a_router_with_tenants_does_not_open_without_a_deployment_key(tmp_path: Path) -> None:
    config = decode_config(tenant_config(tmp_path, "acme"))
    assert load_secret(config) == SECRET
    with pytest.raises(ConfigError, match="deployment_key_file"):
        open_gate(config, None, Metrics().registry)
    (tmp_path / "deployment.key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"deployment_key_file: .*chmod 600"):
        load_secret(config)


def test_the_key_of_the_engines_is_in_no_description_of_the_configuration() -> None:
    config = decode_config({"upstream": {"api_key": "secret-of-engines"}})
    assert config.upstream.api_key == "secret-of-engines"
    assert "secret-of-engines" not in repr(config)


async def test_tenants_of_one_group_take_turns_in_the_queue_as_two(tmp_path: Path) -> None:
    shared = {"share": "g"}
    raw = tenant_config(tmp_path, left=shared, right=shared) | {"hold": {"enabled": True}}
    app = App(decode_config(raw), {}, build_mirror("redis://127.0.0.1:1"), None, SECRET)
    assert app.hold is not None
    routed: list[Any] = [
        SimpleNamespace(tenant=name, prompt=SimpleNamespace(salt="shared"))
        for name in ("left", "right", None)
    ]
    assert len({app.hold._tenant_of(one) for one in routed}) == 3
    app.prompts.close()
    await app.tokens.close()
    await app.pool.close()


def test_the_example_s_digests_are_made_as_it_says() -> None:
    config = load_config(Path(__file__).parents[2] / "examples" / "tenants.yaml")
    gate = Clocks().gate(*config.tenants)  # in 1970, when no key has ended
    for name in ("acme", "initech", "physics", "biology"):
        assert gate.admit(with_key(f"sk-{name}-example")).name == name
    assert gate.admit(with_key("sk-initech-old-example")).name == "initech"
    scopes = {tenant_of(one).scope for one in config.tenants}
    assert scopes == {"tenant:acme", "tenant:initech", "group:research"}
