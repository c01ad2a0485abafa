"""DNS zones of a workspace, with the credentials that prove its wildcards.

A zone proves names of its own workspace and nobody else's. Credentials are sealed under the master key in the
transaction that makes the zone known, opened for an order and nothing else, and returned by no API. Only
providers are taken that have one address each, and only the options that say who is asking: a tenant must not
make the server speak to hosts of the tenant's choice.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from fleetplane.domains.proxies.kinds.records import DNS_ZONE, DnsZone, DnsZoneSpec
from fleetplane.domains.proxies.kinds.unique import check_match, claim_unique, refuse, register, unregister
from fleetplane.domains.proxies.rules.validation import domain_problems
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.web.rest.problems import Code, Problem

ZONE: Final = "zone"
ZONES_PER_WORKSPACE: Final = 50
CREDENTIAL_LIMIT: Final = 512
"""Characters of one option."""
_PRINTABLE: Final = re.compile(r"[\x21-\x7e]+")

PROVIDERS: Final[Mapping[str, frozenset[str]]] = {
    "cloudflare": frozenset({"auth_token"}),
    "digitalocean": frozenset({"auth_token"}),
    "dnsimple": frozenset({"auth_token"}),
    "dnsmadeeasy": frozenset({"auth_username", "auth_token"}),
    "godaddy": frozenset({"auth_key", "auth_secret"}),
    "hetzner": frozenset({"auth_token"}),
    "linode4": frozenset({"auth_token"}),
    "nsone": frozenset({"auth_token"}),
    "porkbun": frozenset({"auth_key", "auth_secret"}),
    "route53": frozenset({"auth_access_key", "auth_access_secret"}),
    "scaleway": frozenset({"auth_secret_key"}),
    "vultr": frozenset({"auth_token"}),
}
"""dns-lexicon's names, and the options that each needs; no others are taken."""


class DnsZoneRecords:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        workspaces: Workspaces,
        master: MasterKey,
        *,
        providers: Mapping[str, frozenset[str]] = PROVIDERS,
    ) -> None:
        self._store = store
        self._clock = clock
        self._workspaces = workspaces
        self._master = master
        self._providers = providers

    def get(self, scope: str, identity: str) -> DnsZone:
        found = self._store.get(DNS_ZONE, scope, identity)
        if found is None:
            raise NotFound("DNS zone not found")
        return found

    async def create(
        self, scope: str, zone: str, provider: str, credentials: Mapping[str, str], *, actor: str
    ) -> DnsZone:
        spec = DnsZoneSpec(zone=zone.lower().rstrip("."), provider=provider)
        refuse([*domain_problems(spec.zone, field="zone"), *_wildcard(spec.zone)])
        refuse(self._problems(provider, credentials))
        identity = new_uuid(self._clock)

        def change(draft: Draft) -> DnsZone:
            self._workspaces.require(scope, at=draft)
            if len(draft.list(DNS_ZONE, scope)) >= ZONES_PER_WORKSPACE:
                message = f"The workspace has {ZONES_PER_WORKSPACE} already"
                refuse([Problem(field="", message=message, code=Code.TOO_MANY)])
            claim_unique(draft, DNS_ZONE, scope, ZONE, spec.zone, identity)
            register(draft, DNS_ZONE, scope, identity)
            self._seal(draft, identity, credentials)
            return draft.put(DNS_ZONE, scope, identity, spec=spec)

        async with self._workspaces.editing(scope):
            done = await self._store.transact(
                change, actor=actor, action="dns_zone.create", touches=[DNS_ZONE.key(scope, identity)]
            )
        return done.value

    async def replace_credentials(
        self,
        scope: str,
        identity: str,
        credentials: Mapping[str, str],
        *,
        if_match: str | None,
        actor: str,
    ) -> DnsZone:
        refuse(self._problems(self.get(scope, identity).spec.provider, credentials))

        def change(draft: Draft) -> DnsZone:
            current = draft.get(DNS_ZONE, scope, identity)
            if current is None:
                raise NotFound("DNS zone not found")
            check_match(if_match, current)
            self._seal(draft, identity, credentials)
            spec = msgspec.structs.replace(current.spec, rotation=current.spec.rotation + 1)
            return draft.put(DNS_ZONE, scope, identity, spec=spec)

        done = await self._store.transact(
            change, actor=actor, action="dns_zone.update", touches=[DNS_ZONE.key(scope, identity)]
        )
        return done.value

    async def delete(self, scope: str, identity: str, *, if_match: str | None, actor: str) -> None:
        def change(draft: Draft) -> None:
            current = draft.get(DNS_ZONE, scope, identity)
            if current is None:
                raise NotFound("DNS zone not found")
            check_match(if_match, current)
            draft.delete(DNS_ZONE, scope, identity)
            draft.release(DNS_ZONE, scope, ZONE, current.spec.zone, identity)
            unregister(draft, DNS_ZONE, scope, identity)
            draft.delete_secret(_secret(identity))

        await self._store.transact(
            change, actor=actor, action="dns_zone.delete", touches=[DNS_ZONE.key(scope, identity)]
        )

    # For orders.

    def find(self, scope: str, domain: str) -> DnsZone | None:
        """The smallest zone of a workspace that a domain lies in."""
        name = domain.lower().removeprefix("*.").rstrip(".")
        zones = {one.spec.zone: one for one in self._store.list(DNS_ZONE, scope)}
        while name:
            if name in zones:
                return zones[name]
            _, _, name = name.partition(".")
        return None

    async def credentials(self, zone: DnsZone) -> Mapping[str, str]:
        """For an order and nothing else: no API returns them."""
        name = _secret(zone.name)
        sealed = await self._store.get_secret(name)
        if sealed is None:
            raise NotFound(f"the credentials of DNS zone {zone.spec.zone} are gone")
        return msgspec.msgpack.decode(self._master.open(sealed, purpose=name), type=dict[str, str])

    def _seal(self, draft: Draft, identity: str, credentials: Mapping[str, str]) -> None:
        name = _secret(identity)
        draft.put_secret(name, self._master.seal(msgspec.msgpack.encode(dict(credentials)), purpose=name))

    def _problems(self, provider: str, credentials: Mapping[str, str]) -> Iterator[Problem]:
        if importlib.util.find_spec("lexicon") is None:
            message = "This server speaks to no DNS provider: the extra `dns` is not installed"
            yield Problem(field="provider", message=message, code=Code.INCOMPATIBLE)
            return
        wanted = self._providers.get(provider)
        if wanted is None:
            yield Problem(field="provider", message=f"Must be one of {', '.join(sorted(self._providers))}")
            return
        if credentials.keys() != wanted:
            needed = ", ".join(sorted(wanted))
            yield Problem(field="credentials", message=f"{provider} needs exactly {needed}")
        for name, value in credentials.items():
            if name in wanted and (len(value) > CREDENTIAL_LIMIT or not _PRINTABLE.fullmatch(value)):
                message = f"Must be 1 to {CREDENTIAL_LIMIT} printable characters without spaces"
                yield Problem(field=f"credentials.{name}", message=message)


def _wildcard(zone: str) -> Iterator[Problem]:
    if zone.startswith("*"):
        yield Problem(field="zone", message="Must be the name of a zone, without `*.`")


def _secret(identity: str) -> str:
    return f"proxies/dns-zone/{identity}"
