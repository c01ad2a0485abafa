"""Whom to believe about a server: the system's authorities, one that was pinned, or one that is seen first.

Trust on first use shows the fingerprint of the authority that vouches for the server. Once a person has said
yes, that authority alone vouches for this server: a certificate of any other is refused.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

from fleetplane.kernel.errors import InvalidArgument, PermissionDenied, Unavailable

HTTPS_PORT = 443


def trusting(ca_pem: str) -> ssl.SSLContext:
    """A context that believes these authorities and no other; the system's when there are none."""
    if not ca_pem:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # An authority that another one signed, as after a succession, is an anchor of its own.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=ca_pem)
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgument(f"the given authority holds no certificates: {error}", field="ca") from error
    return context


def fingerprint(der: bytes) -> str:
    """SHA-256 of a certificate, as people compare it."""
    digest = hashlib.sha256(der).hexdigest().upper()
    return "SHA256:" + ":".join(digest[place : place + 2] for place in range(0, len(digest), 2))


def same_fingerprint(one: str, other: str) -> bool:
    """Whether two spellings of a fingerprint are the same."""
    return _plain(one) == _plain(other)


def _plain(text: str) -> str:
    return text.lower().removeprefix("sha256:").replace(":", "").strip()


def fingerprints_of(ca_pem: str) -> list[str]:
    """The fingerprints of all certificates in a PEM text."""
    end = "-----END CERTIFICATE-----"
    return [
        fingerprint(ssl.PEM_cert_to_DER_cert(part[part.index("-----BEGIN") :] + end))
        for part in ca_pem.split(end)
        if "-----BEGIN CERTIFICATE" in part
    ]


def is_known(server: str, *, seconds: float) -> bool:
    """Whether the system's authorities vouch for the server."""
    try:
        with _connected(server, ssl.create_default_context(), seconds):
            return True
    except ssl.SSLCertVerificationError:
        return False


def presented(server: str, *, seconds: float) -> str:
    """The authority that the server shows with its certificate, in PEM; nothing of it is believed yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with _connected(server, context, seconds) as connection:
        # Public from Python 3.13 on; 3.10 to 3.12 have it one level deeper.
        opened: Any = connection
        source = opened if hasattr(opened, "get_unverified_chain") else opened._sslobj
        chain = [_der(one) for one in source.get_unverified_chain() or ()]
    if not chain:
        raise Unavailable(f"{server} shows no certificate")
    return ssl.DER_cert_to_PEM_cert(chain[-1])


def _der(certificate: Any) -> bytes:
    if isinstance(certificate, bytes):
        return certificate
    import _ssl

    der: bytes = certificate.public_bytes(_ssl.ENCODING_DER)
    return der


def check(server: str, ca_pem: str, *, seconds: float) -> None:
    """Connect once, believing that authority alone; raises when it does not vouch for the server."""
    try:
        with _connected(server, trusting(ca_pem), seconds):
            pass
    except ssl.SSLCertVerificationError as error:
        raise refusal(server, error) from error


def refusal(server: str, error: ssl.SSLCertVerificationError) -> PermissionDenied:
    """What a failed verification means to a person."""
    return PermissionDenied(
        f"{server} is not the server that this context trusts: {error.verify_message or error}",
        hint="nothing was sent; if its authority was replaced, compare the fingerprint with the server's "
        "owner and log in again",
    )


def refusal_in(error: BaseException, server: str) -> PermissionDenied | None:
    """The refusal that is behind an error of a library, if a failed verification is."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return refusal(server, seen)
        seen = seen.__cause__ or seen.__context__
    return None


def _connected(server: str, context: ssl.SSLContext, seconds: float) -> ssl.SSLSocket:
    parts = urlsplit(server)
    host, port = parts.hostname or "", parts.port or HTTPS_PORT
    try:
        plain = socket.create_connection((host, port), timeout=seconds)
    except OSError as error:
        raise Unavailable(
            f"{server} cannot be reached: {error}", hint="is `fleetplane server` running there?"
        ) from error
    try:
        return context.wrap_socket(plain, server_hostname=host)
    except ssl.SSLCertVerificationError:
        plain.close()
        raise
    except (OSError, ValueError) as error:
        plain.close()
        raise Unavailable(f"{server} does not speak TLS: {error}") from error
