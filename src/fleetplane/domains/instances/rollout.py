"""Rollouts of a group's template and files. Targets are the places of the group, not its instances.

A place whose instance was made from something else gets a new instance beside the old one, which drains once
the new one is at work (see `rules.replacing`): `max_in_flight` of the policy is how many are above the size
at a time, and there are never fewer than the size. With `max_unavailable`, so many of the old ones drain
without waiting for the new. If only variables or files differ, the instance stays and is sent them. Instances
on demand, and the machines of NAT groups, take no part.

A group is held from the moment that a policy covers it, with the contents of its version: the document that
it comes from may be another one when the server starts again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from fleetplane.domains.instances.configuration.merge import effective
from fleetplane.domains.instances.kinds import GROUP, INSTANCE, Instance, group_scope
from fleetplane.domains.instances.records.groups import GroupKey, Groups, GroupView
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.records.reports import InstanceReports
from fleetplane.domains.instances.records.versions import SUBJECT, encoded
from fleetplane.domains.instances.rules import replacing
from fleetplane.domains.instances.rules.plans import GroupMember
from fleetplane.fleet.rollouts import holds
from fleetplane.fleet.rollouts.holds import HeldVersions, digest
from fleetplane.fleet.rollouts.records import KEPT, ROLLOUT_POLICY, Period
from fleetplane.fleet.rollouts.rules.passes import ACTOR
from fleetplane.fleet.rollouts.rules.states import TargetFact
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, NotFound
from fleetplane.kernel.resources import AnyKind, Key
from fleetplane.kernel.store import Draft, HookedChange, Store, follow

HEALTHY = "healthy"
Views = Mapping[GroupKey, GroupView]


class GroupTemplates:
    """The subject `instances.template`."""

    name = SUBJECT
    domain = "instances"
    replaces = True
    summary = "template and files of a group; confirmed when the instance made from it reports and is well"
    measures: Mapping[str, str] = {HEALTHY: "share of places whose instance reports in time, from 0 to 1"}
    watches: Sequence[AnyKind] = (INSTANCE,)
    versions: Sequence[AnyKind] = (GROUP, KEPT)

    def __init__(
        self, store: Store, groups: Groups, instances: Instances, reports: InstanceReports, clock: Clock
    ) -> None:
        self._store = store
        self._groups = groups
        self._instances = instances
        self._reports = reports
        self._clock = clock
        self._held = HeldVersions(store, SUBJECT, self._content)

    def __repr__(self) -> str:
        return f"<GroupTemplates {self._held!r}>"

    # Holding.

    async def hold(self, before: Views, after: Views) -> None:
        """Hold groups at what they were, just before a document comes into force that changes them."""
        for key, view in after.items():
            earlier = before.get(key, view)
            await self._hold(group_scope(*key), encoded(earlier.group), encoded(view.group))

    async def _hold(self, scope: str, before: bytes, after: bytes) -> None:
        now, held = self._held.reader.hold(scope), holds.is_held(self._store, SUBJECT, scope)
        if held and now.held and self._held.reader.content(scope, digest(after)) is not None:
            return
        if not held and not (now.held and before != after):
            return

        def change(draft: Draft) -> None:
            holds.changing(draft, SUBJECT, scope, before=before, after=after)

        await self._store.transact(
            change, actor=ACTOR, action="rollout.hold", touches=holds.keys_of(SUBJECT, scope)
        )

    def commit_hook(self, _actor: str, _action: str, touches: Collection[Key]) -> HookedChange | None:
        """Part of every change of a group at run time: holds its instances as they are."""
        keys = [key for key in touches if key.kind == GROUP.name]
        if not keys or self._groups.configuration is None:
            return None
        touched = frozenset[Key]().union(*(holds.keys_of(SUBJECT, _scope_of(key)) for key in keys))
        return HookedChange(change=lambda draft, _made: self._changed(draft, keys), touches=touched)

    def _changed(self, draft: Draft, keys: Sequence[Key]) -> None:
        for key in keys:
            view, after = self._view(_scope_of(key)), self._overridden(draft, key)
            if view is not None and after is not None and encoded(view.group) != after:
                holds.changing(draft, SUBJECT, _scope_of(key), before=encoded(view.group), after=after)

    def _overridden(self, draft: Draft, key: Key) -> bytes | None:
        override = draft.get(GROUP, key.scope, key.name)
        configuration = self._groups.required_in(draft)
        tenant = key.scope.removeprefix("tenant/")
        try:
            found = effective(configuration, tenant, key.name, override.spec if override else None)
        except FailedPrecondition:
            return None
        return None if found is None else encoded(found)

    async def run(self) -> None:
        """Hold groups as soon as a policy covers them; until cancelled."""
        async for _batch in follow(self._store, ROLLOUT_POLICY, begin=lambda _watch: self._hold_all()):
            await self._hold_all()

    async def _hold_all(self) -> None:
        for key, view in self._groups.views().items():
            content = encoded(view.group)
            await self._hold(group_scope(*key), content, content)
            await asyncio.sleep(0)

    # Names.

    def _view(self, scope: str) -> GroupView | None:
        parts = scope.split("/")
        if len(parts) != 4 or (parts[0], parts[2]) != ("tenant", "group"):
            return None
        return self._groups.view(parts[1], parts[3])

    def _required(self, scope: str) -> GroupView:
        view = self._view(scope)
        if view is None or view.group.is_nat:
            raise NotFound(f"there is no group {scope[:200]!r}", hint="write tenant/TENANT/group/GROUP")
        return view

    def _content(self, _source: Store | Draft, scope: str) -> bytes:
        return encoded(self._required(scope).group)

    def scope(self, text: str) -> str:
        """A group as `TENANT/GROUP`, or by its scope."""
        tenant, slash, group = text.partition("/")
        scope = group_scope(tenant, group) if slash and "/" not in group else text
        view = self._required(scope)
        return group_scope(view.group.tenant, view.group.key)

    def scopes(self, below: str) -> Sequence[str]:
        found = [group_scope(*key) for key, view in self._groups.views().items() if not view.group.is_nat]
        return [scope for scope in found if not below or scope == below or scope.startswith(f"{below}/")]

    def holder(self, kind: str, scope: str, name: str) -> str | None:
        """The group itself, as an object of the resource API."""
        return group_scope(scope.rpartition("/")[2], name) if kind == "group" else None

    def version(self, scope: str, text: str) -> str:
        return self._held.version(scope, text)

    def newest(self, scope: str) -> str:
        return self._held.newest(scope)

    def waiting(self, scope: str) -> str:
        return self._held.waiting(scope)

    def default(self, scope: str) -> str:
        return self._held.default(scope)

    # Targets.

    def targets(self, scope: str) -> Mapping[str, TargetFact]:
        """Every place of a group that has an instance, the oldest first."""
        view = self._view(scope)
        if view is None:
            return {}
        known = self._groups.known(view)
        members = [self._member(one) for one in self._instances.of_group(view.group.tenant, view.group.key)]
        return {
            place: self._fact(scope, place, line[0], known)
            for place, line in replacing.lines(members).items()
        }

    def _member(self, instance: Instance) -> GroupMember:
        registered = instance.status.registered_at_ns if instance.status is not None else None
        return GroupMember(
            instance=instance,
            heard_at_ns=self._reports.heard_at_ns(instance.name, registered),
            reported=self._reports.last(instance.name) is not None,
        )

    def _fact(
        self, scope: str, place: str, first: GroupMember, known: Sequence[tuple[str, GroupView]]
    ) -> TargetFact:
        spec = first.instance.spec
        return TargetFact(
            version=self._has(scope, place, first, known),
            online=True,  # a place is changed by a new instance: nobody has to be connected for that
            healthy=replacing.is_heard(first, self._groups.policy(), self._clock.now_ns()),
            labels={
                "template": spec.template,
                "instance_type": spec.instance_type,
                "arch": spec.arch,
                "subnet": spec.subnet,
            },
            title=first.instance.name,
        )

    def _has(self, scope: str, place: str, first: GroupMember, known: Sequence[tuple[str, GroupView]]) -> str:
        """The version that an instance was made from and was told; of several the one that it should be."""
        spec, status = first.instance.spec, first.instance.status
        heard = self._reports.last(first.instance.name)
        if status is None or status.registered_at_ns is None or heard is None:
            return ""  # which files it holds is known once it has reported to this server
        told = heard.report.config_hash or spec.runtime_hash
        matching = [
            version
            for version, view in known
            if view.infra_hash == spec.infra_hash and view.runtime_hash == told
        ]
        wanted = self._held.reader.wanted(scope, place)
        return wanted if wanted in matching else next(iter(matching), "")

    # Moving.

    async def steer(
        self, scope: str, versions: Mapping[str, str], *, rollout: str, default: str = ""
    ) -> None:
        assert rollout
        await self._held.steer(scope, versions, default=default)

    async def again(self, scope: str, targets: Collection[str]) -> None:
        """Nothing is given up: a place that failed is tried again for as long as it is wanted."""

    async def settle(self, scope: str, version: str, *, rollout: str, held: bool) -> None:
        assert rollout
        await self._held.settle(scope, version, held=held)

    # Gates.

    async def measure(
        self, scope: str, _query: str, targets: Collection[str], _period: Period
    ) -> float | None:
        found = self.targets(scope)
        if not targets:
            return None
        return sum(name in found and found[name].healthy for name in targets) / len(targets)


def _scope_of(key: Key) -> str:
    return group_scope(key.scope.removeprefix("tenant/"), key.name)
