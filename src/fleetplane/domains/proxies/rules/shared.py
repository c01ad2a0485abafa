"""Rules of options that hosts and their locations share. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fleetplane.domains.proxies.kinds.records import VirtualHostSpec
from fleetplane.domains.proxies.kinds.values import Location
from fleetplane.domains.proxies.nginx.typed.access import DECIDING
from fleetplane.domains.proxies.rules import content as looks
from fleetplane.domains.proxies.rules import proxying
from fleetplane.domains.proxies.rules.access import access_problems
from fleetplane.domains.proxies.rules.conflicts import WorkspaceSurroundings
from fleetplane.domains.proxies.typed_options import Access
from fleetplane.web.rest.problems import Code, Problem


def option_problems(
    one: VirtualHostSpec | Location, field: str, around: WorkspaceSurroundings
) -> Iterator[Problem]:
    """`field` is empty for the host itself."""
    place = f"{field}." if field else ""
    if one.access:
        yield from access_problems(one.access, f"{place}access", around.access_lists)
    if one.content:
        yield from looks.content_problems(one.content, f"{place}content")
    if isinstance(one, Location):
        yield from looks.location_problems(one, field)
        yield from proxying.location_problems(one, field, around.upstreams)
    elif one.content and one.content.fallback:
        message = "Only of a location with a root"
        yield Problem(field="content.fallback", message=message, code=Code.INCOMPATIBLE)


def raw_beside_access(spec: VirtualHostSpec) -> Iterator[Problem]:
    """Raw text about who may come in, which is an administrator's, and typed options about the same."""
    for index, location in enumerate(spec.locations):
        if location.access and location.respond:
            message = "A location that answers by itself does so before anybody is asked"
            yield Problem(field=f"locations.{index}.access", message=message, code=Code.INCOMPATIBLE)
        effective = location.access or spec.access
        raw = sorted(DECIDING & {*spec.custom_directives, *(location.custom_directives or {})})
        if effective and effective != Access() and raw:
            own = f"locations.{index}.access" if location.access else "access"
            message = f"Raw text says {raw[0]} already: use one of them"
            yield Problem(field=own, message=message, code=Code.INCOMPATIBLE)
