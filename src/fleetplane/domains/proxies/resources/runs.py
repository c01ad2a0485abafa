"""Commands to agents, as runs."""

from __future__ import annotations

from typing import Any

from fleetplane.domains.proxies import access
from fleetplane.domains.proxies.agents.runs import PROXY_RUN
from fleetplane.domains.proxies.resources.places import place
from fleetplane.fleet.runs import targets
from fleetplane.fleet.runs.resources import Printed, run_resource
from fleetplane.kernel.commands import CommandTarget


def _printed(_domain: Any, target: CommandTarget) -> Printed:
    return Printed(message=target.status.detail if target.status is not None else "")


RUNS = run_resource(
    PROXY_RUN,
    domain="proxies",
    place=place,
    read=access.READ,
    operate=access.OPERATE,
    command=lambda spec: spec.call.command,
    target=lambda spec: targets.shown(spec.target),
    runs=lambda domain: domain.runs,
    printed=_printed,
    anywhere=True,
)
