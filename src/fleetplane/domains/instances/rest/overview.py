"""A tenant's groups and instances as they are now, for REST.

The counts of a tenant's instances are kept until an instance changes: counting takes as long as there are
instances.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from fleetplane.domains.instances.access import TENANT_HEADER
from fleetplane.domains.instances.grpc.admin import freeze_scope
from fleetplane.domains.instances.kinds import INSTANCE, Instance
from fleetplane.domains.instances.records.groups import Groups, GroupView
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.records.reports import InstanceReports
from fleetplane.domains.instances.records.tenants import asleep
from fleetplane.domains.instances.rest import views
from fleetplane.domains.instances.rest.views import Explained, Health, MemberCounts, ShownGroup
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.fleet.explain import shown
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.freeze import FREEZE, frozen
from fleetplane.kernel.reconcile.explanation import Finding
from fleetplane.kernel.store import Store

TENANTS_KEPT = 1024
"""Tenants whose counts are remembered between two questions."""
_NOBODY = views.counts(())


class Overview:
    def __init__(
        self,
        store: Store,
        instances: Instances,
        groups: Groups,
        reports: InstanceReports,
        findings: Callable[[str], Awaitable[Sequence[Finding]]],
        clock: Clock,
    ) -> None:
        self._store = store
        self._instances = instances
        self._groups = groups
        self._reports = reports
        self._findings = findings
        self._clock = clock
        self._counts: dict[str, tuple[int, Mapping[str, MemberCounts]]] = {}

    def __repr__(self) -> str:
        return f"<Overview tenants={len(self._counts)}>"

    # Groups.

    def groups(self, tenant: str | None) -> Sequence[ShownGroup]:
        """Of one tenant or all, by name; those that the server keeps for itself are not shown."""
        mine = [view for (of, _), view in self._groups.views().items() if tenant in (None, of)]
        return [self._shown(view) for view in mine if not view.group.is_nat]

    def group(self, tenant: str | None, name: str) -> ShownGroup:
        views_now = self._groups.views()
        found = [view for (of, key), view in views_now.items() if key == name and tenant in (None, of)]
        found = [view for view in found if not view.group.is_nat]
        if not found:
            raise NotFound(f"group {name[:64]!r} is not known")
        if len(found) > 1:
            raise InvalidArgument(
                f"several tenants have a group {name[:64]!r}: name one of them", field=TENANT_HEADER
            )
        return self._shown(found[0])

    def _shown(self, view: GroupView) -> ShownGroup:
        tenant, name = view.group.tenant, view.group.key
        now_ns = self._clock.now_ns()
        return views.group(
            view.group,
            self._counted(tenant).get(name, _NOBODY),
            asleep=asleep(self._instances.sleep(tenant), now_ns),
            frozen=frozen(self._store.list(FREEZE), freeze_scope(tenant, name), now_ns),
        )

    def _counted(self, tenant: str) -> Mapping[str, MemberCounts]:
        revision = self._store.kind_revision(INSTANCE)
        kept = self._counts.get(tenant)
        if kept is None or kept[0] != revision:
            members: dict[str, list[Instance]] = {}
            for instance in self._instances.all(tenant):
                members.setdefault(instance.spec.group, []).append(instance)
            if len(self._counts) >= TENANTS_KEPT:
                self._counts.clear()
            found = {name: views.counts(of) for name, of in members.items()}
            kept = self._counts[tenant] = (revision, found)
        return kept[1]

    # Instances.

    def instance(self, found: Instance) -> views.ShownInstance:
        return views.instance(found, self.health(found), self._reports.last(found.name))

    def detail(self, tenant: str | None, name: str) -> views.InstanceDetail:
        found = self._instances.get(tenant or self._instances.tenant_of(name) or "", name)
        return views.detail(found, self.health(found), self._reports.last(name))

    def instances(self, tenant: str | None, *, group: str | None, state: str | None) -> Sequence[Instance]:
        if group is None or tenant is None:
            found = self._instances.all(tenant)
        else:
            found = self._instances.of_group(tenant, group)
        found = [one for one in found if group in (None, one.spec.group)]
        return [one for one in found if state is None or rules.state(one) == state]

    def health(self, found: Instance) -> Health:
        registered_at_ns = found.status.registered_at_ns if found.status is not None else None
        return views.health(
            found,
            self._reports.last(found.name),
            heard_at_ns=self._reports.heard_at_ns(found.name, registered_at_ns),
            silent_before_ns=self._silent_before_ns(),
        )

    def _silent_before_ns(self) -> int:
        policy = rules.GroupPolicy() if self._groups.configuration is None else self._groups.policy()
        before_ns = self._clock.now_ns() - round(policy.unhealthy_after_seconds * 1e9)
        return before_ns if before_ns >= policy.listening_since_ns else 0

    # Why.

    async def explain(self, tenant: str | None, about: str) -> Explained:
        """What is known of a group, or of an instance in its group; of no other tenant's."""
        tenant = tenant or self._instances.tenant_of(about) or self.group(None, about).tenant
        instance = self._instances.find(tenant, about)
        group = about if instance is None else instance.spec.group
        found = [] if "/" in group else await self._findings(f"{tenant}/{group}")
        if instance is None and not found:
            self.group(tenant, group)  # one that nobody has looked at yet is known all the same
        subject = "" if instance is None else instance.name
        return Explained(about=about, group=group, findings=[shown(one, about=subject) for one in found])
