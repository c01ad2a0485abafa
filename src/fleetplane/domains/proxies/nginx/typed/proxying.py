"""How requests are passed on: protocols, TLS to the other side, retries, canaries, groups. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import msgspec

from fleetplane.domains.proxies.nginx.blocks import Directive, Node, Unrenderable, block, directive
from fleetplane.domains.proxies.nginx.typed.access import key_variable
from fleetplane.domains.proxies.nginx.typed.naming import HostParts
from fleetplane.domains.proxies.typed_options import (
    Canaries,
    Resolver,
    Retries,
    UpstreamOptions,
    UpstreamTls,
    upstream_options,
)
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

RETRIED: Final = ("error", "timeout", "http_502", "http_503", "http_504")
"""NGINX itself counts no answer as a failure, however bad. Only idempotent requests are repeated."""
_COOKIE: Final = '"~^[0-9a-f]{32}$"'
"""What a sticky cookie that we made looks like."""


@dataclass(frozen=True, slots=True)
class PassTarget:
    """Where a location passes requests on to, and how."""

    url: str
    protocol: str = "http"
    upstream: pb.Upstream | None = None
    options: UpstreamOptions = field(default_factory=UpstreamOptions)
    needed: tuple[Directive, ...] = ()
    """What must stand before it."""

    @property
    def prefix(self) -> str:
        """Of NGINX's directives."""
        return "grpc" if self.protocol.startswith("grpc") else "proxy"


def options_of(upstream: pb.Upstream) -> UpstreamOptions:
    try:
        return upstream_options(upstream.options)
    except msgspec.MsgspecError as error:
        raise Unrenderable(f"this agent does not know an option of the upstream: {error}") from error


def authority_file(upstream: str) -> str:
    return f"certs/upstream-{upstream}.pem"


def secured(target: PassTarget, ca_bundle: str) -> Iterator[Directive]:
    """TLS to the other side. `ca_bundle` lists the authorities that this machine trusts."""
    if not target.protocol.endswith("s") or target.upstream is None:
        return
    prefix, tls = target.prefix, target.options.tls or UpstreamTls()
    yield directive(f"{prefix}_ssl_server_name", "on")
    yield directive(f"{prefix}_ssl_name", tls.name or _host(target.upstream.servers[0].address))
    yield directive(f"{prefix}_ssl_protocols", "TLSv1.2", "TLSv1.3")
    if tls.verify:
        trusted = authority_file(target.upstream.id) if target.options.authority_pem else ca_bundle
        if not trusted:
            raise Unrenderable("tls.verify: this node lists no authorities; name one in tls.authority_id")
        yield directive(f"{prefix}_ssl_verify", "on")
        yield directive(f"{prefix}_ssl_verify_depth", "5")
        yield directive(f"{prefix}_ssl_trusted_certificate", trusted)
    if tls.client_certificate_id:
        yield directive(f"{prefix}_ssl_certificate", f"certs/{tls.client_certificate_id}.pem")
        yield directive(f"{prefix}_ssl_certificate_key", f"certs/{tls.client_certificate_id}.key")


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def retried(target: PassTarget) -> Iterator[Directive]:
    prefix, retries = target.prefix, target.options.retries or Retries(on=RETRIED)
    on = [*retries.on, *(["non_idempotent"] if retries.non_idempotent else [])]
    yield directive(f"{prefix}_next_upstream", *(on or ["off"]))
    if retries.tries is not msgspec.UNSET:
        yield directive(f"{prefix}_next_upstream_tries", str(retries.tries))
    if retries.timeout is not msgspec.UNSET:
        yield directive(f"{prefix}_next_upstream_timeout", f"{retries.timeout}s")


def canaries(split: Canaries, main: str, names: Mapping[str, str], parts: HostParts) -> str:
    """A variable that names the group for a request; `names` are those of the groups, by id."""
    key = "$request_id" if split.key == "request" else key_variable(split.key)
    shares = [f"{one.upstream_id}={one.percent}" for one in split.to]
    variable = parts.variable("split", key, main, *shares)
    body = [directive(f"{one.percent}%", names[one.upstream_id]) for one in split.to]
    body.append(directive("*", main))
    parts.before.setdefault(
        variable, [block("split_clients", f"${{{key[1:]}}}canary", f"${variable}", body=body)]
    )
    return f"${variable}"


def resolved(url: str, resolver: Resolver, parts: HostParts) -> PassTarget:
    """The URL with a host that is looked up again and again."""
    found = urlsplit(url)
    if found.path or found.query:
        raise Unrenderable("resolver: proxy_pass must have no path")
    variable = f"${parts.variable('to', url)}"
    options = [f"valid={resolver.valid}s"] if resolver.valid is not msgspec.UNSET else []
    ipv6 = f"ipv6={'on' if resolver.ipv6 else 'off'}"
    needed = (
        directive("resolver", *resolver.addresses, *options, ipv6),
        directive("set", variable, found.netloc),
    )
    return PassTarget(f"{found.scheme}://{variable}", needed=needed)


# Groups.


def balancing(upstream: pb.Upstream, options: UpstreamOptions) -> Iterator[Directive]:
    given = options.balancing
    if not given:
        return
    if given.method == "random":
        yield directive("random", "two", "least_conn")
        return
    key = f"${sticky_variable(upstream.id)}" if given.method == "sticky_cookie" else key_variable(given.key)
    yield directive("hash", key, "consistent")


def sticky_variable(upstream: str) -> str:
    return HostParts(host=upstream).variable("sticky")


def sticky(upstream: pb.Upstream, options: UpstreamOptions) -> Sequence[Node]:
    """Who has no cookie gets one; the same cookie leads to the same server while that is there."""
    given = options.balancing
    if not given or given.method != "sticky_cookie":
        return ()
    name, cookie = sticky_variable(upstream.id), f"$cookie_{given.cookie}"
    new = f"{given.cookie}=$request_id; Path=/; HttpOnly; SameSite=Lax"
    return (
        block(
            "map", cookie, f"${name}", body=[directive("default", "$request_id"), directive(_COOKIE, cookie)]
        ),
        block("map", cookie, f"${name}_set", body=[directive("default", new), directive(_COOKIE, "")]),
    )


def sticky_header(target: PassTarget) -> Iterator[Directive]:
    given = target.options.balancing
    if target.upstream is not None and given and given.method == "sticky_cookie":
        yield directive("add_header", "Set-Cookie", f"${sticky_variable(target.upstream.id)}_set", "always")
