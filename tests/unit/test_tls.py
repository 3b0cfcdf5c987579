"""TLS files: which of them is wrong, who may read a key, how long a certificate is good for."""

from __future__ import annotations

import datetime as dt
import logging
import shutil
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509 import load_pem_x509_certificate

from router.certificate import expiry_unix_s
from router.config import ConfigError
from router.tls import ListenerContext, TlsWatch, watch_tls
from router.tls_setting import ListenerTls
from sidecar.scrape import EngineClient
from state.tls import (
    ClientContext,
    ClientTls,
    TlsFileError,
    client_context,
    load_pair,
    said,
    tls_fault,
)
from support.tls import Authority
from warmroute.cli import UsageError, build_parser
from warmroute.serve import merge
from warmroute.tls_option import CA_VARIABLE, tls_environment, told_context, told_tls

if TYPE_CHECKING:
    from support.tls import Pair


@pytest.fixture(name="authority")
def own_authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture(name="pair")
def issued_pair(authority: Authority) -> Pair:
    return authority.issue()


@pytest.mark.parametrize("days", [1, 365, 365 * 30, 365 * 80], ids=str)
def test_the_end_of_a_certificate_is_read_as_others_read_it(
    authority: Authority, days: int
) -> None:
    """From 2050 on the year has four digits (RFC 5280, 4.1.2.5)."""
    pem = Path(authority.issue(ends_in=dt.timedelta(days=days)).certificate).read_text()
    theirs = load_pem_x509_certificate(pem.encode()).not_valid_after_utc
    assert expiry_unix_s(pem) == theirs.timestamp()
    assert expiry_unix_s("a comment\n" + pem + Path(authority.ca).read_text()) == theirs.timestamp()


def test_what_is_no_certificate_has_no_end(pair: Pair) -> None:
    pem = Path(pair.certificate).read_text()
    begin = pem.partition("\n")[0]
    assert expiry_unix_s("") is None
    assert expiry_unix_s(begin) is None
    for cut in range(0, 120, 7):
        der = ssl.PEM_cert_to_DER_cert(pem[: pem.index("-----END") + 25])[:cut]
        assert expiry_unix_s(ssl.DER_cert_to_PEM_cert(der)) is None
    for body in ("ä", "====", "MIIC"):
        assert expiry_unix_s(f"{begin}\n{body}\n-----END CERTIFICATE-----") is None


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"certificate": "nowhere"}, "listen_tls.certificate: nowhere: No such file or directory"),
        ({"key": "nowhere"}, "listen_tls.key: nowhere: No such file or directory"),
        ({"client_certificates": "required"}, "listen_tls.client_ca: expected the path"),
        (
            {"client_certificates": "optional", "client_ca": "nowhere"},
            "listen_tls.client_ca: nowhere: No such file or directory",
        ),
        ({"client_certificates": "optional", "client_ca": "{key}"}, "no certificates in PEM"),
        ({"key": "{certificate}"}, "listen_tls.certificate: "),
    ],
)
def test_a_file_of_a_listener_that_cannot_be_used_is_named(
    pair: Pair, broken: dict[str, Any], named: str
) -> None:
    fields = {"certificate": pair.certificate, "key": pair.key}
    texts = {name: text.format(**fields) for name, text in broken.items()}
    with pytest.raises(ConfigError) as caught:
        ListenerContext("listen_tls", ListenerTls(**(fields | texts)))
    assert named in str(caught.value)


def test_a_key_with_a_password_is_refused_without_a_question(pair: Pair) -> None:
    """The TLS library would ask on the terminal, and wait."""
    key = load_pem_private_key(Path(pair.key).read_bytes(), None)
    secret = BestAvailableEncryption(b"word")
    Path(pair.key).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret))
    with pytest.raises(ConfigError, match=r"listen_tls\.key: expected one without a password"):
        ListenerContext("listen_tls", ListenerTls(certificate=pair.certificate, key=pair.key))


@pytest.mark.parametrize(("mode", "is_told"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_key_that_others_may_read_is_warned_of(
    pair: Pair,
    caplog: pytest.LogCaptureFixture,
    mode: int,
    is_told: bool,  # noqa: FBT001 - of the table above
) -> None:
    Path(pair.key).chmod(mode)
    ListenerContext("admin_tls", ListenerTls(certificate=pair.certificate, key=pair.key))
    assert ["admin_tls.key" in each.getMessage() for each in caplog.records] == [True] * is_told


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (ClientTls(ca="nowhere"), "ca: nowhere: No such file or directory"),
        (ClientTls(certificate="c"), "certificate: expected together with key"),
        (ClientTls(certificate="nowhere", key="k"), "certificate: nowhere: No such file"),
    ],
)
def test_a_file_towards_replicas_that_cannot_be_used_is_named(
    settings: ClientTls, named: str
) -> None:
    with pytest.raises(TlsFileError, match=named):
        client_context(settings)
    with pytest.raises(ConfigError, match=f"upstream.tls.{named}"):
        watch_tls({}, ClientContext(settings))
    with pytest.raises(ValueError, match=named):
        EngineClient("https://a:1", tls=settings)


def test_replicas_are_verified_unless_told_otherwise(authority: Authority) -> None:
    context = client_context(ClientTls(ca=authority.ca))
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert not client_context(ClientTls(insecure=True)).check_hostname


def test_insecure_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    watch = watch_tls({}, ClientContext(ClientTls(insecure=True)))
    assert "insecure" in caplog.text
    assert not watch.has_files


async def test_only_what_changed_is_read_again(
    authority: Authority, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    listener = ListenerContext("listen_tls", authority.listener(pair))
    upstream = ClientContext(ClientTls(ca=authority.ca))
    watch = TlsWatch([listener], upstream)
    before, ours = listener.current, upstream.current()
    await watch.look()
    assert (listener.current, upstream.current()) == (before, ours)
    pair.replace(authority.issue())
    await watch.look()
    assert listener.current is not before
    assert upstream.current() is ours
    assert [each.getMessage() for each in caplog.records] == ["listen_tls: read again"]
    shutil.copy(pair.key, authority.ca)
    await watch.look()
    assert upstream.current() is ours
    assert caplog.records[-1].getMessage().startswith("upstream.tls.ca: ")


async def test_the_expiry_that_is_told_is_that_of_the_certificate_in_use(
    authority: Authority, pair: Pair
) -> None:
    """Files that were changed and not taken say nothing."""
    shown = ClientTls(certificate=pair.certificate, key=pair.key)
    watch = watch_tls({}, ClientContext(shown))

    def told() -> float:
        wanted = "warmroute_tls_client_certificate_expiry_seconds"
        return next(m.samples[0].value for m in watch.collect() if m.name == wanted)

    in_use = told()
    fresh = authority.issue(ends_in=dt.timedelta(days=3))
    shutil.copy(fresh.certificate, pair.certificate)
    await watch.look()  # with the other key
    assert told() == in_use
    shutil.copy(fresh.key, pair.key)
    await watch.look()
    assert told() < in_use


def test_the_environment_of_a_sidecar_says_what_the_router_was_told() -> None:
    for settings in (
        ClientTls(),
        ClientTls(ca="a", certificate="b", key="c", server_name="d", insecure=True),
    ):
        assert told_tls(tls_environment(settings)) == settings


def test_a_router_takes_from_the_environment_what_its_file_leaves_open(tmp_path: Path) -> None:
    told = ClientTls(ca="from-environment")
    path = tmp_path / "router.yaml"
    for text, expected in (("{}", told), ("upstream: {tls: {ca: own}}", ClientTls(ca="own"))):
        path.write_text(text)
        options = build_parser("serve").parse_args(["serve", "--config", str(path)])
        assert merge(options, None, None, told).upstream.tls == expected


def test_a_command_names_the_variable_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told_context() is None
    monkeypatch.setenv(CA_VARIABLE, "nowhere")
    with pytest.raises(UsageError, match=f"{CA_VARIABLE}: nowhere: No such file"):
        told_context()


def test_what_went_wrong_is_said_without_numbers_and_paths_of_the_library() -> None:
    assert said(ssl.SSLError(1, "[SSL: X] x (_ssl.c:1)")) == (
        "TLS failed: the handshake was broken off"
    )
    assert said(ConnectionResetError(104, "reset")) == "Connection reset by peer"
    assert said(TimeoutError()) == "TimeoutError"
    assert tls_fault(OSError(1, "not permitted")) is None


def test_a_pair_that_is_no_pem_is_no_broken_handshake(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    with pytest.raises(TlsFileError, match="expected a certificate and its key in PEM"):
        load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), str(junk), str(junk))
