"""TLS of commands towards engines and routers: from the environment, as sidecars are given it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from state.tls import ClientTls, TlsFileError, client_context
from warmroute.cli import UsageError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

CA_VARIABLE: Final = "WARMROUTE_TLS_CA"
CERTIFICATE_VARIABLE: Final = "WARMROUTE_TLS_CERTIFICATE"
KEY_VARIABLE: Final = "WARMROUTE_TLS_KEY"
NAME_VARIABLE: Final = "WARMROUTE_TLS_SERVER_NAME"
INSECURE_VARIABLE: Final = "WARMROUTE_TLS_INSECURE"
_FIELDS: Final = {
    "ca": CA_VARIABLE,
    "certificate": CERTIFICATE_VARIABLE,
    "key": KEY_VARIABLE,
    "server_name": NAME_VARIABLE,
}


def told_tls(environment: Mapping[str, str] = os.environ) -> ClientTls:
    """Return what the environment says of TLS; nothing of it is needed."""
    fields = {name: environment.get(variable) or None for name, variable in _FIELDS.items()}
    return ClientTls(**fields, insecure=environment.get(INSECURE_VARIABLE) == "1")


def tls_environment(settings: ClientTls) -> dict[str, str]:
    """Return the environment that says ``settings`` to a child; nothing where they say nothing."""
    if settings == ClientTls():
        return {}
    told = {variable: getattr(settings, name) or "" for name, variable in _FIELDS.items()}
    return {**told, INSECURE_VARIABLE: "1" if settings.insecure else ""}


def told_context() -> ssl.SSLContext | None:
    """Return the context for connections of a command, None for the usual one.

    Raises UsageError naming the variable.
    """
    told = told_tls()
    if told == ClientTls():
        return None
    try:
        return client_context(told)
    except TlsFileError as error:
        name, _, rest = str(error).partition(": ")
        message = f"{_FIELDS.get(name, name)}: {rest}"
        raise UsageError(message) from None
