"""REST: the NGINX configuration that an agent writes for a version, as text."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.access import RAW
from fleetplane.domains.proxies.agents.registry import Agents
from fleetplane.domains.proxies.kinds.records import Agent
from fleetplane.domains.proxies.kinds.unique import refuse
from fleetplane.domains.proxies.nginx.quoting import Unrenderable
from fleetplane.domains.proxies.nginx.rendering import render
from fleetplane.domains.proxies.nginx.site import LACKS, Binary, Paths, Site
from fleetplane.domains.proxies.rest.common import ProxyCall
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.kernel.errors import FailedPrecondition, NotFound
from fleetplane.web.rest.pages import number
from fleetplane.web.rest.problems import Problem
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup

_ROUTES = RouteGroup("Configuration")

STATE = Path("/var/lib/fleetplane/proxy-agent")
"""Stands for the agent's own folders, which the server does not know."""
_MODULES = {
    "http2": "http_v2",
    "http3": "http_v3",
    "tls": "http_ssl",
    "realip": "http_realip",
    "auth-request": "http_auth_request",
    "brotli": "http_brotli",
    "stream": "stream",
    "stream-sni": "stream_ssl_preread",
}
_NEWEST = (1, 28, 0)
NUMBER_LIMIT = 1 << 31


class RenderedView(msgspec.Struct, frozen=True, kw_only=True):
    """Without certificates, keys and the files of users."""

    version: int
    against: int | UnsetType = UNSET
    files: dict[str, str]
    """By name; with `against`, what is different in them, as a unified diff."""


class RenderedRoutes:
    def __init__(self, workspaces: Workspaces, agents: Agents) -> None:
        self._workspaces = workspaces
        self._agents = agents

    def routes(self) -> Sequence[Route]:
        return (
            _ROUTES.get(
                "/agents/{agent_id}/configs/{version}/rendered",
                self.rendered,
                RAW,
                query=(
                    Query(name="against", summary="Compare with this version", kind="integer", low=1),
                    Query(name="virtual_host_id", summary="Only the file of this virtual host"),
                    Query(name="file", summary="Only the file of this name, such as nginx.conf"),
                ),
            ),
        )

    async def rendered(self, call: ProxyCall) -> Answer[RenderedView]:
        """Get the NGINX configuration that an agent writes for a version."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        problems: list[Problem] = []
        version = number(call.path, "version", 1, low=1, high=NUMBER_LIMIT, problems=problems)
        other = number(call.query, "against", 0, low=1, high=NUMBER_LIMIT, problems=problems)
        refuse(problems)
        files = self._files(agent, version)
        if other:
            files = _compared(self._files(agent, other), files)
        if "virtual_host_id" in call.query:
            name = f"conf.d/host-{call.query['virtual_host_id']}.conf"
            files = {name: files[name]} if name in files else {}
        if "file" in call.query:
            files = {name: text for name, text in files.items() if name == call.query["file"]}
        return Answer(content=RenderedView(version=version, against=other or UNSET, files=files))

    def _files(self, agent: Agent, version: int) -> dict[str, str]:
        found = self._workspaces.version(agent.scope, version)
        if found is None:
            raise NotFound(f"version {version} is not kept")
        config = self._workspaces.share(agent, found)
        update = wire.config_update(config, dict.fromkeys(config.certificates, b""))
        try:
            made = render(update, _site(agent), release=str(version))
        except Unrenderable as error:
            raise FailedPrecondition(f"an agent would not write it: {error.message}") from error
        return {
            name: file.content.decode()
            for name, file in sorted(made.files.items())
            if not name.startswith("certs/")
        }


def _site(agent: Agent) -> Site:
    """The agent's machine, as far as it told about it."""
    known = agent.status.capabilities if agent.status is not None else ()
    version = next((one[6:] for one in known if one.startswith("nginx-")), "")
    parts = [int(one) for one in version.split(".") if one.isdecimal()]
    modules = frozenset(module for name, module in _MODULES.items() if f"{LACKS}{name}" not in known)
    binary = Binary(
        path=Path("/usr/sbin/nginx"),
        version=(parts[0], parts[1], parts[2]) if len(parts) == 3 else _NEWEST,
        modules=modules,
    )
    return Site(paths=Paths(state=STATE), binary=binary)


def _compared(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    made = {}
    for name in sorted(before.keys() | after.keys()):
        old, new = (each.get(name, "").splitlines(keepends=True) for each in (before, after))
        if told := "".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")):
            made[name] = told
    return made
