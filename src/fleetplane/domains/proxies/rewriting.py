"""Changing much of a workspace at once: going back to an older version, and bringing in another's export.

Both put together what the workspace should be, judge that as a whole, and write it as one
version. Certificates are never brought back or brought along: their keys do not travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies import clashes, requests, rules
from fleetplane.domains.proxies.clashes import Surroundings
from fleetplane.domains.proxies.hosts import NAME, normal, settings_problems
from fleetplane.domains.proxies.kinds import (
    CERTIFICATE,
    SETTINGS,
    SETTINGS_NAME,
    UPSTREAM,
    VIRTUAL_HOST,
    ConfigVersionSpec,
    SettingsSpec,
    UpstreamSpec,
    VirtualHostSpec,
)
from fleetplane.domains.proxies.names import claim_unique, hold, new_id, refuse, register, unregister
from fleetplane.domains.proxies.values import Location, Value
from fleetplane.domains.proxies.workspaces import Plan, Put, Workspaces
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Draft, Store
from fleetplane.web.paging import in_order
from fleetplane.web.problems import Code, Problem


class BundledUpstream(requests.CreateUpstream, frozen=True, kw_only=True):
    id: str


class BundledHost(requests.CreateVirtualHost, frozen=True, kw_only=True):
    id: str


class BundledCertificate(Value, frozen=True, kw_only=True):
    """Only what tells which one is meant."""

    id: str
    domain: str
    provider: str


class Bundle(Value, frozen=True, kw_only=True):
    """A workspace's configuration as a file: what an export gives and an import takes."""

    format: Literal["fleetplane.proxies/1"]
    settings: requests.PutSettings | UnsetType = UNSET
    upstreams: tuple[BundledUpstream, ...] = ()
    certificates: tuple[BundledCertificate, ...] = ()
    virtual_hosts: tuple[BundledHost, ...] = ()


@dataclass(slots=True, kw_only=True)
class Wanted:
    """What a workspace should be afterwards; objects that are not mentioned stay, or go."""

    hosts: dict[str, VirtualHostSpec] = field(default_factory=dict)
    upstreams: dict[str, UpstreamSpec] = field(default_factory=dict)
    settings: SettingsSpec | None = None


class Rewriting:
    def __init__(self, store: Store, clock: Clock, workspaces: Workspaces) -> None:
        self._store = store
        self._clock = clock
        self._workspaces = workspaces

    # Going back.

    async def restore(self, scope: str, number: int, *, actor: str) -> ConfigVersionSpec:
        """Make the workspace what a version said, under a new number."""
        async with self._workspaces.editing(scope):
            self._workspaces.require(scope)
            version = self._workspaces.version(scope, number)
            if version is None:
                raise NotFound(f"version {number} is not kept")
            wanted = self._as_it_was(scope, version)
            around = self._around(scope, wanted)
            hold(
                f"version {number} mentions what is no longer there",
                (
                    msgspec.structs.replace(problem, field=f"virtual_hosts.{identity}.{problem.field}")
                    for identity, spec in wanted.hosts.items()
                    for problem in rules.host_problems(spec, around)
                ),
            )
            plan = self._workspaces.plan(scope, cause="config.rollback", subject=str(number), actor=actor)
            plan.restored_version = number
            self._replace_all(scope, plan, wanted)
            await self._workspaces.commit(scope, plan)
            newest = self._workspaces.newest(scope)
            assert newest is not None
            return newest

    def _as_it_was(self, scope: str, version: ConfigVersionSpec) -> Wanted:
        wanted = Wanted(settings=SettingsSpec())
        for identity, name in version.virtual_hosts.items():
            part = self._workspaces.part(scope, name)
            assert part is not None
            assert part.virtual_host is not None
            wanted.hosts[identity] = part.virtual_host
        for identity, name in version.upstreams.items():
            part = self._workspaces.part(scope, name)
            assert part is not None
            assert part.upstream is not None
            wanted.upstreams[identity] = part.upstream
        if version.settings and (part := self._workspaces.part(scope, version.settings)):
            wanted.settings = part.settings
        return wanted

    def _around(self, scope: str, wanted: Wanted) -> Surroundings:
        now = self._workspaces.surroundings(scope)
        return Surroundings(
            virtual_hosts={},
            upstreams=wanted.upstreams.keys(),
            certificates=now.certificates,
            agents=now.agents,
        )

    def _replace_all(self, scope: str, plan: Plan, wanted: Wanted) -> None:
        plan.deletes.extend(
            host for host in self._store.list(VIRTUAL_HOST, scope) if host.name not in wanted.hosts
        )
        plan.deletes.extend(
            upstream
            for upstream in self._store.list(UPSTREAM, scope)
            if upstream.name not in wanted.upstreams
        )
        self._write(scope, plan, wanted)

    def _write(self, scope: str, plan: Plan, wanted: Wanted) -> None:
        """Puts and claims for everything wanted, and the release of what the deleted held."""
        going = [(gone.kind, gone.name) for gone in plan.deletes]
        plan.also.append(lambda draft: _release(draft, scope, going))
        self._put(scope, plan, VIRTUAL_HOST, wanted.hosts)
        self._put(scope, plan, UPSTREAM, wanted.upstreams)
        plan.also.append(lambda draft: _rename(draft, scope, wanted.upstreams))
        if wanted.settings is not None:
            before = self._store.get(SETTINGS, scope, SETTINGS_NAME)
            plan.puts.append(Put(kind=SETTINGS, name=SETTINGS_NAME, spec=wanted.settings, before=before))

    def _put(self, scope: str, plan: Plan, kind: AnyKind, specs: Mapping[str, object]) -> None:
        for identity, spec in specs.items():
            before = self._store.get(kind, scope, identity)
            plan.puts.append(Put(kind=kind, name=identity, spec=spec, before=before))
            if before is None:
                plan.also.append(_registering(kind, scope, identity))

    # Bringing in.

    def export(self, scope: str) -> Bundle:
        settings = self._store.get(SETTINGS, scope, SETTINGS_NAME)
        spec = settings.spec if settings is not None else SettingsSpec()
        return Bundle(
            format="fleetplane.proxies/1",
            settings=requests.PutSettings(nginx_directives=spec.nginx_directives, env_vars=spec.env_vars),
            upstreams=tuple(
                BundledUpstream(id=one.name, **_fields(one.spec))
                for one in in_order(self._store.list(UPSTREAM, scope))
            ),
            certificates=tuple(
                BundledCertificate(id=one.name, domain=one.spec.domain, provider=one.spec.provider)
                for one in in_order(self._store.list(CERTIFICATE, scope))
            ),
            virtual_hosts=tuple(
                BundledHost(id=one.name, **_fields(one.spec))
                for one in in_order(self._store.list(VIRTUAL_HOST, scope))
            ),
        )

    async def bring_in(self, scope: str, bundle: Bundle, *, dry_run: bool, actor: str) -> Outcome:
        """Add and change what the bundle names; upstreams and hosts are known again by their name."""
        async with self._workspaces.editing(scope):
            self._workspaces.require(scope)
            wanted, outcome = self._translated(scope, bundle)
            refuse(self._import_problems(scope, wanted, bundle))
            plan = self._workspaces.plan(scope, cause="config.import", subject="", actor=actor)
            self._write(scope, plan, wanted)
            if not dry_run:
                await self._workspaces.commit(scope, plan)
            newest = self._workspaces.newest(scope)
            return msgspec.structs.replace(outcome, version=newest.version if newest else 0, dry_run=dry_run)

    def _translated(self, scope: str, bundle: Bundle) -> tuple[Wanted, Outcome]:
        upstreams = {one.spec.name: one.name for one in self._store.list(UPSTREAM, scope)}
        hosts = {one.spec.name: one.name for one in self._store.list(VIRTUAL_HOST, scope)}
        certificates = self._certificates(scope, bundle)
        ids = {one.id: upstreams.get(one.name) or new_id(self._clock) for one in bundle.upstreams}
        wanted = Wanted(upstreams={ids[one.id]: one.spec() for one in bundle.upstreams})
        for host in bundle.virtual_hosts:
            identity = hosts.get(host.name) or new_id(self._clock)
            wanted.hosts[identity] = _pointing(host.spec(), ids, certificates)
        if bundle.settings is not UNSET:
            wanted.settings = SettingsSpec(
                nginx_directives=bundle.settings.nginx_directives, env_vars=bundle.settings.env_vars
            )
        known = sum(one.name in upstreams for one in bundle.upstreams)
        known += sum(one.name in hosts for one in bundle.virtual_hosts)
        total = len(bundle.upstreams) + len(bundle.virtual_hosts)
        return wanted, Outcome(created=total - known, updated=known, version=0, dry_run=False)

    def _certificates(self, scope: str, bundle: Bundle) -> dict[str, str]:
        """From the bundle's certificates to ours: the same one, or one for the same domain."""
        here = self._store.list(CERTIFICATE, scope)
        by_domain = {one.spec.domain: one.name for one in here}
        ours = {one.name for one in here}
        return {
            one.id: one.id if one.id in ours else by_domain.get(one.domain.lower(), one.id)
            for one in bundle.certificates
        }

    def _import_problems(self, scope: str, wanted: Wanted, bundle: Bundle) -> Iterator[Problem]:
        now = self._workspaces.surroundings(scope)
        for index, upstream in enumerate(wanted.upstreams.values()):
            yield from _under(f"upstreams.{index}", rules.upstream_problems(upstream))
        final = {**now.virtual_hosts, **wanted.hosts}
        if len(final) > rules.HOSTS_PER_WORKSPACE:
            yield Problem(field="virtual_hosts", message="More than a workspace holds", code=Code.TOO_MANY)
        if len({*now.upstreams, *wanted.upstreams}) > rules.UPSTREAMS_PER_WORKSPACE:
            yield Problem(field="upstreams", message="More than a workspace holds", code=Code.TOO_MANY)
        if len(wanted.upstreams) < len(bundle.upstreams) or len(wanted.hosts) < len(bundle.virtual_hosts):
            yield Problem(field="", message="A name is given twice", code=Code.NOT_UNIQUE)
        for index, (identity, host) in enumerate(wanted.hosts.items()):
            around = Surroundings(
                virtual_hosts={name: spec for name, spec in final.items() if name != identity},
                upstreams={*now.upstreams, *wanted.upstreams},
                certificates=now.certificates,
                agents=now.agents,
            )
            found = list(rules.host_problems(host, around)) or list(clashes.host_clashes(host, around))
            yield from _under(f"virtual_hosts.{index}", found)
        if wanted.settings is not None:
            yield from _under("settings", settings_problems(wanted.settings))


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of an import."""

    created: int
    updated: int
    version: int
    dry_run: bool


def _registering(kind: AnyKind, scope: str, identity: str) -> Callable[[Draft], None]:
    return lambda draft: register(draft, kind, scope, identity)


def _release(draft: Draft, scope: str, going: list[tuple[str, str]]) -> None:
    for kind in (VIRTUAL_HOST, UPSTREAM):
        for name in [name for of, name in going if of == kind.name]:
            unregister(draft, kind, scope, name)
            if kind is UPSTREAM and (gone := draft.get(UPSTREAM, scope, name)) is not None:
                draft.release(UPSTREAM, scope, NAME, gone.spec.name, name)


def _rename(draft: Draft, scope: str, upstreams: Mapping[str, UpstreamSpec]) -> None:
    """All old names first: two upstreams may have swapped theirs."""
    for identity, spec in upstreams.items():
        current = draft.get(UPSTREAM, scope, identity)
        if current is not None and current.spec.name != spec.name:
            draft.release(UPSTREAM, scope, NAME, current.spec.name, identity)
    for identity, spec in upstreams.items():
        claim_unique(draft, UPSTREAM, scope, NAME, spec.name, identity)


def _pointing(
    spec: VirtualHostSpec, upstreams: Mapping[str, str], certificates: Mapping[str, str]
) -> VirtualHostSpec:
    """A host whose references are ours."""

    def moved(location: Location) -> Location:
        if location.upstream_id is UNSET:
            return location
        identity = upstreams.get(location.upstream_id, location.upstream_id)
        return msgspec.structs.replace(location, upstream_id=identity)

    certificate = spec.ssl_certificate_id
    return normal(
        msgspec.structs.replace(
            spec,
            locations=tuple(moved(location) for location in spec.locations),
            ssl_certificate_id=certificates.get(certificate, certificate) if certificate else None,
        )
    )


def _fields(spec: UpstreamSpec | VirtualHostSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__struct_fields__}


def _under(field: str, problems: Iterator[Problem] | list[Problem]) -> Iterator[Problem]:
    for problem in problems:
        yield msgspec.structs.replace(problem, field=f"{field}.{problem.field}".rstrip("."))
