"""Renders a configuration as the files of a release, and computes the checksum that an agent reports. Pure.

Everything a user can type passes through the quoting of `blocks`; what NGINX would accept but not mean is
refused here, with words. What this NGINX cannot do but can go without, such as HTTP/3, is left out and noted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.json_format import MessageToDict

from fleetplane.domains.proxies.nginx import checks, hosts, judging, streams, upstreams
from fleetplane.domains.proxies.nginx.blocks import Directive, Node, Unrenderable, block, directive, emit
from fleetplane.domains.proxies.nginx.context import Note, RenderingContext, rendering_part
from fleetplane.domains.proxies.nginx.paths import PathPolicy
from fleetplane.domains.proxies.nginx.site import Site
from fleetplane.domains.proxies.nginx.table import DirectiveContext as Place
from fleetplane.domains.proxies.nginx.table import TextAuthor, entries
from fleetplane.domains.proxies.nginx.typed.upkeep import LOG_FIELDS, log_format, place
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb


def checksum(update: pb.ConfigUpdate) -> str:
    """SHA-256 of the content as JSON: the contract's field names, keys sorted, no blanks, UTF-8.

    Not of protobuf bytes, which differ between languages for the same content; and without the
    id and version, since the same content under another number is the same configuration.
    """
    content = MessageToDict(update, preserving_proto_field_name=True)
    content.pop("config_id", None)
    content.pop("version", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


RENDERING: Final = 2
"""Raised with every change of what is rendered that must reach releases in service: an agent that finds one
with another number writes it anew when it starts. 2: document roots, workers' user, other hosts refused."""
RELEASE_PATH: Final = "/fleetplane/release"
STATUS_PATH: Final = "/fleetplane/stub_status"
ACME_VARIABLE: Final = "NXMESH_ACME_RESPONDER"
"""Not for NGINX's environment: how the server names the address that answers challenges."""
ACME_WORKSPACE_VARIABLE: Final = "NXMESH_ACME_WORKSPACE"
"""Same: what it tells that address about us, so that nobody is answered on another's behalf."""
WORKER_SHUTDOWN: Final = "60s"
"""Workers of an older release may finish what they do for this long; then reloads cannot pile up."""

NOWHERE: Final = "/nonexistent"
"""Where nothing is served from."""

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_DENIED_VARIABLES: Final = re.compile(
    r"LD_.*|NXMESH_.*|NGINX.*|OPENSSL_.*|SSL.*|PERL.*|LUA_.*|MALLOC_.*|GLIBC_.*|GCONV_PATH|LOCPATH|NLSPATH"
    r"|RES_.*|LOCALDOMAIN|HOSTALIASES|PATH|TMPDIR|IFS|ENV|BASH_.*|PYTHON.*|GODEBUG|NODE_.*|.*_PROXY"
)
"""A program that NGINX starts, itself when it is replaced, would obey these; NXMESH_ is the server's."""

_INSIDE: Final = (
    directive("volatile"),
    directive("default", ""),
    directive(r'"~(?:^|/)\.\.?(?:/|$)"', NOWHERE),
    directive('"~^[^/]"', NOWHERE),
)
"""Rewrites can bring `..` into a path, or take its first `/` away; NGINX does not look again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedFile:
    content: bytes
    mode: int = 0o640


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    files: Mapping[str, RenderedFile]
    """By path inside the release."""
    notes: tuple[Note, ...] = ()
    user_files: Mapping[str, bytes] = field(default_factory=dict)
    """Of users and passwords, by name: workers read them, so they lie outside the release."""
    user_group: str = ""
    """The group of NGINX's workers, where they have one of their own."""


def render(
    update: pb.ConfigUpdate,
    site: Site,
    *,
    release: str,
    down: Mapping[str, frozenset[str]] | None = None,
    former: frozenset[str] = frozenset(),
    in_service: frozenset[str] = frozenset(),
) -> Rendered:
    """`down` names, per upstream, the servers that active checks have found dead.

    Raises `PartUnrenderable` for what concerns one part only; `former` and `in_service` are as in
    `RenderingContext`.
    """
    variables, paths = dict(update.global_settings.env_vars), site.files
    settings = judging.raw(
        update.global_settings.nginx_directives, judging.SETTINGS, paths, where="global settings"
    )
    context = RenderingContext(
        site=site,
        update=update,
        acme_responder=_responder(variables.pop(ACME_VARIABLE, site.acme_responder)),
        acme_workspace=_workspace(variables.pop(ACME_WORKSPACE_VARIABLE, "")),
        files=paths,
        settings=settings,
        former=former,
        in_service=in_service,
        users_folder=str(site.paths.users / release),
    )
    check_ids(update)
    tree = [
        *streams.loaded(context),
        *_main(site, settings, variables),
        block("events", body=_events(settings)),
        block("http", body=_http(context, settings, release)),
        *streams.main_block(context),
    ]
    judging.accept(tree, Place.MAIN, paths, author=TextAuthor.AGENT)
    files = {"nginx.conf": RenderedFile(content=emit(tree).encode())}
    # One file a part: NGINX names the file in what it says, and so the part that is at fault.
    elsewhere = streams.only_for_streams(update)
    for upstream in update.upstreams:
        if upstream.id in elsewhere:
            continue
        with rendering_part(f"upstream/{upstream.id}"):
            group = list(upstreams.render([upstream], down or {}))
            files[f"conf.d/upstream-{upstream.id}.conf"] = _checked(group, paths)
    for name, host, nodes in hosts.render(context):
        with rendering_part(f"virtual_host/{host}") if host else nullcontext():
            files[f"conf.d/{name}.conf"] = _checked(nodes, paths)
    for name, part, nodes in streams.render(context, down or {}):
        with rendering_part(part):
            files[f"{name}.conf"] = _checked(nodes, paths, Place.STREAM)
    files |= {name: RenderedFile(content=content, mode=0o600) for name, content in context.made.items()}
    for identity, certificate in update.certificates.items():
        files[f"certs/{identity}.pem"] = RenderedFile(content=certificate.certificate_pem.encode())
        files[f"certs/{identity}.key"] = RenderedFile(
            content=certificate.private_key_pem.encode(), mode=0o600
        )
    return Rendered(
        files=files,
        notes=tuple(context.notes.values()),
        user_files=context.user_files,
        user_group=site.worker_user.partition(":")[2],
    )


def _checked(nodes: list[Node], paths: PathPolicy, place: Place = Place.HTTP) -> RenderedFile:
    """A file of a context, of nothing but what may reach NGINX."""
    judging.accept(nodes, place, paths, author=TextAuthor.AGENT)
    return RenderedFile(content=emit(nodes).encode())


def check_ids(update: pb.ConfigUpdate) -> None:
    """Ids become names of files and upstreams."""
    named = [
        *(("virtual host", host.id) for host in update.virtual_hosts),
        *(("upstream", upstream.id) for upstream in update.upstreams),
        *(("certificate", identity) for identity in update.certificates),
        *(("stream", stream.id) for stream in update.streams),
    ]
    for what, identity in named:
        if not _ID.fullmatch(identity):
            raise Unrenderable(f"{identity[:80]!r} cannot be the id of a {what}")
    if len(set(named)) < len(named):
        raise Unrenderable("an id is used twice")


def is_responder(text: str) -> bool:
    """Whether challenges can be passed on to this."""
    return not checks.authority_fault(text, port=True)


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
    given = [one for one in settings if _belongs(one, Place.MAIN)]
    yield from (node for name, node in own.items() if name not in {one.name for one in given})
    yield from given
    if site.worker_user:
        yield directive("user", *site.worker_user.split(":"))
    yield directive("pid", str(site.paths.pid))
    yield directive("error_log", str(site.paths.error_log), "notice")
    for name, value in sorted(variables.items()):
        if not may_be_set(name):
            raise Unrenderable(f"{name[:80]!r} cannot be set in NGINX's environment")
        yield directive("env", f"{name}={value}")


def _belongs(node: Directive, place: Place) -> bool:
    return any(place in entry.contexts for entry in entries(node.name, TextAuthor.RAW))


def may_be_set(variable: str) -> bool:
    """Whether users may set it in NGINX's environment."""
    return _VARIABLE.fullmatch(variable) is not None and not _DENIED_VARIABLES.fullmatch(variable)


def _events(settings: list[Directive]) -> Iterator[Node]:
    given = [one for one in settings if _belongs(one, Place.EVENTS)]
    if not any(one.name == "worker_connections" for one in given):
        yield directive("worker_connections", "4096")
    yield from given


def _http(context: RenderingContext, settings: list[Directive], release: str) -> Iterator[Node]:
    site, paths = context.site, context.site.paths
    given = [one for one in settings if _belongs(one, Place.HTTP)]
    names = {one.name for one in given}
    for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"):
        yield directive(f"{kind}_temp_path", str(paths.temporary / kind))
    if site.mime_types is not None:
        yield directive("include", str(site.mime_types))
    yield log_format("fleetplane", LOG_FIELDS)
    yield directive("access_log", str(paths.access_log), "fleetplane")
    defaults = {
        "root": (NOWHERE,),
        "disable_symlinks": ("on",),
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
    yield from hosts.guarded(context, given)
    yield block("map", "$uri", "$fleetplane_inside", body=_INSIDE)
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
            *place(""),
            block("location", "=", RELEASE_PATH, body=[directive("return", "200", release)]),
            block("location", "=", STATUS_PATH, body=[directive("stub_status")]),
            block("location", "/", body=[directive("return", "404")]),
        ],
    )
