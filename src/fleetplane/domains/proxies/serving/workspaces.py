"""Changing what a workspace serves: one change, one numbered version, one transaction.

Whoever changes a workspace holds its lock, decides on what is there, and commits objects and
version together. The lock keeps a decision that may look at hundreds of hosts out of the
store's single writer; that the decision still holds is checked again in the transaction (`basis`),
and it is made again if another server has changed the workspace meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

from fleetplane.domains.proxies.kinds.records import (
    ACCESS_LIST,
    AGENT,
    CERTIFICATE,
    CONFIG_PART,
    CONFIG_VERSION,
    SETTINGS,
    STREAM,
    UPSTREAM,
    VIRTUAL_HOST,
    WORKSPACE,
    AccessListSpec,
    Agent,
    ConfigVersionSpec,
    PartSpec,
    SettingsSpec,
    StreamSpec,
    UpstreamSpec,
    VirtualHostSpec,
    version_name,
    workspace_of,
)
from fleetplane.domains.proxies.rules import configuration, reach
from fleetplane.domains.proxies.rules.configuration import AgentConfig
from fleetplane.domains.proxies.rules.conflicts import WorkspaceSurroundings
from fleetplane.domains.proxies.rules.ports import ANY_PORT, PortRanges
from fleetplane.domains.proxies.serving.basis import Basis, ServedReader, WorkspaceMoved, decided_again
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.kernel.errors import Conflict, NotFound
from fleetplane.kernel.resources import AnyKind, AnyResource, Key
from fleetplane.kernel.store import ABSENT, Draft, Store

VERSIONS_KEPT = 100
FAULTS_KEPT = 4096
"""Verdicts on parts: those of eight full workspaces; the rest is judged again."""
"""Per workspace, besides those that an agent is pinned to: a table of contents of 1,000 objects
takes 110 KB, and what it mentions is kept once for all versions together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutObject:
    """One object to be written. `before` is what the decision was based on."""

    kind: AnyKind
    name: str
    spec: Any  # typed by the kind
    before: AnyResource | None = None
    status: Any = None
    """For a kind whose status REST writes; others keep theirs."""


@dataclass(slots=True, kw_only=True)
class WorkspacePlan:
    """What one change amounts to."""

    cause: str
    """The action, such as `virtual_host.update`."""
    subject: str
    actor: str
    next: configuration.NextVersion
    puts: list[PutObject] = field(default_factory=list)
    deletes: list[AnyResource] = field(default_factory=list)
    also: list[Callable[[Draft], None]] = field(default_factory=list)
    """Claims and secrets that belong to it."""
    restored_version: int | None = None
    redeploy: bool = False
    """Make a version even if it says the same: someone's share of it differs."""
    above: int = 0
    """The version's number is higher than this."""
    basis: Basis | None = None
    """What was decided on; None for what is decided inside its transaction."""
    is_held: bool = False
    """Whether a rollout held the workspace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """What is written of versions and their parts, once a plan's objects are."""

    made: ConfigVersionSpec | None
    """None if nothing is said that the newest does not say already."""
    old: Sequence[ConfigVersionSpec]
    dropped: Sequence[str]
    added: Mapping[str, PartSpec]


class Workspaces:
    def __init__(
        self,
        store: Store,
        vault: Vault,
        *,
        holds: Callable[[Any, str], bool] = lambda _at, _scope: False,
        stream_ports: PortRanges = ANY_PORT,
    ) -> None:
        """`holds` tells of the store, or a draft, whether new versions of a workspace wait for a rollout."""
        self._stream_ports = stream_ports
        self._store = store
        self._vault = vault
        self._holds = holds
        self._faults: dict[str, str] = {}
        """Of parts, by name: a name is the digest of its content."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._bases: dict[str, Basis] = {}
        """Of those who hold a lock."""

    @asynccontextmanager
    async def editing(self, scope: str) -> AsyncIterator[None]:
        """Alone, in this process, with a workspace or an organisation from decision to commit.

        What is there on entry is what a plan must still find when it is written.
        """
        lock = self._locks.setdefault(scope, asyncio.Lock())
        async with lock:
            if workspace_of(scope):
                self._bases[scope] = Basis.of(self._store, scope)
            try:
                yield
            finally:
                self._bases.pop(scope, None)

    def require(self, scope: str, *, at: ServedReader | None = None) -> None:
        """For one who waited for the lock: the workspace may be gone by now."""
        if (at or self._store).get(WORKSPACE, scope, scope.rpartition("/")[2]) is None:
            raise NotFound("workspace not found")

    # Reading, as it is stored or (`at`) as it is in a draft.

    def newest(self, scope: str, *, at: ServedReader | None = None) -> ConfigVersionSpec | None:
        versions = (at or self._store).list(CONFIG_VERSION, scope)
        return versions[-1].spec if versions else None

    def version(self, scope: str, number: int) -> ConfigVersionSpec | None:
        found = self._store.get(CONFIG_VERSION, scope, version_name(number))
        return found.spec if found is not None else None

    def made_after(self, scope: str, number: int) -> list[int]:
        """When each version after one was made, oldest first."""
        return [
            one.created_at_ns for one in self._store.list(CONFIG_VERSION, scope) if one.spec.version > number
        ]

    def part(self, scope: str, name: str, *, at: ServedReader | None = None) -> PartSpec | None:
        found = (at or self._store).get(CONFIG_PART, scope, name)
        return found.spec if found is not None else None

    def desired(self, agent: Agent) -> AgentConfig:
        """What an agent should serve now. Changes only with the workspace's newest version."""
        newest = self.newest(agent.scope)
        if newest is None:
            raise NotFound("workspace not found")
        return self.share(agent, newest)

    def share(self, agent: Agent, of: ConfigVersionSpec) -> AgentConfig:
        scope = agent.scope
        return configuration.for_agent(
            of,
            agent.name,
            agent.spec.labels,
            version=lambda number: self.version(scope, number),
            part=lambda name: self.part(scope, name),
            capabilities=agent.status.capabilities if agent.status is not None else None,
            fault=self._fault,
        )

    def _fault(self, name: str, part: PartSpec) -> str:
        known = self._faults.get(name)
        if known is None:
            if len(self._faults) >= FAULTS_KEPT:
                self._faults.clear()
            known = self._faults[name] = reach.part_fault(part)
        return known

    def hosts(self, scope: str, *, at: ServedReader | None = None) -> dict[str, VirtualHostSpec]:
        return {host.name: host.spec for host in (at or self._store).list(VIRTUAL_HOST, scope)}

    def streams(self, scope: str, *, at: ServedReader | None = None) -> dict[str, StreamSpec]:
        return {stream.name: stream.spec for stream in (at or self._store).list(STREAM, scope)}

    def placed_otherwise(self, agent: Agent) -> list[str]:
        """The names of hosts and streams that the agent's reported labels would place otherwise."""
        hosts, streams = self.hosts(agent.scope), self.streams(agent.scope)
        return configuration.placed_otherwise(agent, (*hosts.values(), *streams.values()))

    def surroundings(
        self, scope: str, *, without: str = "", at: ServedReader | None = None
    ) -> WorkspaceSurroundings:
        store = at or self._store
        hosts = self.hosts(scope, at=at)
        agents = store.list(AGENT, scope)
        upstreams = {upstream.name: upstream.spec for upstream in store.list(UPSTREAM, scope)}
        streams = self.streams(scope, at=at)
        return WorkspaceSurroundings(
            virtual_hosts={name: spec for name, spec in hosts.items() if name != without},
            upstreams=upstreams.keys(),
            upstream_specs=upstreams,
            streams={name: spec for name, spec in streams.items() if name != without},
            stream_ports=self._stream_ports,
            certificates={certificate.name for certificate in store.list(CERTIFICATE, scope)},
            access_lists={one.name for one in store.list(ACCESS_LIST, scope)},
            agents={agent.name: agent.spec.labels for agent in agents},
            capabilities={one.name: one.status.capabilities for one in agents if one.status is not None},
        )

    # Writing.

    def plan(
        self, scope: str, *, cause: str, subject: str, actor: str, at: ServedReader | None = None
    ) -> WorkspacePlan:
        following = configuration.NextVersion.after(self.newest(scope, at=at))
        agents = at or self._store
        for agent in [name for name in following.pins if agents.get(AGENT, scope, name) is None]:
            del following.pins[agent]  # it was deleted, and no longer keeps its version alive
        is_held = self._hold(scope, following, at or self._store)
        basis = self._bases.get(scope) if at is None else None
        return WorkspacePlan(
            cause=cause, subject=subject, actor=actor, next=following, basis=basis, is_held=is_held
        )

    def _hold(self, scope: str, following: configuration.NextVersion, at: ServedReader) -> bool:
        """Keep agents where they are while rollouts move them; else let all go on with this version."""
        newest = self.newest(scope, at=at)
        if self._holds(at, scope):
            if following.held is None and newest is not None:
                following.held = newest.version
            return True
        if following.held is not None:
            following.held, following.pins = None, self.pinned_by_operators(scope, at=at)
        return False

    def pinned_by_operators(self, scope: str, *, at: ServedReader | None = None) -> dict[str, int]:
        """Agents that people pinned, each with its version."""
        return {
            agent.name: agent.spec.pinned_version
            for agent in (at or self._store).list(AGENT, scope)
            if agent.spec.pinned_version is not None
        }

    @decided_again
    async def redeploy(self, scope: str, *, cause: str, subject: str, actor: str, above: int = 0) -> None:
        """A version with the same contents, because someone's share of them has changed.

        Its number, and with it all later ones, is higher than `above`.
        """
        async with self.editing(scope):
            self.require(scope)
            plan = self.plan(scope, cause=cause, subject=subject, actor=actor)
            plan.redeploy, plan.above = True, above
            await self.commit(scope, plan)

    async def commit(self, scope: str, plan: WorkspacePlan) -> Any:
        """Write it all; what was put as the plan's subject, if anything. The caller holds the lock.

        Raises `WorkspaceMoved` if somebody else, on whichever server, has changed what the plan depends on.
        """
        mention_all(plan)
        following = self._following(scope, plan, self._store)

        def change(draft: Draft) -> AnyResource | None:
            if plan.basis is not None:
                plan.basis.require(draft)
                if self._holds(draft, scope) != plan.is_held:
                    raise WorkspaceMoved("a rollout of the workspace began or ended", hint="try again")
            written = write_objects(draft, scope, plan)
            self._write_following(draft, scope, following)
            return written.get(plan.subject)

        touches = [
            *(put.kind.key(scope, put.name) for put in plan.puts),
            *(gone.key for gone in plan.deletes),
            *_version_keys(scope, following),
        ]
        done = await self._store.transact(change, actor=plan.actor, action=plan.cause, touches=touches)
        return done.value

    def write_version(self, draft: Draft, scope: str, plan: WorkspacePlan) -> None:
        """The version that follows from objects which were written to the same draft, and mentioned."""
        self._write_following(draft, scope, self._following(scope, plan, draft))

    def _following(self, scope: str, plan: WorkspacePlan, at: ServedReader) -> Following:
        versions = [one.spec for one in at.list(CONFIG_VERSION, scope)]
        made = self._made(versions[-1] if versions else None, plan)
        old = _surplus(versions, made)
        return Following(
            made=made,
            old=old,
            dropped=self._unmentioned(scope, old, versions, made, at),
            added={
                name: part for name, part in plan.next.parts.items() if self.part(scope, name, at=at) is None
            },
        )

    def _write_following(self, draft: Draft, scope: str, following: Following) -> None:
        if following.made is None:
            return
        self._write_version(draft, scope, following.made, following.added)
        for version in following.old:
            draft.delete(CONFIG_VERSION, scope, version_name(version.version))
        for name in following.dropped:
            self._drop(draft, scope, name)

    def _made(self, newest: ConfigVersionSpec | None, plan: WorkspacePlan) -> ConfigVersionSpec | None:
        """The version that a plan makes; None if it says what the newest says already."""
        number = max(plan.above, 0 if newest is None else newest.version) + 1
        made = plan.next.finish(
            number,
            cause=plan.cause,
            subject=plan.subject,
            actor=plan.actor,
            restored_version=plan.restored_version,
        )
        same = newest is not None and newest.digest == made.digest
        return None if same and not plan.redeploy else made

    def _write_version(
        self, draft: Draft, scope: str, made: ConfigVersionSpec, added: Mapping[str, PartSpec]
    ) -> None:
        for name, part in added.items():
            draft.put(CONFIG_PART, scope, name, spec=part)
        draft.put(CONFIG_VERSION, scope, version_name(made.version), spec=made, expect=ABSENT)

    def _unmentioned(
        self,
        scope: str,
        old: Sequence[ConfigVersionSpec],
        versions: Sequence[ConfigVersionSpec],
        made: ConfigVersionSpec | None,
        at: ServedReader,
    ) -> list[str]:
        """Parts that only versions on their way out mention."""
        if not old:
            return []
        gone = {version.version for version in old}
        candidates = {name for version in old for name in configuration.mentioned(version)}
        for version in (*versions, made):
            if version is not None and version.version not in gone:
                candidates.difference_update(configuration.mentioned(version))
        return sorted(name for name in candidates if self.part(scope, name, at=at) is not None)

    def _drop(self, draft: Draft, scope: str, name: str) -> None:
        part = draft.delete(CONFIG_PART, scope, name).spec
        if part.certificate is not None:
            self._vault.remove(draft, part.id, part.certificate.fingerprint)


class WorkspaceBatch:
    """Changes of several objects of workspaces in one draft: of each workspace one version, at the end."""

    def __init__(self, workspaces: Workspaces, draft: Draft, *, actor: str) -> None:
        self.draft = draft
        self._workspaces = workspaces
        self._actor = actor
        self._versions: dict[str, WorkspacePlan] = {}
        self._written: dict[str, int] = {}

    def plan(self, scope: str, *, cause: str, subject: str) -> WorkspacePlan:
        """For the change of one object; it shares the version that follows with the others."""
        shared = self._versions.get(scope)
        made = self._workspaces.plan(scope, cause=cause, subject=subject, actor=self._actor, at=self.draft)
        if shared is None:
            self._versions[scope] = made
            return replace(made, puts=[], deletes=[], also=[])
        return replace(made, next=shared.next)

    def write(self, scope: str, plan: WorkspacePlan) -> dict[str, AnyResource]:
        """The objects of a plan of this batch; what was put, by name."""
        written = write_objects(self.draft, scope, plan)
        mention_all(plan)
        self._written[scope] = self._written.get(scope, 0) + 1
        return written

    def finish(self) -> None:
        """Write the version of each workspace that was changed and is still there."""
        for scope, plan in self._versions.items():
            if self.draft.get(WORKSPACE, scope, scope.rpartition("/")[2]) is None:
                continue
            if self._written.get(scope, 0) > 1:
                plan.cause, plan.subject = "config.apply", ""
            self._workspaces.write_version(self.draft, scope, plan)


def mention_all(plan: WorkspacePlan) -> None:
    """Say in the version that follows what the plan puts and deletes."""
    for put in plan.puts:
        _mention(plan.next, put.kind, put.name, put.spec)
    for gone in plan.deletes:
        _forget(plan.next, gone)


def write_objects(draft: Draft, scope: str, plan: WorkspacePlan) -> dict[str, AnyResource]:
    """Everything of a plan but the version; what was put, by name."""
    for also in plan.also:
        also(draft)
    for gone in plan.deletes:
        draft.delete(_kind(gone.kind), gone.scope, gone.name)
    return {put.name: _write(draft, scope, put) for put in plan.puts}


def _mention(draft: configuration.NextVersion, kind: AnyKind, name: str, spec: Any) -> None:
    """Certificates and agents are not here: what of them is served is the caller's decision."""
    match spec:
        case VirtualHostSpec():
            draft.put("virtual_hosts", PartSpec(id=name, virtual_host=spec))
        case UpstreamSpec():
            draft.put("upstreams", PartSpec(id=name, upstream=spec))
        case AccessListSpec():
            draft.put("access_lists", PartSpec(id=name, access_list=spec))
        case StreamSpec():
            draft.put("streams", PartSpec(id=name, stream=spec))
        case SettingsSpec():
            draft.put_settings(PartSpec(id=name, settings=spec))
        case _:
            assert kind in (CERTIFICATE, AGENT), kind


def _forget(draft: configuration.NextVersion, gone: AnyResource) -> None:
    if gone.kind == VIRTUAL_HOST.name:
        draft.remove("virtual_hosts", gone.name)
    elif gone.kind == UPSTREAM.name:
        draft.remove("upstreams", gone.name)
    elif gone.kind == CERTIFICATE.name:
        draft.remove("certificates", gone.name)
    elif gone.kind == ACCESS_LIST.name:
        draft.remove("access_lists", gone.name)
    elif gone.kind == SETTINGS.name:
        draft.remove_settings()
    elif gone.kind == STREAM.name:
        draft.remove("streams", gone.name)


def _write(draft: Draft, scope: str, put: PutObject) -> AnyResource:
    current = draft.get(put.kind, scope, put.name)
    before = put.before
    if (current is None) != (before is None) or (
        current is not None
        and before is not None
        and (current.uid, current.generation) != (before.uid, before.generation)
    ):
        raise Conflict("someone else changed this meanwhile")
    status = put.status if put.status is not None else (current.status if current is not None else None)
    return draft.put(put.kind, scope, put.name, spec=put.spec, status=status)


_BY_NAME = {
    kind.name: kind for kind in (VIRTUAL_HOST, UPSTREAM, ACCESS_LIST, STREAM, CERTIFICATE, SETTINGS, AGENT)
}


def _kind(name: str) -> AnyKind:
    return _BY_NAME[name]


def _surplus(
    versions: Sequence[ConfigVersionSpec], made: ConfigVersionSpec | None
) -> list[ConfigVersionSpec]:
    """The oldest, beyond what is kept. A version that someone is pinned to or held at stays."""
    if made is None:
        return []
    pinned = {*made.pins.values(), made.held}
    return [
        version
        for version in versions[: max(0, len(versions) + 1 - VERSIONS_KEPT)]
        if version.version not in pinned
    ]


def _version_keys(scope: str, following: Following) -> list[Key]:
    if following.made is None:
        return []
    numbers = (following.made.version, *(version.version for version in following.old))
    return [
        *(CONFIG_VERSION.key(scope, version_name(number)) for number in numbers),
        *(CONFIG_PART.key(scope, name) for name in (*following.added, *following.dropped)),
    ]
