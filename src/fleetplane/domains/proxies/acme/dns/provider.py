"""Proving a domain over DNS: who writes the record, for which zone.

Knows no provider. What the authority reads is a TXT record beside others of the same name: a
wildcard and its parent are proved at the same time under one name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class DnsProvider(Protocol):
    """Both methods may be repeated, and raise `IssuanceFailed` with the provider's words."""

    async def present(self, name: str, value: str) -> None:
        """Add a TXT record, beside those that are there already."""

    async def clear(self, name: str, value: str) -> None:
        """Remove this one record and leave its neighbours; one that is gone is as wanted."""


class DnsZones:
    """Which provider has which zone, as the operator said."""

    def __init__(
        self, zones: Mapping[str, DnsProvider], owners: Mapping[str, frozenset[str]] | None = None
    ) -> None:
        """`owners` names the workspaces that may prove names in a zone; a zone without any is everyone's."""
        self._zones = {_plain(zone): provider for zone, provider in zones.items()}
        self._owners = {_plain(zone): allowed for zone, allowed in (owners or {}).items()}

    def __repr__(self) -> str:
        return f"<DnsZones {' '.join(sorted(self._zones))}>"

    def provider(self, domain: str) -> DnsProvider | None:
        """The provider of the smallest zone that contains a domain."""
        zone = self._zone(domain)
        return self._zones[zone] if zone is not None else None

    def allows(self, domain: str, workspace: str) -> bool:
        """Whether a workspace may prove a domain here: a zone's credentials are not every tenant's."""
        zone = self._zone(domain)
        return zone is not None and (zone not in self._owners or workspace in self._owners[zone])

    def _zone(self, domain: str) -> str | None:
        name = _plain(domain.removeprefix("*."))
        while name:
            if name in self._zones:
                return name
            _, _, name = name.partition(".")
        return None

    def covers(self, domain: str) -> bool:
        return self.provider(domain) is not None


def _plain(name: str) -> str:
    return name.lower().rstrip(".")
