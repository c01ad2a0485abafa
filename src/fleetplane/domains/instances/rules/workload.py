"""What may stand in a certificate that workloads on an instance show each other. Pure.

Such certificates come from an authority of their own, which no listener of the server trusts. They never
name the server itself, and never hold a URI by which the server's own certificates tell a role. Both are
checked when a document is read, as far as it is text, and again when a certificate is issued.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.identity import LeafProfile

URI_SCHEMES = ("spiffe", "https", "http", "urn")
"""Those that name workloads. Any other is refused, `fleetplane` among them: it names roles of the server."""
SERVER_NAME = "nstance-server"
"""By which agents and operators of every generation know the server, whatever its address."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*\.?")
_NAME_CHARACTERS = 253


def uri_problem(text: str) -> str | None:
    """What is wrong with a URI for a workload's certificate."""
    scheme = _SCHEME.match(text)
    if scheme is None or scheme[1].lower() not in URI_SCHEMES:
        return f"{text[:128]!r} must begin with one of {', '.join(f'{one}:' for one in URI_SCHEMES)}"
    if not text.isascii() or not text.isprintable() or " " in text:
        return f"{text[:128]!r} holds characters that a URI cannot"
    return None


def dns_problem(text: str) -> str | None:
    """What is wrong with a host name for a workload's certificate."""
    if len(text) > _NAME_CHARACTERS or not _HOST_NAME.fullmatch(text):
        return f"{text[:128]!r} is no host name"
    return None


def check(profile: LeafProfile, reserved: Iterable[str]) -> None:
    """Refuse a certificate that names the server, which is known by `reserved`, or a role of it."""
    kept = {plain(name) for name in reserved} | {SERVER_NAME}
    for text in profile.uri:
        if problem := uri_problem(text):
            raise InvalidArgument(f"uri {problem}", field="uri")
    for text in profile.dns:
        if problem := dns_problem(text):
            raise InvalidArgument(f"dns {problem}", field="dns")
    for field, texts in (("cn", (profile.common_name,)), ("dns", profile.dns), ("ip", profile.ip)):
        for text in texts:
            if names_server(text, kept):
                raise InvalidArgument(
                    f"{field} {text[:128]!r} is a name of the server itself, and no workload's",
                    field=field,
                )


def names_server(text: str, reserved: Collection[str]) -> bool:
    """Whether a client that looks for one of `reserved`, which are plain, would take this name for it."""
    name = plain(text)
    if is_loopback(name):
        return False  # it means whichever machine the client is on
    if name in reserved:
        return True
    _, star, parent = name.partition("*.")
    return bool(star) and any(other.partition(".")[2] == parent for other in reserved)


def is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def plain(text: str) -> str:
    """A name or address as verifiers compare it: lower case, without the final dot, IPv4 as IPv4."""
    try:
        address = ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return text.lower().rstrip(".")
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
