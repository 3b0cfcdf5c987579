"""How long a certificate is good for: one field of its DER, which the ssl module does not tell."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from typing import Final

_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_END: Final = "-----END CERTIFICATE-----"
_EXPLICIT_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_LONG_FORM: Final = 0x80
_CENTURY_PIVOT: Final = 50


def expiry_unix_s(pem: str) -> float | None:
    """Return when the first certificate of ``pem`` ends, None where that cannot be read."""
    begin = pem.find(_BEGIN)
    end = pem.find(_END, begin)
    if begin < 0 or end < 0:
        return None
    try:
        return _not_after(ssl.PEM_cert_to_DER_cert(pem[begin : end + len(_END)]))
    except (ValueError, IndexError):
        return None


def _not_after(der: bytes) -> float:
    """Return ``tbsCertificate.validity.notAfter`` (RFC 5280, 4.1) in Unix seconds."""
    _, at, _ = _field(der, 0)  # Certificate
    _, at, _ = _field(der, at)  # tbsCertificate
    tag, _, end = _field(der, at)
    before_validity = 4 if tag == _EXPLICIT_VERSION else 3  # version, serial, algorithm, issuer
    for _ in range(before_validity):
        _, _, end = _field(der, at)
        at = end
    _, at, _ = _field(der, at)  # validity
    _, _, at = _field(der, at)  # notBefore
    tag, begin, end = _field(der, at)
    text = der[begin:end].decode("ascii").removesuffix("Z")
    if tag == _UTC_TIME:
        text = ("19" if int(text[:2]) >= _CENTURY_PIVOT else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()


def _field(der: bytes, at: int) -> tuple[int, int, int]:
    """Return tag, begin and end of the content of the field at ``at``."""
    tag, length, begin = der[at], der[at + 1], at + 2
    if length >= _LONG_FORM:
        count = length - _LONG_FORM
        length = int.from_bytes(der[begin : begin + count])
        begin += count
    return tag, begin, begin + length
