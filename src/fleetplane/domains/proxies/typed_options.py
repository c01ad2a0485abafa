"""Options of virtual hosts, locations, upstreams and streams, in groups. Shape only, as `values`.

A group that callers did not name is `UNSET`: it is neither stored nor answered nor sent, so what was there
before these options existed keeps its bytes. An agent reads the same structs, with `forbid_unknown_fields`:
it refuses a field that it does not know, since an option may be what keeps strangers out.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A misspelt field must not pass for one that was set."""


YEAR_SECONDS = 31_536_000


# TLS and listening.


class Hsts(Value, frozen=True):
    """`Strict-Transport-Security` on every answer."""

    max_age: int = YEAR_SECONDS
    include_subdomains: bool = False
    preload: bool = False


class ClientCertificates(Value, frozen=True):
    """Who comes in shows a certificate of this authority."""

    authority_id: str
    """A certificate of the workspace; its private key is not sent."""
    mode: Literal["required", "optional"] = "required"
    depth: int = 2
    """Certificates between the client's and the authority's, at most."""


class HostTls(Value, frozen=True):
    force_https: bool = False
    """Answer the same names on port 80 with a redirect."""
    hsts: Hsts | UnsetType = UNSET
    profile: Literal["modern", "intermediate"] | UnsetType = UNSET
    client_certificates: ClientCertificates | UnsetType = UNSET
    ocsp_stapling: bool = False


class Listening(Value, frozen=True):
    ipv6: bool = True
    """False: on the node's IPv4 addresses only."""
    proxy_protocol_from: tuple[str, ...] | UnsetType = UNSET
    """Every connection begins with a PROXY protocol header, believed from these networks."""


# Access.


class AccessRule(Value, frozen=True):
    action: Literal["allow", "deny"]
    network: str
    """An address, a network, or `all`."""


class BasicUser(Value, frozen=True):
    """Somebody with a password. The server keeps its hash only, and shows neither."""

    name: str
    password: str | UnsetType = UNSET
    """Taken, never kept."""
    password_hash: str | UnsetType = UNSET
    """In the form of crypt(3), `$6$...`."""


class RateLimit(Value, frozen=True):
    rate: int
    per: Literal["second", "minute"] = "second"
    burst: int = 0
    """Requests beyond the rate that are let through."""
    delay: bool = False
    """Let the burst through at the rate, not at once."""
    key: str = "address"
    """`address`, `host`, `uri`, `header:NAME` or `cookie:NAME`."""
    status: int = 429


class ConnectionLimit(Value, frozen=True):
    connections: int
    key: str = "address"
    status: int = 429


class ForwardAuth(Value, frozen=True):
    """Another service decides about every request: 2xx lets it in."""

    url: str
    """Of the service; a preset adds its path where there is none."""
    preset: Literal["authelia", "authentik", "oauth2-proxy", "custom"] = "custom"
    sign_in_url: str | UnsetType = UNSET
    """Where a browser is sent on 401, with the page it wanted in `rd`."""
    response_headers: tuple[str, ...] | UnsetType = UNSET
    """Of the service's answer, passed on to the other side; a preset has its own."""


class Access(Value, frozen=True):
    """Who may come in, and how often. A location's own takes the place of its host's."""

    list_ids: tuple[str, ...] | UnsetType = UNSET
    """Access lists of the workspace, asked in this order and before `rules`."""
    rules: tuple[AccessRule, ...] | UnsetType = UNSET
    """The first that matches decides; who matches none is refused if any of them allows."""
    banned: tuple[str, ...] | UnsetType = UNSET
    """Networks that are refused whatever the rules say."""
    users: tuple[BasicUser, ...] | UnsetType = UNSET
    realm: str | UnsetType = UNSET
    satisfy: Literal["all", "any"] | UnsetType = UNSET
    """Whether both address and password must be right, or one of them is enough."""
    forward_auth: ForwardAuth | UnsetType = UNSET
    rate_limits: tuple[RateLimit, ...] | UnsetType = UNSET
    connection_limits: tuple[ConnectionLimit, ...] | UnsetType = UNSET


# Content.


class Redirect(Value, frozen=True):
    path: str
    to: str
    """A URL or a path; `$1` to `$9` are what a regular expression caught."""
    match: Literal["exact", "prefix", "regex"] = "exact"
    """`prefix` appends the rest of the path, and all but `regex` the query."""
    status: int = 308


class HeaderRule(Value, frozen=True):
    action: Literal["set", "add", "remove"]
    name: str
    value: str | UnsetType = UNSET
    direction: Literal["request", "response"] = "response"


class Cors(Value, frozen=True):
    origins: tuple[str, ...]
    """Such as `https://app.example.com`; `*` for all, without credentials."""
    methods: tuple[str, ...] = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
    headers: tuple[str, ...] = ("Authorization", "Content-Type")
    expose: tuple[str, ...] | UnsetType = UNSET
    credentials: bool = False
    max_age: int = 600


class ErrorPage(Value, frozen=True):
    statuses: tuple[int, ...]
    body: str
    content_type: Literal["text/html", "text/plain", "application/json"] = "text/html"


class Maintenance(Value, frozen=True):
    enabled: bool = True
    allowed: tuple[str, ...] | UnsetType = UNSET
    """Networks that see the host as it is."""
    body: str | UnsetType = UNSET
    retry_after: int = 600


class Timeouts(Value, frozen=True):
    """Seconds."""

    connect: int | UnsetType = UNSET
    read: int | UnsetType = UNSET
    send: int | UnsetType = UNSET
    client_body: int | UnsetType = UNSET
    client_send: int | UnsetType = UNSET
    keepalive: int | UnsetType = UNSET


class Compression(Value, frozen=True):
    gzip: bool = True
    brotli: bool = False
    level: int | UnsetType = UNSET
    min_length: int | UnsetType = UNSET
    types: tuple[str, ...] | UnsetType = UNSET


class Content(Value, frozen=True):
    """How answers look. What a location says takes the place of its host's; headers come together."""

    headers: tuple[HeaderRule, ...] | UnsetType = UNSET
    cors: Cors | UnsetType = UNSET
    max_body_bytes: int | UnsetType = UNSET
    """0 for no limit."""
    timeouts: Timeouts | UnsetType = UNSET
    compression: Compression | UnsetType = UNSET
    buffering: bool | UnsetType = UNSET
    """False: pass answers on as they come."""
    request_buffering: bool | UnsetType = UNSET
    fallback: str | UnsetType = UNSET
    """Of a location with a root: the page for paths that no file has, such as `/index.html`."""


class Pages(Value, frozen=True):
    """What a host answers by itself."""

    redirects: tuple[Redirect, ...] | UnsetType = UNSET
    """In order, before any location is asked."""
    errors: tuple[ErrorPage, ...] | UnsetType = UNSET
    maintenance: Maintenance | UnsetType = UNSET


class Respond(Value, frozen=True):
    """What a location answers by itself, as one of the ways to serve it."""

    status: int = 200
    body: str | UnsetType = UNSET
    content_type: Literal["text/html", "text/plain", "application/json"] = "text/html"
    to: str | UnsetType = UNSET
    """Of a redirect."""


# Passing on.


class Resolver(Value, frozen=True):
    """Look the name in `proxy_pass` up again and again, not only when NGINX starts."""

    addresses: tuple[str, ...]
    valid: int | UnsetType = UNSET
    """Seconds; unless given, as long as the answer says."""
    ipv6: bool = False


class Canary(Value, frozen=True):
    upstream_id: str
    percent: int


class Canaries(Value, frozen=True):
    """Upstreams that get a share of the requests; the location's own gets the rest."""

    to: tuple[Canary, ...]
    key: str = "request"
    """What decides: each `request` anew; by `address`, `header:NAME` and so on a client stays where it is."""


class UpstreamTls(Value, frozen=True):
    verify: bool = True
    name: str | UnsetType = UNSET
    """Which the certificate must have, and SNI says; unless given, the first server's."""
    authority_id: str | UnsetType = UNSET
    """A certificate of the workspace; unless given, the authorities that the node trusts."""
    client_certificate_id: str | UnsetType = UNSET
    """What NGINX shows; a certificate of the workspace, sent with its key."""


class Balancing(Value, frozen=True):
    """Further ways to choose a server, in the place of `algorithm`."""

    method: Literal["hash", "random", "sticky_cookie"]
    key: str = "address"
    """Of `hash`: `address`, `host`, `uri`, `header:NAME` or `cookie:NAME`."""
    cookie: str = "fleetplane_route"
    """Of `sticky_cookie`."""


class Keepalive(Value, frozen=True):
    requests: int | UnsetType = UNSET
    timeout: int | UnsetType = UNSET
    """Seconds."""


RetryReason = Literal[
    "error",
    "timeout",
    "invalid_header",
    "http_500",
    "http_502",
    "http_503",
    "http_504",
    "http_403",
    "http_404",
    "http_429",
]


class Retries(Value, frozen=True):
    on: tuple[RetryReason, ...]
    """None of them: never."""
    tries: int | UnsetType = UNSET
    timeout: int | UnsetType = UNSET
    """Seconds, for all of them together."""
    non_idempotent: bool = False


class ServerOptions(Value, frozen=True):
    """Of one server, as they are sent."""

    draining: bool | UnsetType = UNSET
    slow_start: int | UnsetType = UNSET
    max_connections: int | UnsetType = UNSET


# Cache and logs.


class CacheZone(Value, frozen=True):
    """Room on each node for the answers of one host."""

    max_mb: int = 256
    inactive: int = 600
    """Seconds after which what nobody asked for is dropped."""
    generation: int = 0
    """Raised to forget everything that was kept."""


class CacheRule(Value, frozen=True):
    seconds: int
    statuses: tuple[int, ...] = ()
    """None of them: every status."""


class Cache(Value, frozen=True):
    """Which answers of a location are kept."""

    rules: tuple[CacheRule, ...]
    bypass: tuple[str, ...] | UnsetType = UNSET
    """`header:NAME`, `cookie:NAME`, `arg:NAME`: requests that have it are passed on and not kept."""
    min_uses: int | UnsetType = UNSET
    lock: bool = True
    """One request at a time fetches what is missing."""
    stale: bool = True
    """Serve what is too old while the other side fails or is being asked."""


class Logging(Value, frozen=True):
    """What the access log of a host has."""

    enabled: bool = True
    leave_out: tuple[str, ...] | UnsetType = UNSET
    """Fields, such as `user_agent`."""
    add: tuple[str, ...] | UnsetType = UNSET
    """Further variables from the list of safe ones, such as `ssl_protocol`."""
    sample_percent: int | UnsetType = UNSET
    """Of requests; errors (400 and above) are logged always."""


HOST_GROUPS = frozenset({"tls", "listening", "access", "content", "pages", "cache", "logging"})
"""The groups of a virtual host."""
LOCATION_GROUPS = frozenset({"access", "content", "respond", "canaries", "resolver", "cache"})
"""The groups of a location."""
UPSTREAM_GROUPS = frozenset({"protocol", "tls", "balancing", "keepalive", "retries"})
"""The options of an upstream."""


# What agents get.


class HostOptions(Value, frozen=True):
    """The options of a virtual host as they are sent, with what they refer to."""

    tls: HostTls | UnsetType = UNSET
    listening: Listening | UnsetType = UNSET
    authority_pem: str | UnsetType = UNSET
    """Of `tls.client_certificates`."""
    access: Access | UnsetType = UNSET
    """Without `list_ids`: what they name is in the other fields."""
    content: Content | UnsetType = UNSET
    pages: Pages | UnsetType = UNSET
    cache: CacheZone | UnsetType = UNSET
    logging: Logging | UnsetType = UNSET


class LocationOptions(Value, frozen=True):
    access: Access | UnsetType = UNSET
    content: Content | UnsetType = UNSET
    respond: Respond | UnsetType = UNSET
    canaries: Canaries | UnsetType = UNSET
    resolver: Resolver | UnsetType = UNSET
    cache: Cache | UnsetType = UNSET


class UpstreamOptions(Value, frozen=True):
    protocol: Literal["http", "https", "grpc", "grpcs"] | UnsetType = UNSET
    tls: UpstreamTls | UnsetType = UNSET
    authority_pem: str | UnsetType = UNSET
    """Of `tls.authority_id`."""
    balancing: Balancing | UnsetType = UNSET
    keepalive: Keepalive | UnsetType = UNSET
    retries: Retries | UnsetType = UNSET
    servers: dict[str, ServerOptions] | UnsetType = UNSET
    """By address."""


NO_HOST_OPTIONS = HostOptions()
NO_LOCATION_OPTIONS = LocationOptions()
NO_UPSTREAM_OPTIONS = UpstreamOptions()


def host_options(text: str) -> HostOptions:
    """Read what was sent; raises `msgspec.ValidationError` for what this program does not know."""
    return msgspec.json.decode(text, type=HostOptions) if text else NO_HOST_OPTIONS


def location_options(text: str) -> LocationOptions:
    return msgspec.json.decode(text, type=LocationOptions) if text else NO_LOCATION_OPTIONS


def upstream_options(text: str) -> UpstreamOptions:
    return msgspec.json.decode(text, type=UpstreamOptions) if text else NO_UPSTREAM_OPTIONS


StreamProtocol = Literal["tcp", "udp"]


class StreamRoute(Value, frozen=True):
    """Where connections go whose TLS handshake asks for one of these names."""

    names: tuple[str, ...]
    """Such as `a.example.com`, `*.example.com`, or `.example.com` for both it and what is below it."""
    upstream_id: str


class StreamLimits(Value, frozen=True):
    connections: int | UnsetType = UNSET
    """At once from one address."""
    download_bytes_per_second: int | UnsetType = UNSET
    """Of one connection, to the client."""
    upload_bytes_per_second: int | UnsetType = UNSET


class StreamTimeouts(Value, frozen=True):
    """Seconds."""

    connect: int | UnsetType = UNSET
    """Until a server of the upstream has accepted the connection."""
    idle: int | UnsetType = UNSET
    """Between two reads or writes; then the connection, or the session of datagrams, ends."""


class SentStream(Value, frozen=True):
    """A stream as it is sent to agents."""

    name: str
    listen_port: int
    protocol: StreamProtocol = "tcp"
    upstream_id: str | UnsetType = UNSET
    """Where everything goes that no route names."""
    routes: tuple[StreamRoute, ...] | UnsetType = UNSET
    send_proxy_protocol: bool | UnsetType = UNSET
    rules: tuple[AccessRule, ...] | UnsetType = UNSET
    limits: StreamLimits | UnsetType = UNSET
    timeouts: StreamTimeouts | UnsetType = UNSET
    responses: int | UnsetType = UNSET
    log: bool | UnsetType = UNSET


def stream_options(text: str) -> SentStream:
    """Read what was sent; raises `msgspec.ValidationError` for what this program does not know."""
    return msgspec.json.decode(text, type=SentStream)
