"""The configuration in force and the groups that follow from it and from what operators set.

The document lies in object storage. A new one is read, checked whole, and only then put in
force; one that is wrong changes nothing and says what is wrong and where. Which groups exist,
and as what, is computed from document and overrides, and computed anew only when either changed.

Where servers share a database, the document that is in force lies in the store, too: each of them may put
one in force, and all have the same one, at the same place in the log.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from fleetplane.domains.instances.configuration import DocumentProblem, InstancesDocument, check
from fleetplane.domains.instances.configuration.hashes import infra_hash, runtime_hash
from fleetplane.domains.instances.configuration.merge import EffectiveGroup, effective, on_demand
from fleetplane.domains.instances.content.files import names_authority
from fleetplane.domains.instances.credentials import DEFAULT_LIFE_HOURS, OPERATOR_LIFE_HOURS, ClientRole
from fleetplane.domains.instances.kinds import (
    CONFIGURATION,
    GROUP,
    INSTANCE,
    InForce,
    Instance,
    group_scope,
    tenant_of,
    tenant_scope,
)
from fleetplane.domains.instances.records.instances import SERVER, Instances
from fleetplane.domains.instances.records.versions import SUBJECT, at_version, encoded
from fleetplane.domains.instances.rules import quotas
from fleetplane.domains.instances.rules.decide import GroupPolicy
from fleetplane.domains.instances.rules.plans import Rolling
from fleetplane.fleet.rollouts.holds import HoldReader, running
from fleetplane.fleet.rollouts.holds import digest as digest_of
from fleetplane.fleet.rollouts.rules import amounts
from fleetplane.kernel.errors import (
    Conflict,
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from fleetplane.kernel.identity.enrolment import digest
from fleetplane.kernel.objects import Objects
from fleetplane.kernel.resources import Nothing, Resource
from fleetplane.kernel.stalls import StallDetector
from fleetplane.kernel.store import Draft, Store, follow

log = structlog.get_logger(__name__)

PACKED_LIMIT_BYTES = 700_000
"""Of a document in the store, compressed: in its record, which may have 1 MiB, it is a third larger."""
ATTEMPTS = 5
"""To put a document in force while other servers do."""
GroupKey = tuple[str, str]
"""Tenant and group."""
GroupBasis = tuple[str, int]
"""What a view of a group is made from: the document, and the revision of what operators set."""
Holding = Callable[[Mapping[GroupKey, "GroupView"], Mapping[GroupKey, "GroupView"]], Awaitable[None]]
Known = Resource[InForce, Nothing]
Admit = Callable[[InstancesDocument], None]
Guard = Callable[[InstancesDocument, Sequence[Instance]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A document in force."""

    configuration: InstancesDocument
    etag: str
    modified_at_ns: int
    size: int
    path: str
    warnings: tuple[DocumentProblem, ...] = ()
    """What in it has no effect here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshed:
    updated: bool
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A group with the hashes that detect drift."""

    group: EffectiveGroup
    runtime_hash: str
    infra_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SilencePolicy:
    """What is done when many instances fall silent at once; see `silence`."""

    silence_share: float = 0.5
    silence_window_seconds: float = 300.0
    silence_hold_seconds: float = 900.0


class Groups:
    def __init__(
        self,
        store: Store,
        instances: Instances,
        objects: Objects,
        *,
        shard: str,
        drain_on_scale_down: bool,
        silence: SilencePolicy | None = None,
        trust: Callable[[], str] = lambda: "",
        attention: StallDetector | None = None,
        tenant_instances: int = quotas.DEFAULT,
        providers: Collection[str] | None = None,
    ) -> None:
        """`providers` may be named by documents; None: those that are installed.

        `trust` names the authorities that are trusted, once they are others than in the beginning."""
        self._attention = attention
        self._tenant_instances = tenant_instances
        self._providers = providers
        self._store = store
        self._instances = instances
        self._objects = objects
        self._shard = shard
        self._drain_on_scale_down = drain_on_scale_down
        self._silence = silence or SilencePolicy()
        self._admit: Admit = lambda _configuration: None
        self._guard: Guard = lambda _configuration, _instances: None
        self._trust = trust
        self._loaded: Loaded | None = None
        self._unpacked: tuple[int, Loaded | FleetplaneError] | None = None
        """What the store's record of a revision says."""
        self._refreshing = asyncio.Lock()  # guards: what was read earlier never replaces what was read later
        self._views: tuple[tuple[str, int, str], Mapping[GroupKey, GroupView]] | None = None
        self._unresolved: dict[GroupKey, str] = {}
        self._listeners: list[Callable[[set[GroupKey]], None]] = []
        self.holds = HoldReader(store, SUBJECT)
        self._versions: dict[tuple[str, str, str], GroupView] = {}
        """Groups at versions that are kept, by tenant, key and version; as long as `_views` are good."""
        self._holding: Holding | None = None

    def __repr__(self) -> str:
        etag = self._loaded.etag if self._loaded else "none"
        return f"<Groups shard={self._shard} configuration={etag}>"

    # The document.

    @property
    def stands_by(self) -> bool:
        """Whether another server keeps the groups."""
        return not self._store.leads

    @property
    def loaded(self) -> Loaded | None:
        self._catch_up()
        return self._loaded

    @property
    def configuration(self) -> InstancesDocument | None:
        loaded = self.loaded
        return loaded.configuration if loaded else None

    def required(self) -> InstancesDocument:
        return self._some(self.configuration)

    def required_in(self, draft: Draft) -> InstancesDocument:
        """What is in force where a transaction decides by it: another server may have replaced it since."""
        return self._some(self.configuration_in(draft))

    def configuration_in(self, draft: Draft) -> InstancesDocument | None:
        """The same; None if none is in force."""
        known = draft.get(CONFIGURATION, "", self._shard) if self._store.shared else None
        if known is None or not known.spec.packed:
            return self.configuration
        return self._read_record(known).configuration

    def _some(self, configuration: InstancesDocument | None) -> InstancesDocument:
        if configuration is None:
            raise FailedPrecondition(
                "no configuration is in force",
                hint=f"put one at shard/{self._shard}/config.jsonc and refresh",
            )
        return configuration

    def on_change(self, listener: Callable[[set[GroupKey]], None]) -> Callable[[], None]:
        """Be told which groups changed, appeared or went when the configuration did.

        Returns what ends it.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def admit(self, check: Admit, guard: Guard) -> None:
        """Have every new document looked at before it comes into force; what these raise refuses it.

        `guard` is asked where it is put in force, with the instances that there are then.
        """
        self._admit, self._guard = check, guard

    def hold_by(self, holding: Holding) -> None:
        """Have every new document looked at, with what its groups were before, just before it is in force."""
        self._holding = holding

    @property
    def leads(self) -> bool:
        """Whether this server says which document is in force; one that stands by follows."""
        return self._store.leads

    async def refresh(self) -> Refreshed:
        """Read the document again and put it in force if it is good."""
        async with self._refreshing:
            return await self._refresh()

    async def _refresh(self) -> Refreshed:
        for _ in range(ATTEMPTS):
            before, known = self.loaded, self._known()
            found, body = await self._read()
            if before is not None and found.etag == before.etag and (known is None or known.spec.packed):
                return Refreshed(updated=False, before=before.etag, after=before.etag)
            self._admit(found.configuration)
            await self._hold(found)
            if not await self._put_in_force(found, body, known):
                continue  # another server was faster: what was read earlier does not replace what is there
            if self._store.shared:
                self._catch_up()
            else:
                self._adopt(found)
            return Refreshed(updated=True, before=before.etag if before else "", after=found.etag)
        raise Conflict("other servers put documents in force all the time", hint="try again")

    async def _hold(self, found: Loaded) -> None:
        if self._holding is not None:
            unresolved = self._unresolved
            coming, self._unresolved = self._compute(found.configuration), unresolved
            await self._holding(self.views(), coming)

    def _adopt(self, found: Loaded) -> None:
        if self._loaded is not None and self._loaded.etag == found.etag:
            return
        old = self._views_now()
        self._loaded = found
        new = self._views_now()
        changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
        log.info(
            "instances.configuration",
            etag=found.etag,
            path=found.path,
            groups=len(new),
            changed=len(changed),
            without_effect=[problem.path for problem in found.warnings],
        )
        for listener in tuple(self._listeners):
            listener(changed)

    # Among several servers.

    def _known(self) -> Known | None:
        return self._store.get(CONFIGURATION, "", self._shard) if self._store.shared else None

    async def _put_in_force(self, found: Loaded, body: bytes, known: Known | None) -> bool:
        """Write down that the document is in force; False if another is, since `known` was."""
        if not self._store.shared:
            return True
        packed = zlib.compress(body)
        if len(packed) > PACKED_LIMIT_BYTES:
            raise InvalidArgument(
                f"{found.path} has {len(packed)} bytes compressed, more than {PACKED_LIMIT_BYTES}",
                hint="keep user data and files beside it, in the storage",
            )
        spec = InForce(etag=found.etag, path=found.path, modified_at_ns=found.modified_at_ns, packed=packed)
        revision = known.revision if known is not None else 0

        def change(draft: Draft) -> bool:
            current = draft.get(CONFIGURATION, "", self._shard)
            if (current.revision if current is not None else 0) != revision:
                return False
            self._guard(found.configuration, draft.list(INSTANCE))
            draft.put(CONFIGURATION, "", self._shard, spec=spec)
            return True

        done = await self._store.transact(
            change,
            actor=SERVER,
            action="instances.configuration",
            touches=[CONFIGURATION.key("", self._shard)],
        )
        return done.value

    async def follow(self) -> None:
        """Tell whoever listens what any server puts in force, until cancelled."""
        async for _batch in follow(self._store, CONFIGURATION, begin=lambda _watch: self._catch_up()):
            self._catch_up()

    def _catch_up(self) -> None:
        """Have in force what the store says is."""
        known = self._known()
        if known is None or not known.spec.packed:
            return
        if self._unpacked is not None and self._unpacked[0] == known.revision:
            found = self._unpacked[1]
            if isinstance(found, FleetplaneError) or found is self._loaded:
                return
        try:
            self._adopt(self._read_record(known))
        except FleetplaneError as error:
            log.error("instances.configuration_not_read", shard=self._shard, error=error.message)

    def _read_record(self, known: Known) -> Loaded:
        """What a record says; read once for each revision."""
        if self._unpacked is None or self._unpacked[0] != known.revision:
            spec = known.spec
            found: Loaded | FleetplaneError
            try:
                found = self._checked(
                    zlib.decompress(spec.packed),
                    spec.path,
                    etag=spec.etag,
                    modified_at_ns=spec.modified_at_ns,
                )
            except FleetplaneError as error:  # such as a provider that is not installed here
                found = error
            self._unpacked = (known.revision, found)
        found = self._unpacked[1]
        if isinstance(found, FleetplaneError):
            raise Unavailable(
                f"this server cannot read the configuration that is in force: {found.message}",
                hint="ask another server",
            )
        return found

    def trust_changed(self) -> None:
        """Other authorities are trusted: files that name them are others now."""
        old = self._views[1] if self._views is not None else {}
        new = self.views()
        changed = {key for key in old.keys() & new.keys() if old[key] != new[key]}
        for listener in self._listeners:
            listener(changed)

    async def _read(self) -> tuple[Loaded, bytes]:
        """What the storage has now, checked, and as it lies there."""
        for path in (f"shard/{self._shard}/config.jsonc", f"config/{self._shard}.jsonc"):
            found = await self._objects.get(path)
            if found is not None:
                loaded = self._checked(found.body, path, etag=found.etag, modified_at_ns=found.modified_at_ns)
                return loaded, found.body
        raise NotFound(f"there is no configuration at shard/{self._shard}/config.jsonc")

    def _checked(self, body: bytes, path: str, *, etag: str, modified_at_ns: int) -> Loaded:
        checked = check(body, name=path, providers=self._providers)
        configuration = checked.configuration
        if configuration.shard.id != self._shard:
            raise FleetplaneError(
                f"{path} is for shard {configuration.shard.id!r}, this server is {self._shard!r}"
            )
        return Loaded(
            configuration=configuration,
            etag=etag,
            modified_at_ns=modified_at_ns,
            size=len(body),
            path=path,
            warnings=checked.warnings,
        )

    # What follows from it.

    def views(self) -> Mapping[GroupKey, GroupView]:
        """Every group there is, by tenant and key."""
        self._catch_up()
        return self._views_now()

    def _views_now(self) -> Mapping[GroupKey, GroupView]:
        if self._loaded is None:
            return {}
        at = (self._loaded.etag, self._store.kind_revision(GROUP), self._trust())
        if self._views is None or self._views[0] != at:
            self._views = (at, self._compute(self._loaded.configuration))
            self._versions.clear()
        return self._views[1]

    def _compute(self, configuration: InstancesDocument) -> Mapping[GroupKey, GroupView]:
        overrides = {(tenant, key): spec for tenant, key, spec in self._instances.overrides()}
        configured = {(tenant, key) for tenant, groups in configuration.groups.items() for key in groups}
        views = {}
        self._unresolved = {}
        for tenant, key in sorted(configured | overrides.keys()):
            try:
                group = effective(configuration, tenant, key, overrides.get((tenant, key)))
            except FailedPrecondition as error:
                self._unresolved[tenant, key] = error.message
                continue
            if group is not None:
                views[tenant, key] = self._view(group)
        return views

    def _view(self, group: EffectiveGroup) -> GroupView:
        runtime = runtime_hash(group)
        if (trust := self._trust()) and names_authority(group):
            runtime = "sha256:" + digest(f"{runtime} {trust}")
        return GroupView(group=group, runtime_hash=runtime, infra_hash=infra_hash(group))

    def view(self, tenant: str, key: str) -> GroupView | None:
        return self.views().get((tenant, key))

    def basis(self, reader: Store | Draft, tenant: str, key: str) -> GroupBasis:
        """What the view of a group is made from as a reader sees it."""
        etag = self._loaded.etag if self._loaded is not None else ""
        if self._store.shared and (known := reader.get(CONFIGURATION, "", self._shard)) is not None:
            etag = known.spec.etag
        override = reader.get(GROUP, tenant_scope(tenant), key)
        return etag, override.revision if override is not None else 0

    def view_of(self, instance: Instance) -> GroupView | None:
        """What one instance should be: its group's, or its own where a caller chose something else.

        While versions are held: the version of its place; or, if it would have to be made anew for that, the
        one that it was made from.
        """
        spec = instance.spec
        view = self.view(tenant_of(instance), spec.group)
        if view is None:
            return view
        if not spec.on_demand:
            wanted = self.view_for(view, spec.place or instance.name)
            if wanted is view or wanted.infra_hash == spec.infra_hash:
                return wanted
            known = (found for _, found in self.known(view) if found.infra_hash == spec.infra_hash)
            return next(known, wanted)
        try:
            return self.chosen(
                view, template=spec.template, instance_type=spec.instance_type, variables=spec.vars
            )
        except NotFound:
            return None  # its template is gone, or not for this tenant any more: left as it is

    # Versions that are held.

    def view_for(self, view: GroupView, place: str) -> GroupView:
        """A group as an instance in this place should be; without a place, as one that comes new should."""
        group = view.group
        version = "" if group.is_nat else self.holds.wanted(group_scope(group.tenant, group.key), place)
        return self._at(view, version) or view

    def known(self, view: GroupView) -> Sequence[tuple[str, GroupView]]:
        """A group at its newest version and at every one that is kept, by the name of the version."""
        newest = self.newest(view)
        kept = self.holds.kept(group_scope(view.group.tenant, view.group.key))
        older = ((version, self._at(view, version)) for version in kept if version != newest)
        return [(newest, view), *((version, found) for version, found in older if found is not None)]

    def newest(self, view: GroupView) -> str:
        """The name of the version that a group is now."""
        return digest_of(encoded(view.group))

    def _at(self, view: GroupView, version: str) -> GroupView | None:
        if not version:
            return None
        at = (view.group.tenant, view.group.key, version)
        if at not in self._versions:
            content = self.holds.content(group_scope(*at[:2]), version)
            if content is None:
                return None
            self._versions[at] = self._view(at_version(view.group, content, self.required()))
        return self._versions[at]

    def rolling(self, view: GroupView) -> Rolling | None:
        """What each place of a group is to have, while versions of it are held."""
        scope = group_scope(view.group.tenant, view.group.key)
        hold = self.holds.hold(scope)
        if view.group.is_nat or not hold.held:
            return None
        hashes = {version: found.infra_hash for version, found in self.known(view)}
        moved = {
            place: hashes.get(version, view.infra_hash)
            for version, places in hold.moved.items()
            for place in places
        }
        policies = [one.spec.policy for one in running(self._store, SUBJECT, scope)]
        return Rolling(
            held=hashes.get(hold.held, view.infra_hash),
            moved=moved,
            paced=bool(policies),
            unavailable=max(
                (amounts.at_most(one.max_unavailable, view.group.size) for one in policies), default=0
            ),
        )

    def chosen(
        self,
        view: GroupView,
        *,
        template: str = "",
        instance_type: str = "",
        subnet_pool: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> GroupView:
        """The group as one instance made in it for a caller, with what the caller chose."""
        group = on_demand(
            self.required(),
            view.group,
            template=template,
            instance_type=instance_type,
            subnet_pool=subnet_pool,
            vars=variables,
        )
        return self._view(group)

    def unresolved(self, tenant: str, key: str) -> str:
        """Why a group is neither there nor gone and must be left alone; empty if it is one of the two."""
        self.views()
        return self._unresolved.get((tenant, key), "")

    def policy(self) -> GroupPolicy:
        """The numbers by which groups are kept, from the document."""
        shard = self.required().shard
        policy = GroupPolicy(
            report_interval_seconds=shard.health_check_interval_seconds,
            registration_timeout_seconds=shard.garbage_collection.registration_timeout_seconds,
            deleted_retention_seconds=shard.garbage_collection.deleted_record_retention_seconds,
            drain_timeout_seconds=shard.default_drain_timeout_seconds,
            drain_on_scale_down=self._drain_on_scale_down,
            eligible_age_seconds=shard.expiry.eligible_age_seconds or None,
            forced_age_seconds=shard.expiry.forced_age_seconds or None,
            on_demand_age_seconds=shard.expiry.ondemand_age_seconds or None,
            silence_share=self._silence.silence_share,
            silence_window_seconds=self._silence.silence_window_seconds,
            silence_hold_seconds=self._silence.silence_hold_seconds,
        )
        if self._attention is None:
            return policy
        return replace(
            policy, listening_since_ns=self._attention.term(policy.unhealthy_after_seconds).since_ns
        )

    def quota(self, tenant: str, configuration: InstancesDocument | None = None) -> int | None:
        """How many instances the tenant may have; None: any number."""
        return quotas.bound(configuration or self.required(), tenant, self._tenant_instances)

    def sizes(self, tenant: str) -> dict[str, int]:
        """What the tenant's groups want now, by key."""
        return {key: view.group.size for (owner, key), view in self.views().items() if owner == tenant}

    def certificate_hours(self, role: ClientRole) -> float:
        certificate = self.required().certificates.get(role)
        if certificate is not None:
            return float(certificate.ttl_hours)
        return OPERATOR_LIFE_HOURS if role is ClientRole.OPERATOR else DEFAULT_LIFE_HOURS
