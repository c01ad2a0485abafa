"""What of a stored configuration may reach NGINX. Pure.

Rules grow stricter, and versions from before are kept: going back to one, or an agent of another program
that checks nothing itself, must not bring back what is refused today. So the check is made again on
everything that is sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import msgspec

from fleetplane.domains.proxies.kinds.records import PartSpec, SettingsSpec
from fleetplane.domains.proxies.nginx import checks, judging
from fleetplane.domains.proxies.nginx.table import DirectiveContext
from fleetplane.domains.proxies.rules import directives, proxying
from fleetplane.domains.proxies.rules.access import list_problems
from fleetplane.domains.proxies.rules.conflicts import WorkspaceSurroundings
from fleetplane.domains.proxies.rules.content import kept_problems, pages_problems
from fleetplane.domains.proxies.rules.locations import reach_problems
from fleetplane.domains.proxies.rules.proxying import listening_problems, tls_problems
from fleetplane.domains.proxies.rules.shared import option_problems
from fleetplane.domains.proxies.rules.streams import shape_problems
from fleetplane.web.rest.problems import Problem


class _Anything(Collection[str]):
    """Holds every id: what a part refers to was checked when it was written, and may be gone since."""

    def __contains__(self, _: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


_ANYTHING = WorkspaceSurroundings(
    virtual_hosts={}, upstreams=_Anything(), certificates=_Anything(), agents={}, access_lists=_Anything()
)


def part_fault(part: PartSpec) -> str:
    """Why a virtual host or an upstream is not sent to agents; empty if it is."""
    found = next(_problems(part), None)
    return "" if found is None else f"{found.field}: {found.message}"


def _problems(part: PartSpec) -> Iterator[Problem]:
    if (host := part.virtual_host) is not None:
        yield from directives.problems(
            host.custom_directives, field="custom_directives", contexts={DirectiveContext.SERVER}
        )
        for index, location in enumerate(host.locations):
            yield from reach_problems(location, f"locations.{index}")
            yield from option_problems(location, f"locations.{index}", _ANYTHING)
        yield from option_problems(host, "", _ANYTHING)
        yield from tls_problems(host, _ANYTHING.certificates)
        if host.listening:
            yield from listening_problems(host.listening)
        if host.pages:
            yield from pages_problems(host.pages)
        yield from kept_problems(host)
    if (upstream := part.upstream) is not None:
        for index, server in enumerate(upstream.servers):
            if fault := checks.authority_fault(server.address, port=True):
                yield Problem(field=f"servers.{index}.address", message=directives.capital(fault))
        yield from proxying.upstream_problems(upstream, None)
    if part.access_list:
        yield from list_problems(part.access_list)
    if part.stream:
        yield from shape_problems(part.stream)


def allowed_settings(settings: SettingsSpec) -> tuple[SettingsSpec, Mapping[str, str]]:
    """The settings that are sent, and why the others are not, by field."""
    refused = {
        problem.field: problem.message
        for problem in (
            *directives.problems(
                settings.nginx_directives, field="nginx_directives", contexts=judging.SETTINGS
            ),
            *directives.variable_problems(settings.env_vars, field="env_vars"),
        )
    }
    if not refused:
        return settings, {}
    return msgspec.structs.replace(
        settings,
        nginx_directives=_without(settings.nginx_directives, "nginx_directives", refused),
        env_vars=_without(settings.env_vars, "env_vars", refused),
    ), refused


def _without(values: Mapping[str, str], field: str, refused: Mapping[str, str]) -> dict[str, str]:
    if field in refused:  # too many of them
        return {}
    return {name: value for name, value in values.items() if f"{field}.{name}" not in refused}
