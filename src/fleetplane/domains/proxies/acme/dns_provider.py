"""Proof of a domain over DNS: the zones file, the writer of TXT records, and the wait for their propagation.

What the authority reads is a TXT record beside others of the same name: a wildcard and its parent are proved
at the same time under one name. Records are written by dns-lexicon, whose libraries are loaded for the first
order. Propagation is asked of the zone's authoritative servers only: a resolver in between may answer from a
cache, or from a view of the zone that nobody outside has.

The zones file is TOML and separate from the settings because it holds credentials:

    ["example.com"]
    provider = "cloudflare"
    workspaces = "ID, ID"
    auth_token = "..."

`workspaces` are the ids of the workspaces that may get certificates for names in the zone; "*" means every
workspace. The other keys are the options that dns-lexicon defines for the provider.
"""

from __future__ import annotations

import asyncio
import importlib.util
import stat
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fleetplane.domains.proxies.acme.orders import IssuanceFailed
from fleetplane.domains.proxies.acme.workers import AcmeWorkers
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import SettingsError

WAIT_SECONDS = 180.0
"""Secondary servers usually follow within a minute."""
POLL_SECONDS = 2.0
Server = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneOptions:
    """One zone at one DNS provider; `options` are dns-lexicon's for it, such as `auth_token`."""

    provider: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    workspaces: frozenset[str] | None = None
    """Whose names it proves; None for everyone's."""


class Propagation:
    def __init__(
        self,
        clock: Clock,
        *,
        servers: Sequence[Server] = (),
        wait_seconds: float = WAIT_SECONDS,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """`servers` are asked instead of looking for those of the zone."""
        self._clock = clock
        self._servers = tuple(servers)
        self._wait_seconds = wait_seconds
        self._poll_seconds = poll_seconds

    async def wait(self, name: str, values: Collection[str]) -> None:
        """Until every server shows every value."""
        from fleetplane.domains.proxies.acme import dns_queries

        servers = self._servers or await dns_queries.authoritative(name)
        deadline = self._clock.monotonic() + self._wait_seconds
        behind = list(servers)
        while True:
            shown = await asyncio.gather(*(dns_queries.texts(server, name) for server in behind))
            behind = [
                server
                for server, texts in zip(behind, shown, strict=True)
                if texts is None or not texts.issuperset(values)
            ]
            if not behind:
                return
            if self._clock.monotonic() >= deadline:
                late = ", ".join(address for address, _ in behind)
                raise IssuanceFailed(f"the record {name} did not appear at {late} in time")
            await self._clock.sleep(self._poll_seconds)


def read_zones(path: Path) -> dict[str, ZoneOptions]:
    """The zones in `path`; refused where the library that speaks to DNS providers is not installed."""
    if importlib.util.find_spec("lexicon") is None:
        raise SettingsError(
            "proxies.dns_zones_file: DNS providers are spoken to through dns-lexicon, which is not installed",
            hint="pip install 'fleetplane[dns]'",
        )
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"proxies.dns_zones_file: cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"proxies.dns_zones_file: {path} is not TOML: {error}") from error
    if mode & 0o077:
        raise SettingsError(
            f"proxies.dns_zones_file: {path} can be read by others (mode {mode:04o})",
            hint=f"chmod 600 {path}",
        )
    return {zone: _options(path, zone, table) for zone, table in document.items()}


def _options(path: Path, zone: str, table: object) -> ZoneOptions:
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise SettingsError(f'{path}: "{zone}" must be a table of texts')
    options = dict(table)
    provider = options.pop("provider", "")
    if not provider:
        raise SettingsError(f'{path}: "{zone}" must name its provider')
    allowed = frozenset(filter(None, (part.strip() for part in options.pop("workspaces", "").split(","))))
    if not allowed:
        raise SettingsError(
            f'{path}: "{zone}" must name its workspaces in `workspaces`',
            hint='workspaces = "*" means everyone',
        )
    return ZoneOptions(provider=provider, options=options, workspaces=None if "*" in allowed else allowed)


TTL_SECONDS = 120
"""The shortest that most providers accept."""


class LexiconDns:
    """One zone at one provider.

    The zone is what the operator said. The library's own client would guess it instead, with a
    list that it downloads without a time limit; so its providers are used without that client.
    """

    def __init__(self, workers: AcmeWorkers, *, provider: str, zone: str, options: Mapping[str, str]) -> None:
        self._workers = workers
        self._provider = provider
        self._zone = zone.rstrip(".").lower()
        self._options = dict(options)

    def __repr__(self) -> str:
        return f"<LexiconDns {self._provider} {self._zone}>"

    async def present(self, name: str, value: str) -> None:
        await self._run(lambda provider: provider.create_record("TXT", name.rstrip("."), value))

    async def clear(self, name: str, value: str) -> None:
        await self._run(
            lambda provider: provider.delete_record(rtype="TXT", name=name.rstrip("."), content=value)
        )

    async def _run(self, call: Callable[[Any], Any]) -> None:
        try:
            await self._workers.run(self._call, call)
        except Exception as error:  # each provider has errors of its own, and no common base
            raise IssuanceFailed(
                f"the DNS provider {self._provider} refused: {type(error).__name__}: {error}"
            ) from error

    def _call(self, call: Callable[[Any], Any]) -> None:
        from lexicon._private.discovery import load_provider_module
        from lexicon.config import ConfigResolver

        settings = {
            "provider_name": self._provider,
            "domain": self._zone,
            "ttl": TTL_SECONDS,
            self._provider: self._options,
        }
        resolver = ConfigResolver().with_dict(settings)  # type: ignore[no-untyped-call]
        provider = load_provider_module(self._provider).Provider(resolver)
        provider.authenticate()
        try:
            call(provider)
        finally:
            provider.cleanup()


def known_provider(name: str) -> bool:
    """Whether the library has it, with all that it needs. Slow: looks at installed packages."""
    from lexicon._private.discovery import find_providers

    return find_providers().get(name, False)


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
