"""What proxies have, as objects of the resource API. Pure."""

from __future__ import annotations

from fleetplane.domains.proxies.resources.agents import AGENTS
from fleetplane.domains.proxies.resources.certificates import CERTIFICATES
from fleetplane.domains.proxies.resources.events import EVENTS
from fleetplane.domains.proxies.resources.people import ACCOUNTS
from fleetplane.domains.proxies.resources.runs import RUNS
from fleetplane.domains.proxies.resources.served import UPSTREAMS, VIRTUAL_HOSTS
from fleetplane.domains.proxies.resources.workspaces import WORKSPACES

RESOURCES = (WORKSPACES, AGENTS, VIRTUAL_HOSTS, UPSTREAMS, CERTIFICATES, EVENTS, ACCOUNTS, RUNS)
