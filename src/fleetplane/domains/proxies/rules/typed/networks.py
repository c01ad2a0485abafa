"""Addresses and networks that callers give. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from fleetplane.web.rest.problems import Code, Problem

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
