"""The configuration in force and the groups that follow from it and from what operators set.

The document lies in object storage. A new one is read, checked whole, and only then put in
force; one that is wrong changes nothing and says what is wrong and where. Which groups exist,
and as what, is computed from document and overrides, and computed anew only when either changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from fleetplane.domains.instances.configuration import Configuration, Problem, check
from fleetplane.domains.instances.configuration.hashes import infra_hash, runtime_hash
from fleetplane.domains.instances.configuration.merge import EffectiveGroup, effective, on_demand
from fleetplane.domains.instances.content.files import names_authority
from fleetplane.domains.instances.credentials import DEFAULT_LIFE_HOURS, OPERATOR_LIFE_HOURS, ClientRole
from fleetplane.domains.instances.kinds import CONFIGURATION, GROUP, InForce, Instance, group_scope, tenant_of
from fleetplane.domains.instances.records.instances import SERVER, Instances
from fleetplane.domains.instances.records.versions import SUBJECT, at_version, encoded
from fleetplane.domains.instances.rules import quotas
from fleetplane.domains.instances.rules.decide import Policy
from fleetplane.domains.instances.rules.plans import Rolling
from fleetplane.fleet.rollouts.holds import HoldReader, running
from fleetplane.fleet.rollouts.holds import digest as digest_of
from fleetplane.kernel.attention import Attention
from fleetplane.kernel.errors import Compacted, FailedPrecondition, FleetplaneError, NotFound
from fleetplane.kernel.identity.enrolment import digest
from fleetplane.kernel.objects import Objects
from fleetplane.kernel.rollout import amounts
from fleetplane.kernel.store import Draft, Store

log = structlog.get_logger(__name__)

FOLLOW_RETRY_SECONDS = 5.0
"""Between tries to read the document that another server has put in force."""
GroupKey = tuple[str, str]
"""Tenant and group."""
Holding = Callable[[Mapping[GroupKey, "GroupView"], Mapping[GroupKey, "GroupView"]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A document in force."""

    configuration: Configuration
    etag: str
    modified_at_ns: int
    size: int
    path: str
    warnings: tuple[Problem, ...] = ()
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
        attention: Attention | None = None,
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
        self._admit: Callable[[Configuration], None] = lambda _configuration: None
        self._trust = trust
        self._loaded: Loaded | None = None
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
    def loaded(self) -> Loaded | None:
        return self._loaded

    @property
    def configuration(self) -> Configuration | None:
        return self._loaded.configuration if self._loaded else None

    def required(self) -> Configuration:
        if self._loaded is None:
            raise FailedPrecondition(
                "no configuration is in force",
                hint=f"put one at shard/{self._shard}/config.jsonc and refresh",
            )
        return self._loaded.configuration

    def on_change(self, listener: Callable[[set[GroupKey]], None]) -> Callable[[], None]:
        """Be told which groups changed, appeared or went when the configuration did.

        Returns what ends it.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def admit(self, check: Callable[[Configuration], None]) -> None:
        """Have every new document looked at before it comes into force; what `check` raises refuses it."""
        self._admit = check

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
        before = self._loaded
        found = await self._read()
        if before is not None and found.etag == before.etag:
            await self._tell(found.etag)  # of which the server that led before may have known nothing
            return Refreshed(updated=False, before=before.etag, after=before.etag)
        self._admit(found.configuration)
        if self._holding is not None and self.leads:
            unresolved = self._unresolved
            coming, self._unresolved = self._compute(found.configuration), unresolved
            await self._holding(self.views(), coming)
        await self._tell(found.etag)
        old = self.views()
        self._loaded = found
        new = self.views()
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
        return Refreshed(updated=True, before=before.etag if before else "", after=found.etag)

    async def _tell(self, etag: str) -> None:
        """Other servers of the same database read the document when they see that another is in force."""
        name = self._shard
        known = self._store.get(CONFIGURATION, "", name)
        if not self.leads or not self._store.shared or (known is not None and known.spec.etag == etag):
            return

        def change(draft: Draft) -> None:
            draft.put(CONFIGURATION, "", name, spec=InForce(etag=etag))

        await self._store.transact(
            change,
            actor=SERVER,
            action="instances.configuration",
            touches=[CONFIGURATION.key("", name)],
        )

    async def follow(self) -> None:
        """Put in force what the active server has put in force, until cancelled."""
        while True:
            with self._store.watch(CONFIGURATION) as watch, suppress(Compacted):
                while True:
                    if await self._followed():
                        await watch.next()
                    else:
                        await self._store.clock.sleep(FOLLOW_RETRY_SECONDS)

    async def _followed(self) -> bool:
        known = self._store.get(CONFIGURATION, "", self._shard)
        if known is None or self.leads:
            return True  # none is in force anywhere, or this server says which
        try:
            await self.refresh()
        except FleetplaneError as error:
            log.warning("instances.configuration_not_read", shard=self._shard, error=error.message)
            return False
        return True

    def trust_changed(self) -> None:
        """Other authorities are trusted: files that name them are others now."""
        old = self._views[1] if self._views is not None else {}
        new = self.views()
        changed = {key for key in old.keys() & new.keys() if old[key] != new[key]}
        for listener in self._listeners:
            listener(changed)

    async def _read(self) -> Loaded:
        for path in (f"shard/{self._shard}/config.jsonc", f"config/{self._shard}.jsonc"):
            found = await self._objects.get(path)
            if found is None:
                continue
            checked = check(found.body, name=path, providers=self._providers)
            configuration = checked.configuration
            if configuration.shard.id != self._shard:
                raise FleetplaneError(
                    f"{path} is for shard {configuration.shard.id!r}, this server is {self._shard!r}"
                )
            return Loaded(
                configuration=configuration,
                etag=found.etag,
                modified_at_ns=found.modified_at_ns,
                size=len(found.body),
                path=path,
                warnings=checked.warnings,
            )
        raise NotFound(f"there is no configuration at shard/{self._shard}/config.jsonc")

    # What follows from it.

    def views(self) -> Mapping[GroupKey, GroupView]:
        """Every group there is, by tenant and key."""
        if self._loaded is None:
            return {}
        at = (self._loaded.etag, self._store.kind_revision(GROUP), self._trust())
        if self._views is None or self._views[0] != at:
            self._views = (at, self._compute(self._loaded.configuration))
            self._versions.clear()
        return self._views[1]

    def _compute(self, configuration: Configuration) -> Mapping[GroupKey, GroupView]:
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

    def policy(self) -> Policy:
        """The numbers by which groups are kept, from the document."""
        shard = self.required().shard
        policy = Policy(
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

    def quota(self, tenant: str) -> int | None:
        """How many instances the tenant may have; None: any number."""
        return quotas.bound(self.required(), tenant, self._tenant_instances)

    def sizes(self, tenant: str) -> dict[str, int]:
        """What the tenant's groups want now, by key."""
        return {key: view.group.size for (owner, key), view in self.views().items() if owner == tenant}

    def certificate_hours(self, role: ClientRole) -> float:
        certificate = self.required().certificates.get(role)
        if certificate is not None:
            return float(certificate.ttl_hours)
        return OPERATOR_LIFE_HOURS if role is ClientRole.OPERATOR else DEFAULT_LIFE_HOURS
