"""User data that lies elsewhere: behind an https address, or in the object storage.

An address in a document makes this server ask for it, from inside the network that it guards. So: https
only, no redirects, no credentials, only addresses of the public internet unless the server's owner has
named the host (`instances.userdata_hosts`), never a link-local one, which is where clouds keep
credentials. The address that was checked is the one that is connected to. What comes back is bounded in
size and time, and may be pinned by its hash: `https://host/boot.sh#sha256=...`.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import ipaddress
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import structlog

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from fleetplane.kernel.objects import Objects

log = structlog.get_logger(__name__)

STORAGE = "storage:"
LIMIT_BYTES = 256 * 1024
"""Of one text; EC2 takes 16 KiB of it once it is unpacked."""
KEPT_LIMIT = 32
"""Texts kept: eight megabytes at most."""
FRESH_SECONDS = 300.0
"""How long an answer is used without asking again; one that is pinned by its hash, for ever."""
STALE_SECONDS = 3600.0
"""How long it is still used when asking again fails."""
CONNECT_SECONDS = 5.0
TOTAL_SECONDS = 20.0
PLACES_LIMIT = 3
"""Addresses of one host that are tried."""
CHUNK_BYTES = 16 * 1024
LOCKS = 8
"""One guards the addresses that fall on it: a group that grows asks once, not once per instance."""

Fetch = Callable[[SplitResult, Collection[str]], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Download:
    body: bytes
    at: float


class Downloads:
    def __init__(
        self,
        objects: Objects,
        clock: Clock,
        *,
        private_hosts: Collection[str] = (),
        fetch: Fetch | None = None,
    ) -> None:
        self._objects = objects
        self._clock = clock
        self._private_hosts = frozenset(private_hosts)
        self._fetch = fetch or fetch_https
        self._kept: OrderedDict[str, _Download] = OrderedDict()
        self._locks = tuple(asyncio.Lock() for _ in range(LOCKS))

    def __repr__(self) -> str:
        return f"<Downloads kept={len(self._kept)}>"

    async def get(self, url: str) -> bytes:
        if url.startswith(STORAGE):
            return await self._stored(url.removeprefix(STORAGE))
        parts = checked(url)
        wanted = pinned(parts)
        address = parts._replace(fragment="").geturl()
        async with self._locks[hash(address) % LOCKS]:
            kept = self._kept.get(address)
            if kept is not None and self._is_fresh(kept, wanted):
                return kept.body
            try:
                body = await asyncio.to_thread(self._fetch, parts, self._private_hosts)
            except FleetplaneError as error:
                if kept is None or wanted or self._clock.monotonic() >= kept.at + STALE_SECONDS:
                    raise
                log.warning("instances.userdata_stale", url=address, error=error.message)
                return kept.body
            _compare(address, body, wanted)
            self._keep(address, body)
            return body

    def _is_fresh(self, kept: _Download, wanted: str) -> bool:
        if wanted:
            return hashlib.sha256(kept.body).hexdigest() == wanted
        return self._clock.monotonic() < kept.at + FRESH_SECONDS

    def _keep(self, address: str, body: bytes) -> None:
        self._kept[address] = _Download(body=body, at=self._clock.monotonic())
        self._kept.move_to_end(address)
        while len(self._kept) > KEPT_LIMIT:
            self._kept.popitem(last=False)

    async def _stored(self, path: str) -> bytes:
        found = await self._objects.get(path)
        if found is None:
            raise NotFound(f"user data: there is no object {path!r} in the storage")
        return _bounded(found.body, f"{STORAGE}{path}")


# Checking an address.


def checked(url: str) -> SplitResult:
    """The address in parts, if it may be asked at all."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidArgument(f"user data: {url[:200]!r} is no address: {error}") from None
    if parts.scheme != "https" or not parts.hostname or port == 0:
        raise InvalidArgument(f"user data comes from https:// or {STORAGE}, not from {url[:200]!r}")
    if parts.username is not None or parts.password is not None:
        raise InvalidArgument("user data: an address must not carry a name or password")
    return parts


def pinned(parts: SplitResult) -> str:
    """The hash that the text must have, if the address names one."""
    if not parts.fragment:
        return ""
    kind, _, value = parts.fragment.partition("=")
    if kind != "sha256" or len(value) != 64 or not set(value.lower()) <= set("0123456789abcdef"):
        raise InvalidArgument(
            f"user data: {parts.fragment[:80]!r} pins nothing; write #sha256= and 64 hexadecimal digits"
        )
    return value.lower()


GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
"""All that is handed out as global unicast."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""The IPv4 internet as networks without IPv4 see it; the last four bytes are the address."""
NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # protocol assignments; a cloud's metadata service among them
            "192.31.196.0/24",
            "192.52.193.0/24",
            "192.88.99.0/24",
            "192.175.48.0/24",  # relays, AS112
            "168.63.129.16/32",  # a cloud's own services, on its machines
            "2001::/23",  # protocol assignments, Teredo among them
            "2001:db8::/32",
            "3fff::/20",  # documentation
            "2002::/16",  # 6to4: an IPv4 address inside, through a relay
        ),
    )
)
"""Of what counts as global: what nobody's servers have."""
METADATA = tuple(map(ipaddress.ip_network, ("fd00:ec2::/32", "100.100.100.200/32", "168.63.129.16/32")))
"""Where clouds keep credentials, apart from link-local addresses."""

IP = ipaddress.IPv4Address | ipaddress.IPv6Address


def reachable(address: str, *, private: bool) -> bool:
    """Whether this server may connect to an IP address for somebody else's sake.

    Only to global unicast addresses, and `private` ones of hosts that the server's owner has named; never to
    where clouds keep credentials. An IPv4 address inside an IPv6 one is what counts.
    """
    ip = _innermost(ipaddress.ip_address(address.partition("%")[0]))
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified or any(ip in kept for kept in METADATA):
        return False
    return private or _is_public(ip)


def _innermost(ip: IP) -> IP:
    if not isinstance(ip, ipaddress.IPv6Address):
        return ip
    if ip in NAT64:
        return ipaddress.IPv4Address(ip.packed[-4:])
    return ip.ipv4_mapped or ip


def _is_public(ip: IP) -> bool:
    if any(ip in kept for kept in NOT_PUBLIC):
        return False
    return ip.is_global and not ip.is_reserved and (ip.version == 4 or ip in GLOBAL_IPV6)


def _compare(address: str, body: bytes, wanted: str) -> None:
    found = hashlib.sha256(body).hexdigest()
    if wanted and found != wanted:
        raise FailedPrecondition(f"user data: {address} has the hash {found}, the document says {wanted}")


def _bounded(body: bytes, what: str) -> bytes:
    if len(body) > LIMIT_BYTES:
        raise FailedPrecondition(f"user data: {what} is longer than {LIMIT_BYTES} bytes")
    return body


# Asking.


class _Pinned(http.client.HTTPSConnection):
    """Connects to an address that was checked, whatever the name means a moment later."""

    def __init__(self, parts: SplitResult, places: Sequence[str], context: ssl.SSLContext) -> None:
        super().__init__(parts.hostname or "", parts.port or 443, timeout=CONNECT_SECONDS, context=context)
        self._places = places
        self._tls = context

    def connect(self) -> None:
        plain = self._connected()
        try:
            self.sock = self._tls.wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise

    def _connected(self) -> socket.socket:
        *others, last = self._places
        for place in others:
            with suppress(OSError):
                return socket.create_connection((place, self.port), timeout=CONNECT_SECONDS)
        return socket.create_connection((last, self.port), timeout=CONNECT_SECONDS)


def fetch_https(
    parts: SplitResult, private_hosts: Collection[str], *, context: ssl.SSLContext | None = None
) -> bytes:
    """Blocks, for `TOTAL_SECONDS` at most once the name is resolved."""
    address = parts._replace(fragment="").geturl()
    try:
        places = _resolved(parts, private_hosts)
        return _asked(parts, places, context or ssl.create_default_context())
    except (OSError, http.client.HTTPException) as error:
        text = str(error) or type(error).__name__
        raise Unavailable(f"user data: {address} could not be had: {text}") from error


def _resolved(parts: SplitResult, private_hosts: Collection[str]) -> Sequence[str]:
    host = parts.hostname or ""
    found = [
        str(entry[4][0]) for entry in socket.getaddrinfo(host, parts.port or 443, type=socket.SOCK_STREAM)
    ]
    for address in found:
        if not reachable(address, private=host in private_hosts):
            raise FailedPrecondition(
                f"user data: {host} is at {address}, which is not of the public internet",
                hint="name the host in the setting instances.userdata_hosts if that is meant",
            )
    return found[:PLACES_LIMIT]


def _asked(parts: SplitResult, places: Sequence[str], context: ssl.SSLContext) -> bytes:
    deadline = time.monotonic() + TOTAL_SECONDS
    address = parts._replace(fragment="").geturl()
    path = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
    connection = _Pinned(parts, places, context)
    try:
        connection.request("GET", path, headers={"Accept": "*/*", "User-Agent": "fleetplane"})
        answer = connection.getresponse()
        if answer.status != 200:
            moved = answer.getheader("Location") if 300 <= answer.status < 400 else None
            advice = f"; redirects are not followed, name {moved[:200]!r}" if moved else ""
            raise Unavailable(f"user data: {address} answered {answer.status} {answer.reason}{advice}")
        body = b""
        while chunk := answer.read1(CHUNK_BYTES):
            body = _bounded(body + chunk, address)
            if time.monotonic() >= deadline:
                raise Unavailable(f"user data: {address} took longer than {TOTAL_SECONDS:g} s")
        return body
    finally:
        connection.close()
