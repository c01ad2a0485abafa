"""A configuration as the server says it, and as the files of a release. Pure.

Everything a user can type passes through `quoting`; what NGINX would accept but not mean is
refused here, with words. What this NGINX cannot do but can go without, such as HTTP/3, is left
out and noted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from fleetplane.domains.proxies.agent import hosts, upstreams
from fleetplane.domains.proxies.agent.blocks import Directive, Node, block, custom, directive, emit
from fleetplane.domains.proxies.agent.context import Context, Note
from fleetplane.domains.proxies.agent.quoting import Unrenderable
from fleetplane.domains.proxies.agent.site import Site
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

RELEASE_PATH: Final = "/fleetplane/release"
STATUS_PATH: Final = "/fleetplane/stub_status"
ACME_VARIABLE: Final = "NXMESH_ACME_RESPONDER"
"""Not for NGINX's environment: how the server names the address that answers challenges."""
ACME_WORKSPACE_VARIABLE: Final = "NXMESH_ACME_WORKSPACE"
"""Same: what it tells that address about us, so that nobody is answered on another's behalf."""
WORKER_SHUTDOWN: Final = "60s"
"""Workers of an older release may finish what they do for this long; then reloads cannot pile up."""

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_DENIED_VARIABLES: Final = re.compile(
    r"LD_.*|NXMESH_.*|NGINX.*|OPENSSL_.*|PERL.*|LUA_.*|MALLOC_.*|GCONV_PATH"
)
"""A program that NGINX starts, itself when it is replaced, would obey these; NXMESH_ is the server's."""
_RESPONDER: Final = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")

_MAIN: Final = frozenset({
    "worker_processes", "worker_rlimit_nofile", "worker_shutdown_timeout", "worker_priority",
    "worker_cpu_affinity", "timer_resolution", "pcre_jit", "thread_pool", "quic_bpf",
})  # fmt: skip
_EVENTS: Final = frozenset({
    "worker_connections", "multi_accept", "use", "accept_mutex", "accept_mutex_delay", "worker_aio_requests",
})  # fmt: skip

LOG_FIELDS: Final = {
    "time": "$msec", "remote_addr": "$remote_addr", "method": "$request_method", "uri": "$request_uri",
    "protocol": "$server_protocol", "host": "$host", "status": "$status",
    "body_bytes_sent": "$body_bytes_sent", "bytes_sent": "$bytes_sent", "request_length": "$request_length",
    "request_time": "$request_time", "upstream_response_time": "$upstream_response_time",
    "user_agent": "$http_user_agent", "referer": "$http_referer", "request_id": "$request_id",
    "virtual_host_id": "$fleetplane_host",
}  # fmt: skip
"""All of them strings: a number may be `-` or missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    content: bytes
    mode: int = 0o640


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    files: Mapping[str, File]
    """By path inside the release."""
    notes: tuple[Note, ...] = ()


def render(
    update: pb.ConfigUpdate, site: Site, *, release: str, down: Mapping[str, frozenset[str]] | None = None
) -> Rendered:
    """`down` names, per upstream, the servers that active checks have found dead."""
    variables = dict(update.global_settings.env_vars)
    context = Context(
        site=site,
        update=update,
        acme_responder=_responder(variables.pop(ACME_VARIABLE, site.acme_responder)),
        acme_workspace=_workspace(variables.pop(ACME_WORKSPACE_VARIABLE, "")),
    )
    check_ids(update)
    settings = custom(update.global_settings.nginx_directives, where="global settings")
    tree = [
        *_main(site, settings, variables),
        block("events", body=_events(settings)),
        block("http", body=_http(context, settings, release)),
    ]
    files = {
        "nginx.conf": File(content=emit(tree).encode()),
        "conf.d/upstreams.conf": File(content=emit(upstreams.render(update.upstreams, down or {})).encode()),
    }
    for name, nodes in hosts.render(context):
        files[f"conf.d/{name}.conf"] = File(content=emit(nodes).encode())
    for identity, certificate in update.certificates.items():
        files[f"certs/{identity}.pem"] = File(content=certificate.certificate_pem.encode())
        files[f"certs/{identity}.key"] = File(content=certificate.private_key_pem.encode(), mode=0o600)
    return Rendered(files=files, notes=tuple(context.notes.values()))


def check_ids(update: pb.ConfigUpdate) -> None:
    """Ids become names of files and upstreams."""
    named = [
        *(("virtual host", host.id) for host in update.virtual_hosts),
        *(("upstream", upstream.id) for upstream in update.upstreams),
        *(("certificate", identity) for identity in update.certificates),
    ]
    for what, identity in named:
        if not _ID.fullmatch(identity):
            raise Unrenderable(f"{identity[:80]!r} cannot be the id of a {what}")
    if len(set(named)) < len(named):
        raise Unrenderable("an id is used twice")


def is_responder(text: str) -> bool:
    """Whether challenges can be passed on to this."""
    return _RESPONDER.fullmatch(text) is not None and 1 <= int(text.rpartition(":")[2]) <= 65535


def _responder(text: str) -> str:
    if text and not is_responder(text):
        raise Unrenderable(f"{ACME_VARIABLE} must be host:port, not {text[:80]!r}")
    return text


def _workspace(text: str) -> str:
    if text and not _ID.fullmatch(text):
        raise Unrenderable(f"{ACME_WORKSPACE_VARIABLE} must be an id, not {text[:80]!r}")
    return text


def _main(site: Site, settings: list[Directive], variables: Mapping[str, str]) -> Iterator[Node]:
    own = {
        "worker_processes": directive("worker_processes", site.workers),
        "worker_shutdown_timeout": directive("worker_shutdown_timeout", WORKER_SHUTDOWN),
    }
    given = [one for one in settings if one.name in _MAIN]
    yield from (node for name, node in own.items() if name not in {one.name for one in given})
    yield from given
    yield directive("pid", str(site.paths.pid))
    yield directive("error_log", str(site.paths.error_log), "notice")
    for name, value in sorted(variables.items()):
        if not may_be_set(name):
            raise Unrenderable(f"{name[:80]!r} cannot be set in NGINX's environment")
        yield directive("env", f"{name}={value}")


def may_be_set(variable: str) -> bool:
    """Whether users may set it in NGINX's environment."""
    return _VARIABLE.fullmatch(variable) is not None and not _DENIED_VARIABLES.fullmatch(variable)


def _events(settings: list[Directive]) -> Iterator[Node]:
    given = [one for one in settings if one.name in _EVENTS]
    if not any(one.name == "worker_connections" for one in given):
        yield directive("worker_connections", "4096")
    yield from given


def _http(context: Context, settings: list[Directive], release: str) -> Iterator[Node]:
    site, paths = context.site, context.site.paths
    given = [one for one in settings if one.name not in _MAIN | _EVENTS]
    names = {one.name for one in given}
    for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"):
        yield directive(f"{kind}_temp_path", str(paths.temporary / kind))
    if site.mime_types is not None:
        yield directive("include", str(site.mime_types))
    pairs = ",".join(f'"{name}":"{value}"' for name, value in LOG_FIELDS.items())
    yield directive("log_format", "fleetplane", "escape=json", f"{{{pairs}}}")
    yield directive("access_log", str(paths.access_log), "fleetplane")
    defaults = {
        "default_type": ("application/octet-stream",),
        "sendfile": ("on",),
        "server_tokens": ("off",),
        "server_names_hash_bucket_size": ("256",),
        "server_names_hash_max_size": ("8192",),
        "variables_hash_max_size": ("2048",),
        "proxy_headers_hash_bucket_size": ("256",),
        "ssl_protocols": ("TLSv1.2", "TLSv1.3"),
        "ssl_session_cache": ("shared:fleetplane:2m",),
        "ssl_prefer_server_ciphers": ("off",),
    }
    yield from (directive(name, *values) for name, values in defaults.items() if name not in names)
    yield from given
    upgrade = [directive("default", "upgrade"), directive("''", "")]
    yield block("map", "$http_upgrade", "$fleetplane_connection", body=upgrade)
    yield _own_server(site, release)
    yield directive("include", "conf.d/*.conf")


def _own_server(site: Site, release: str) -> Node:
    """Where we ask which release answers, and for NGINX's own figures. Reachable by its user only."""
    return block(
        "server",
        body=[
            directive("listen", f"unix:{site.paths.socket}"),
            directive("access_log", "off"),
            directive("set", "$fleetplane_host", ""),
            block("location", "=", RELEASE_PATH, body=[directive("return", "200", release)]),
            block("location", "=", STATUS_PATH, body=[directive("stub_status")]),
            block("location", "/", body=[directive("return", "404")]),
        ],
    )
