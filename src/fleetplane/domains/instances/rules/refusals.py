"""The error message for a configuration that was refused. Pure.

The document is everyone's, and an operator speaks for one tenant: told are the places of that tenant's own
groups and of templates that are for it. The rest is counted. The server's owner sees all of it, with
`fleetplane instances config refresh` and in the log.
"""

from __future__ import annotations

import re

from fleetplane.domains.instances.configuration import (
    ConfigurationInvalid,
    DocumentProblem,
    InstancesDocument,
)
from fleetplane.domains.instances.configuration.ownership import templates_for
from fleetplane.kernel.errors import InvalidArgument

SHOWN = 5
WHO_KNOWS = "the server's owner sees why: fleetplane instances config refresh"
UNREADABLE = "the configuration cannot be read"


def for_tenant(error: InvalidArgument, tenant: str, config: InstancesDocument | None) -> InvalidArgument:
    """The refusal of a document as a tenant's operator may hear it."""
    problems = error.problems if isinstance(error, ConfigurationInvalid) else ()
    own = [problem for problem in problems if is_own(problem, tenant, config)]
    others = [problem for problem in problems if problem not in own]
    # Beyond the first clause, messages list what else there is.
    told = [f"{one.line}:{one.column}: {one.path}: {one.message.partition(';')[0]}" for one in own[:SHOWN]]
    if others or not told:
        places = ", ".join(f"{one.line}:{one.column}" for one in others[:SHOWN])
        told.append(
            f"{len(others) or 1} outside of what tenant {tenant!r} has in it{places and f', at {places}'}"
        )
    return InvalidArgument(
        f"the configuration was refused: {'; '.join(told)}",
        field=own[0].path if own else None,
        hint=WHO_KNOWS,
    )


def is_own(problem: DocumentProblem, tenant: str, config: InstancesDocument | None) -> bool:
    """Whether a problem lies in the tenant's own part of the document."""
    part, name = _first_two(problem.path)
    if part in ("groups", "nat"):
        return name == tenant
    return part == "templates" and config is not None and name in templates_for(config, tenant)


def _first_two(path: str) -> tuple[str, str]:
    found = re.match(r'(\w+)(?:\.([A-Za-z0-9_-]+)|\["([^"]*)"\])?', path)
    return (found[1], found[2] or found[3] or "") if found else ("", "")
