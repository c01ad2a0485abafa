"""Names of upstream servers, and where they were found last.

NGINX resolves names when it reads its configuration, and refuses all of it if one name is not
found. A host in service must not hold up the others because of that, nor go out of service: it
stays on the addresses at which it was found when its release was made.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import urlsplit

from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

NAMES_LIMIT: Final = 256
"""Names of one release that are remembered with their addresses."""
ADDRESSES_LIMIT: Final = 16
"""Of one name."""
_UNRESOLVED: Final = re.compile(r'host not found in upstream "(?P<name>[^":/]+)')


def unresolved(words: str) -> str:
    """The name that NGINX says it did not find; empty if it says something else."""
    found = _UNRESOLVED.search(words)
    return found["name"].lower() if found is not None else ""


def names_of(update: pb.ConfigUpdate) -> list[str]:
    """The names that a configuration has NGINX resolve."""
    addresses = [server.address for upstream in update.upstreams for server in upstream.servers]
    urls = [location.proxy_pass for host in update.virtual_hosts for location in host.locations]
    found = {_host(address) for address in addresses} | {_url_host(url) for url in urls}
    return sorted(name for name in found if name and not _is_address(name))[:NAMES_LIMIT]


def resolve(names: Iterable[str]) -> dict[str, list[str]]:
    """Where names are found now, without those that are not. Blocking, as NGINX is when it does the same."""
    made = {}
    for name in names:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError:
            continue
        made[name] = sorted({str(address[0]) for *_, address in found})[:ADDRESSES_LIMIT]
    return made


def by_address(
    update: pb.ConfigUpdate, pinned: Mapping[str, list[str]], down: Mapping[str, frozenset[str]]
) -> pb.ConfigUpdate:
    """The configuration with some names replaced by addresses; servers that are `down` are marked so."""
    if not pinned:
        return update
    made = pb.ConfigUpdate()
    made.CopyFrom(update)
    for upstream in made.upstreams:
        servers = list(upstream.servers)
        del upstream.servers[:]
        for server in servers:
            upstream.servers.extend(_servers(server, pinned, down.get(upstream.id, frozenset())))
    for host in made.virtual_hosts:
        for location in host.locations:
            location.proxy_pass = _plain_url(location.proxy_pass, pinned)
    return made


def _servers(
    server: pb.UpstreamServer, pinned: Mapping[str, list[str]], down: frozenset[str]
) -> Iterable[pb.UpstreamServer]:
    addresses = pinned.get(_host(server.address))
    if addresses is None:
        yield server
        return
    for address in addresses:
        made = pb.UpstreamServer()
        made.CopyFrom(server)
        made.address = f"{_bracketed(address)}:{server.address.rpartition(':')[2]}"
        made.down = server.down or server.address in down
        yield made


def _plain_url(url: str, pinned: Mapping[str, list[str]]) -> str:
    """The URL with an address for its host; unchanged for https, whose certificate names the host."""
    addresses = pinned.get(_url_host(url))
    if not addresses or not url.startswith("http://"):
        return url
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return parts._replace(netloc=f"{_bracketed(addresses[0])}{port}").geturl()


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]").lower()


def _url_host(url: str) -> str:
    """Empty where there is none, or NGINX looks for it with each request."""
    if not url or "$" in url:
        return ""
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
