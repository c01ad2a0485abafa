"""Changing much of a workspace at once: going back to an older version, and bringing in another's export.

Both put together what the workspace should be, judge that as a whole, and write it as one
version. Certificates are never brought back or brought along: their keys do not travel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import msgspec
from msgspec import UNSET

from fleetplane.domains.proxies.kinds.passwords import (
    list_sealed,
    list_with_known_passwords,
    with_known_passwords,
)
from fleetplane.domains.proxies.kinds.records import (
    ACCESS_LIST,
    CERTIFICATE,
    SETTINGS,
    SETTINGS_NAME,
    STREAM,
    UPSTREAM,
    VIRTUAL_HOST,
    AccessListSpec,
    ConfigVersionSpec,
    SettingsSpec,
    StreamSpec,
    UpstreamSpec,
    VirtualHostSpec,
)
from fleetplane.domains.proxies.kinds.unique import claim_unique, hold, refuse, register, unregister
from fleetplane.domains.proxies.rest import bodies as requests
from fleetplane.domains.proxies.rules import conflicts as clashes
from fleetplane.domains.proxies.rules import raw_text
from fleetplane.domains.proxies.rules import validation as rules
from fleetplane.domains.proxies.rules.access import list_problems
from fleetplane.domains.proxies.rules.configuration import authorities_of, upstream_authorities
from fleetplane.domains.proxies.rules.conflicts import HostNeighbours, WorkspaceSurroundings
from fleetplane.domains.proxies.rules.content import cache_room_problems
from fleetplane.domains.proxies.rules.raw_text import RawRight
from fleetplane.domains.proxies.rules.streams import (
    STREAMS_PER_WORKSPACE,
    host_and_stream_clashes,
    stream_clashes,
    stream_problems,
    upstream_of_streams_problems,
)
from fleetplane.domains.proxies.serving import bundles
from fleetplane.domains.proxies.serving.basis import decided_again
from fleetplane.domains.proxies.serving.bundles import (
    Bundle,
    BundledAccessList,
    BundledCertificate,
    BundledHost,
    BundledStream,
    BundledUpstream,
)
from fleetplane.domains.proxies.serving.hosts import sealing, settings_problems
from fleetplane.domains.proxies.serving.named import NAME
from fleetplane.domains.proxies.serving.workspaces import PutObject, WorkspacePlan, Workspaces
from fleetplane.fleet.masking import masked_values
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.web.rest.pages import in_order
from fleetplane.web.rest.problems import Code, Problem

PROBLEMS_LIMIT = 100
"""Problems reported of one import; further ones are reported once these are fixed."""


@dataclass(slots=True, kw_only=True)
class WantedWorkspace:
    """What a workspace should be afterwards; objects that are not mentioned stay, or go."""

    hosts: dict[str, VirtualHostSpec] = field(default_factory=dict)
    upstreams: dict[str, UpstreamSpec] = field(default_factory=dict)
    settings: SettingsSpec | None = None
    access_lists: dict[str, AccessListSpec] = field(default_factory=dict)
    streams: dict[str, StreamSpec] = field(default_factory=dict)


class Rewriting:
    def __init__(self, store: Store, clock: Clock, workspaces: Workspaces) -> None:
        self._store = store
        self._clock = clock
        self._workspaces = workspaces

    # Going back.

    @decided_again
    async def restore(
        self, scope: str, number: int, *, actor: str, raw: RawRight | None = None
    ) -> ConfigVersionSpec:
        """Make the workspace what a version said, under a new number.

        `raw` decides inside the transaction about raw text that would come or go with it.
        """
        async with self._workspaces.editing(scope):
            self._workspaces.require(scope)
            version = self._workspaces.version(scope, number)
            if version is None:
                raise NotFound(f"version {number} is not kept")
            wanted = self._as_it_was(scope, version)
            around = self._around(scope, wanted)
            hold(
                f"version {number} mentions what is no longer there",
                [
                    *(
                        msgspec.structs.replace(problem, field=f"virtual_hosts.{identity}.{problem.field}")
                        for identity, spec in wanted.hosts.items()
                        for problem in rules.host_problems(spec, around)
                    ),
                    *(
                        msgspec.structs.replace(problem, field=f"streams.{identity}.{problem.field}")
                        for identity, stream in wanted.streams.items()
                        for problem in stream_problems(stream, around)
                    ),
                ],
            )
            plan = self._workspaces.plan(scope, cause="config.rollback", subject=str(number), actor=actor)
            plan.restored_version = number
            self._replace_all(scope, plan, wanted)
            if raw is not None:
                plan.also.insert(0, _deciding(raw, scope, plan, wanted))
            await self._workspaces.commit(scope, plan)
            newest = self._workspaces.newest(scope)
            assert newest is not None
            return newest

    def _as_it_was(self, scope: str, version: ConfigVersionSpec) -> WantedWorkspace:
        wanted = WantedWorkspace(settings=SettingsSpec())
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
        for identity, name in version.access_lists.items():
            part = self._workspaces.part(scope, name)
            assert part is not None
            assert part.access_list
            wanted.access_lists[identity] = part.access_list
        for identity, name in version.streams.items():
            part = self._workspaces.part(scope, name)
            assert part is not None
            assert part.stream
            wanted.streams[identity] = part.stream
        if version.settings and (part := self._workspaces.part(scope, version.settings)):
            wanted.settings = part.settings
        return wanted

    def _around(self, scope: str, wanted: WantedWorkspace) -> WorkspaceSurroundings:
        now = self._workspaces.surroundings(scope)
        return WorkspaceSurroundings(
            virtual_hosts={},
            upstreams=wanted.upstreams.keys(),
            upstream_specs=wanted.upstreams,
            stream_ports=now.stream_ports,
            certificates=now.certificates,
            access_lists=wanted.access_lists.keys(),
            agents=now.agents,
            capabilities=now.capabilities,
        )

    def _replace_all(self, scope: str, plan: WorkspacePlan, wanted: WantedWorkspace) -> None:
        plan.deletes.extend(
            host for host in self._store.list(VIRTUAL_HOST, scope) if host.name not in wanted.hosts
        )
        plan.deletes.extend(
            upstream
            for upstream in self._store.list(UPSTREAM, scope)
            if upstream.name not in wanted.upstreams
        )
        plan.deletes.extend(
            one for one in self._store.list(ACCESS_LIST, scope) if one.name not in wanted.access_lists
        )
        plan.deletes.extend(one for one in self._store.list(STREAM, scope) if one.name not in wanted.streams)
        self._write(scope, plan, wanted)

    def _write(self, scope: str, plan: WorkspacePlan, wanted: WantedWorkspace) -> None:
        """Puts and claims for everything wanted, and the release of what the deleted held."""
        going = [(gone.kind, gone.name) for gone in plan.deletes]
        plan.also.append(lambda draft: _release(draft, scope, going))
        self._put(scope, plan, VIRTUAL_HOST, wanted.hosts)
        self._put(scope, plan, UPSTREAM, wanted.upstreams)
        self._put(scope, plan, ACCESS_LIST, wanted.access_lists)
        self._put(scope, plan, STREAM, wanted.streams)
        plan.also.append(lambda draft: _rename(draft, UPSTREAM, scope, wanted.upstreams))
        plan.also.append(lambda draft: _rename(draft, ACCESS_LIST, scope, wanted.access_lists))
        plan.also.append(lambda draft: _rename(draft, STREAM, scope, wanted.streams))
        if wanted.settings is not None:
            before = self._store.get(SETTINGS, scope, SETTINGS_NAME)
            plan.puts.append(
                PutObject(kind=SETTINGS, name=SETTINGS_NAME, spec=wanted.settings, before=before)
            )

    def _put(self, scope: str, plan: WorkspacePlan, kind: AnyKind, specs: Mapping[str, object]) -> None:
        for identity, spec in specs.items():
            before = self._store.get(kind, scope, identity)
            plan.puts.append(PutObject(kind=kind, name=identity, spec=spec, before=before))
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
            access_lists=tuple(
                BundledAccessList(id=one.name, **_fields(one.spec))
                for one in in_order(self._store.list(ACCESS_LIST, scope))
            )
            or UNSET,
            streams=tuple(
                BundledStream(id=one.name, **_fields(one.spec))
                for one in in_order(self._store.list(STREAM, scope))
            )
            or UNSET,
            virtual_hosts=tuple(
                BundledHost(id=one.name, **_fields(one.spec))
                for one in in_order(self._store.list(VIRTUAL_HOST, scope))
            ),
        )

    @decided_again
    async def bring_in(
        self, scope: str, bundle: Bundle, *, dry_run: bool, actor: str, raw: RawRight | None = None
    ) -> ImportOutcome:
        """Add and change what the bundle names; upstreams and hosts are known again by their name."""
        async with self._workspaces.editing(scope):
            self._workspaces.require(scope)
            refuse(_too_many(len(bundle.virtual_hosts), len(bundle.upstreams)))
            wanted, outcome = self._translated(scope, bundle)
            now = self._workspaces.surroundings(scope)
            refuse(
                _too_many(
                    len(now.virtual_hosts.keys() | wanted.hosts.keys()),
                    len({*now.upstreams, *wanted.upstreams}),
                )
            )
            # A full workspace takes a while to judge, in which everybody else has to be served.
            refuse(await asyncio.to_thread(_judged, now, wanted, bundle))
            wanted.access_lists = {
                identity: await asyncio.to_thread(list_sealed, spec)
                for identity, spec in wanted.access_lists.items()
            }
            wanted.hosts = {identity: await sealing(spec) for identity, spec in wanted.hosts.items()}
            plan = self._workspaces.plan(scope, cause="config.import", subject="", actor=actor)
            self._write(scope, plan, wanted)
            if raw is not None:
                plan.also.insert(0, _deciding(raw, scope, plan, wanted))
            if not dry_run:
                await self._workspaces.commit(scope, plan)
            newest = self._workspaces.newest(scope)
            return msgspec.structs.replace(outcome, version=newest.version if newest else 0, dry_run=dry_run)

    def _translated(self, scope: str, bundle: Bundle) -> tuple[WantedWorkspace, ImportOutcome]:
        upstreams = {one.spec.name: one.name for one in self._store.list(UPSTREAM, scope)}
        hosts = {one.spec.name: one.name for one in self._store.list(VIRTUAL_HOST, scope)}
        certificates = self._certificates(scope, bundle)
        ids = {one.id: upstreams.get(one.name) or new_uuid(self._clock) for one in bundle.upstreams}
        wanted = WantedWorkspace(
            upstreams={ids[one.id]: bundles.securing(one.spec(), certificates) for one in bundle.upstreams}
        )
        self._list_ids(scope, bundle, wanted)
        for host in bundle.virtual_hosts:
            identity = hosts.get(host.name) or new_uuid(self._clock)
            before = self._store.get(VIRTUAL_HOST, scope, identity)
            spec = bundles.listing(
                bundles.pointing(host.spec(), ids, certificates), self._list_ids(scope, bundle, wanted)
            )
            wanted.hosts[identity] = with_known_passwords(spec, before.spec if before is not None else None)
        streams = {one.spec.name: one.name for one in self._store.list(STREAM, scope)}
        for stream in bundle.streams or ():
            identity = streams.get(stream.name) or new_uuid(self._clock)
            wanted.streams[identity] = bundles.streaming(stream.spec(), ids)
        if bundle.settings is not UNSET:
            wanted.settings = SettingsSpec(
                nginx_directives=bundle.settings.nginx_directives, env_vars=bundle.settings.env_vars
            )
        known = sum(one.name in upstreams for one in bundle.upstreams)
        known += sum(one.name in hosts for one in bundle.virtual_hosts)
        known += sum(one.name in streams for one in bundle.streams or ())
        total = len(bundle.upstreams) + len(bundle.virtual_hosts) + len(bundle.streams or ())
        return wanted, ImportOutcome(created=total - known, updated=known, version=0, dry_run=False)

    def _list_ids(self, scope: str, bundle: Bundle, wanted: WantedWorkspace) -> dict[str, str]:
        """From the bundle's access lists to ours, which are known again by their name."""
        here = {one.spec.name: one for one in self._store.list(ACCESS_LIST, scope)}
        ids = {}
        for one in bundle.access_lists or ():
            known = here.get(one.name)
            taken = next((name for name, spec in wanted.access_lists.items() if spec.name == one.name), "")
            ids[one.id] = identity = taken or (known.name if known else new_uuid(self._clock))
            spec = one.spec()
            wanted.access_lists[identity] = (
                list_with_known_passwords(spec, known.spec) if known is not None else spec
            )
        return ids

    def _certificates(self, scope: str, bundle: Bundle) -> dict[str, str]:
        """From the bundle's certificates to ours: the same one, or one for the same domain."""
        here = self._store.list(CERTIFICATE, scope)
        by_domain = {one.spec.domain: one.name for one in here}
        ours = {one.name for one in here}
        return {
            one.id: one.id if one.id in ours else by_domain.get(one.domain.lower(), one.id)
            for one in bundle.certificates
        }


def _too_many(hosts: int, upstreams: int) -> Iterator[Problem]:
    for section, count, limit in (
        ("virtual_hosts", hosts, rules.HOSTS_PER_WORKSPACE),
        ("upstreams", upstreams, rules.UPSTREAMS_PER_WORKSPACE),
    ):
        if count > limit:
            message = f"{count}, more than the {limit} that a workspace holds"
            yield Problem(field=section, message=message, code=Code.TOO_MANY)


def _judged(now: WorkspaceSurroundings, wanted: WantedWorkspace, bundle: Bundle) -> list[Problem]:
    """What is wrong with a bundle, up to a bound: nobody reads more at once. Pure."""
    return list(islice(_import_problems(now, wanted, bundle), PROBLEMS_LIMIT))


def _import_problems(
    now: WorkspaceSurroundings, wanted: WantedWorkspace, bundle: Bundle
) -> Iterator[Problem]:
    for index, upstream in enumerate(wanted.upstreams.values()):
        yield from _under(f"upstreams.{index}", rules.upstream_problems(upstream, now.certificates))
    if len(wanted.upstreams) < len(bundle.upstreams) or len(wanted.hosts) < len(bundle.virtual_hosts):
        yield Problem(field="", message="A name is given twice", code=Code.NOT_UNIQUE)
    yield from masked_values(bundle)
    yield from _missing_certificates(now, wanted, bundle)
    every = {**now.virtual_hosts, **wanted.hosts}
    yield from cache_room_problems(every.values(), "virtual_hosts")
    neighbours = HostNeighbours(every)
    upstreams = frozenset({*now.upstreams, *wanted.upstreams})
    lists = frozenset({*now.access_lists, *wanted.access_lists})
    for index, one in enumerate(wanted.access_lists.values()):
        yield from _under(f"access_lists.{index}", list_problems(one))
    for index, (identity, host) in enumerate(wanted.hosts.items()):
        around = WorkspaceSurroundings(
            virtual_hosts=neighbours.of(identity, host),
            upstreams=upstreams,
            certificates=now.certificates,
            access_lists=lists,
            agents=now.agents,
            capabilities=now.capabilities,
        )
        found = list(rules.host_problems(host, around)) or list(clashes.host_clashes(host, around))
        yield from _under(f"virtual_hosts.{index}", found)
    yield from _stream_problems(now, wanted, bundle)
    if wanted.settings is not None:
        yield from _under("settings", settings_problems(wanted.settings))


def _missing_certificates(
    now: WorkspaceSurroundings, wanted: WantedWorkspace, bundle: Bundle
) -> Iterator[Problem]:
    """Certificates come by reference: those that something needs have to be in the workspace already."""
    needed: set[str | None] = {spec.ssl_certificate_id for spec in wanted.hosts.values()}
    needed |= {one for spec in wanted.hosts.values() for one in authorities_of(spec)}
    for group in wanted.upstreams.values():
        needed |= {*upstream_authorities(group)}
        needed |= {group.tls.client_certificate_id or None} if group.tls else set()
    for index, one in enumerate(bundle.certificates):
        if one.id in needed and one.id not in now.certificates:
            yield Problem(
                field=f"certificates.{index}",
                message=f"This workspace has no certificate for {one.domain}: import or request it first",
                code=Code.UNKNOWN_REFERENCE,
            )


def _stream_problems(
    now: WorkspaceSurroundings, wanted: WantedWorkspace, bundle: Bundle
) -> Iterator[Problem]:
    """Streams of a bundle against everything that there will be."""
    every = {**now.streams, **wanted.streams}
    if len(every) > STREAMS_PER_WORKSPACE:
        message = f"{len(every)}, more than the {STREAMS_PER_WORKSPACE} that a workspace holds"
        yield Problem(field="streams", message=message, code=Code.TOO_MANY)
        return
    if len(wanted.streams) < len(bundle.streams or ()):
        yield Problem(field="streams", message="A name is given twice", code=Code.NOT_UNIQUE)
    specs = {**now.upstream_specs, **wanted.upstreams}
    hosts = {**now.virtual_hosts, **wanted.hosts}
    for index, (identity, upstream) in enumerate(wanted.upstreams.items()):
        yield from _under(f"upstreams.{index}", upstream_of_streams_problems(identity, upstream, now.streams))
    if not every:
        return
    around = replace(now, virtual_hosts=hosts, upstreams=specs.keys(), upstream_specs=specs)
    staying = {one: spec for one, spec in every.items() if one not in wanted.streams}
    for index, host in enumerate(wanted.hosts.values()):
        others = replace(around, streams=staying)
        yield from _under(f"virtual_hosts.{index}", host_and_stream_clashes(host, others))
    for index, (identity, stream) in enumerate(wanted.streams.items()):
        others = replace(around, streams={one: spec for one, spec in every.items() if one != identity})
        found = list(stream_problems(stream, others)) or list(stream_clashes(stream, others))
        yield from _under(f"streams.{index}", found)


class ImportOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an import."""

    created: int
    updated: int
    version: int
    dry_run: bool


def _registering(kind: AnyKind, scope: str, identity: str) -> Callable[[Draft], None]:
    return lambda draft: register(draft, kind, scope, identity)


def _deciding(
    raw: RawRight, scope: str, plan: WorkspacePlan, wanted: WantedWorkspace
) -> Callable[[Draft], None]:
    gone = [one.name for one in plan.deletes if one.kind == VIRTUAL_HOST.name]

    def decide(draft: Draft) -> None:
        for identity in gone:
            raw_text.decide_host(draft, raw, scope, identity, None)
        for identity, spec in wanted.hosts.items():
            raw_text.decide_host(draft, raw, scope, identity, spec)
        raw_text.decide_names(draft, raw, scope, wanted.hosts)
        if wanted.settings is not None:
            raw_text.decide_settings(draft, raw, scope, wanted.settings)

    return decide


def _release(draft: Draft, scope: str, going: list[tuple[str, str]]) -> None:
    kinds: tuple[AnyKind, ...] = (VIRTUAL_HOST, UPSTREAM, ACCESS_LIST, STREAM)
    for kind in kinds:
        for name in [name for of, name in going if of == kind.name]:
            unregister(draft, kind, scope, name)
            if kind is not VIRTUAL_HOST and (gone := draft.get(kind, scope, name)) is not None:
                draft.release(kind, scope, NAME, gone.spec.name, name)


def _rename(
    draft: Draft,
    kind: AnyKind,
    scope: str,
    wanted: Mapping[str, UpstreamSpec] | Mapping[str, AccessListSpec] | Mapping[str, StreamSpec],
) -> None:
    """All old names first: two upstreams may have swapped theirs."""
    for identity, spec in wanted.items():
        current = draft.get(kind, scope, identity)
        if current is not None and current.spec.name != spec.name:
            draft.release(kind, scope, NAME, current.spec.name, identity)
    for identity, spec in wanted.items():
        claim_unique(draft, kind, scope, NAME, spec.name, identity)


def _fields(spec: UpstreamSpec | VirtualHostSpec | AccessListSpec | StreamSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__struct_fields__}


def _under(field: str, problems: Iterator[Problem] | list[Problem]) -> Iterator[Problem]:
    for problem in problems:
        yield msgspec.structs.replace(problem, field=f"{field}.{problem.field}".rstrip("."))
