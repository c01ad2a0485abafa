"""Texts, addresses, networks and targets that callers give. Pure; allow-lists only."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator, Sequence

from fleetplane.domains.proxies.kinds.values import NamedAgents, SelectedAgents, TargetAgents
from fleetplane.domains.proxies.rules import directives
from fleetplane.domains.proxies.rules.conflicts import WorkspaceSurroundings
from fleetplane.fleet import selectors
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.web.rest.problems import Code, Problem

AGENT_IDS_LIMIT = 1000


def target_problems(target: TargetAgents, around: WorkspaceSurroundings) -> Iterator[Problem]:
    """Agents that cannot be meant, by field."""
    match target:
        case SelectedAgents(label_selector=text):
            try:
                selectors.parse(text)
            except InvalidArgument as error:
                yield Problem(field="target_agents.label_selector", message=error.message)
        case NamedAgents(agent_ids=ids):
            if not 0 < len(ids) <= AGENT_IDS_LIMIT:
                yield Problem(
                    field="target_agents.agent_ids",
                    message=f"Must name 1 to {AGENT_IDS_LIMIT} agents",
                    code=Code.TOO_MANY if ids else Code.REQUIRED,
                )
            for index, agent in enumerate(ids):
                if agent not in around.agents:
                    yield Problem(
                        field=f"target_agents.agent_ids.{index}",
                        message="There is no such agent in this workspace",
                        code=Code.UNKNOWN_REFERENCE,
                    )


NETWORKS_LIMIT = 256


def network_fault(text: str) -> str:
    """Why a text is not an address or a network; empty if it is."""
    if not text.isascii() or "%" in text:
        return "Must be an address or a network"
    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        if "host bits" in str(error):
            return f"Has bits beyond its prefix: the network is {ipaddress.ip_network(text, strict=False)}"
        return "Must be an address such as 192.0.2.7 or a network such as 192.0.2.0/24"
    return ""


def networks_problems(
    networks: Sequence[str], field: str, *, limit: int = NETWORKS_LIMIT
) -> Iterator[Problem]:
    if not networks:
        yield Problem(field=field, message="At least one network is required", code=Code.REQUIRED)
    if len(networks) > limit:
        yield Problem(field=field, message=f"More than {limit} networks", code=Code.TOO_MANY)
        return
    for index, network in enumerate(networks):
        if fault := network_fault(network):
            yield Problem(field=f"{field}.{index}", message=fault)


BODY_LIMIT_BYTES = 3000
"""Of a page that is written into the configuration, whose arguments have 4,000."""
URL_LIMIT = 2000
VARIABLES = frozenset(
    {
        "host",
        "scheme",
        "request_uri",
        "request_method",
        "request_id",
        "remote_addr",
        "server_name",
        "server_port",
        "args",
        "is_args",
        "ssl_protocol",
        "ssl_cipher",
        "ssl_client_verify",
        "ssl_client_s_dn",
        "proxy_add_x_forwarded_for",
        "upstream_cache_status",
        "time_iso8601",
        "msec",
    }
)
"""May stand in headers and redirects. None is decoded: no request can put a line's end into one."""
_HEADER_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,127}")
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[a-z0-9_]+)\}|(?P<plain>[a-z0-9_]+))")
_CAPTURES = frozenset("123456789")
_TARGET = re.compile(r"(?:https?://[A-Za-z0-9$][^\s\"'`;{}\\<>]*|/[^\s\"'`;{}\\<>]*)")


def template_fault(text: str, *, captures: bool = False) -> str:
    """Why a text with variables may not be used; empty if it may."""
    if fault := directives.text_fault(text):
        return fault
    allowed = VARIABLES | _CAPTURES if captures else VARIABLES
    rest = _VARIABLE.sub(lambda found: "" if (found["braced"] or found["plain"]) in allowed else "$", text)
    if "$" in rest:
        return "A '$' must begin one of the variables " + ", ".join(f"${one}" for one in sorted(VARIABLES))
    return ""


def header_name_fault(name: str) -> str:
    return "" if _HEADER_NAME.fullmatch(name) else "Not the name of a header"


def target_fault(text: str, *, captures: bool = False) -> str:
    """Why a text is not where a redirect may lead to; empty if it is."""
    if len(text) > URL_LIMIT or not text.isascii() or not _TARGET.fullmatch(text) or text.startswith("//"):
        return "Must be an http or https URL, or a path that starts with '/'"
    return template_fault(text, captures=captures)


def url_fault(text: str) -> str:
    """Why a text is not the plain URL of a service; empty if it is."""
    if len(text) > URL_LIMIT or not text.isascii() or "$" in text:
        return "Must be an http or https URL without variables"
    return directives.written_fault("proxy_pass", text)


def body_problems(body: str, field: str) -> Iterator[Problem]:
    """Of a page; its lines are joined when it is written."""
    plain = body.replace("\r\n", "\n").replace("\n", " ").replace("\t", " ")
    if len(plain.encode("utf-8", "replace")) + plain.count("\\") + plain.count('"') > BODY_LIMIT_BYTES:
        message = f"Longer than {BODY_LIMIT_BYTES} bytes: serve a larger page from a root"
        yield Problem(field=field, message=message, code=Code.TOO_LONG)
    elif plain.count("$") > 20:
        yield Problem(field=field, message="More than 20 '$'", code=Code.TOO_MANY)
    elif fault := directives.text_fault(plain):
        yield Problem(field=field, message=fault)


def range_problems(value: object, low: int, high: int, field: str) -> Iterator[Problem]:
    """For numbers that may be unset."""
    if isinstance(value, int) and not low <= value <= high:
        yield Problem(field=field, message=f"Must be between {low} and {high}", code=Code.OUT_OF_RANGE)


def count_problems(values: Collection[object], limit: int, field: str) -> Iterator[Problem]:
    if len(values) > limit:
        yield Problem(field=field, message=f"More than {limit}", code=Code.TOO_MANY)
