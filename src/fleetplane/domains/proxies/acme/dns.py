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

    def __init__(self, zones: Mapping[str, DnsProvider]) -> None:
        self._zones = {zone.lower().rstrip("."): provider for zone, provider in zones.items()}

    def __repr__(self) -> str:
        return f"<DnsZones {' '.join(sorted(self._zones))}>"

    def provider(self, domain: str) -> DnsProvider | None:
        """Of the smallest zone that a domain lies in."""
        name = domain.lower().removeprefix("*.").rstrip(".")
        while name:
            if (found := self._zones.get(name)) is not None:
                return found
            _, _, name = name.partition(".")
        return None

    def covers(self, domain: str) -> bool:
        return self.provider(domain) is not None
