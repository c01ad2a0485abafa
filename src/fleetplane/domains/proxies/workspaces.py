"""Changing what a workspace serves: one change, one numbered version, one transaction.

Whoever changes a workspace holds its lock, decides on what is there, and commits objects and
version together. The lock keeps a decision that may look at hundreds of hosts out of the
store's single writer; that the decision still holds is checked again in the transaction, so
that another server would cause a conflict and never a lost update.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from fleetplane.domains.proxies import configuration
from fleetplane.domains.proxies.clashes import Surroundings
from fleetplane.domains.proxies.configuration import AgentConfig, labels_of
from fleetplane.domains.proxies.kinds import (
    AGENT,
    CERTIFICATE,
    CONFIG_PART,
    CONFIG_VERSION,
    SETTINGS,
    UPSTREAM,
    VIRTUAL_HOST,
    WORKSPACE,
    Agent,
    ConfigVersionSpec,
    PartSpec,
    SettingsSpec,
    UpstreamSpec,
    VirtualHostSpec,
    version_name,
)
from fleetplane.domains.proxies.vault import Vault
from fleetplane.kernel.errors import Conflict, NotFound
from fleetplane.kernel.resources import AnyKind, AnyResource, Key
from fleetplane.kernel.store import ABSENT, Draft, Store

VERSIONS_KEPT = 100
"""Per workspace, besides those that an agent is pinned to: a table of contents of 1,000 objects
takes 110 KB, and what it mentions is kept once for all versions together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """One object to be written. `before` is what the decision was based on."""

    kind: AnyKind
    name: str
    spec: Any  # typed by the kind
    before: AnyResource | None = None
    status: Any = None
    """For a kind whose status REST writes; others keep theirs."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """What one change amounts to."""

    cause: str
    """The action, such as `virtual_host.update`."""
    subject: str
    actor: str
    next: configuration.NextVersion
    puts: list[Put] = field(default_factory=list)
    deletes: list[AnyResource] = field(default_factory=list)
    also: list[Callable[[Draft], None]] = field(default_factory=list)
    """Claims and secrets that belong to it."""
    restored_version: int | None = None
    redeploy: bool = False
    """Make a version even if it says the same: someone's share of it differs."""


class Workspaces:
    def __init__(self, store: Store, vault: Vault) -> None:
        self._store = store
        self._vault = vault
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def editing(self, scope: str) -> AsyncIterator[None]:
        """Alone with a workspace, or an organisation, from decision to commit."""
        lock = self._locks.setdefault(scope, asyncio.Lock())
        async with lock:
            yield

    def require(self, scope: str) -> None:
        """For one who waited for the lock: the workspace may be gone by now."""
        if self._store.get(WORKSPACE, scope, scope.rpartition("/")[2]) is None:
            raise NotFound("workspace not found")

    # Reading.

    def newest(self, scope: str) -> ConfigVersionSpec | None:
        versions = self._store.list(CONFIG_VERSION, scope)
        return versions[-1].spec if versions else None

    def version(self, scope: str, number: int) -> ConfigVersionSpec | None:
        found = self._store.get(CONFIG_VERSION, scope, version_name(number))
        return found.spec if found is not None else None

    def part(self, scope: str, name: str) -> PartSpec | None:
        found = self._store.get(CONFIG_PART, scope, name)
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
            labels_of(agent),
            version=lambda number: self.version(scope, number),
            part=lambda name: self.part(scope, name),
        )

    def hosts(self, scope: str) -> dict[str, VirtualHostSpec]:
        return {host.name: host.spec for host in self._store.list(VIRTUAL_HOST, scope)}

    def surroundings(self, scope: str, *, without: str = "") -> Surroundings:
        store = self._store
        return Surroundings(
            virtual_hosts={name: spec for name, spec in self.hosts(scope).items() if name != without},
            upstreams={upstream.name for upstream in store.list(UPSTREAM, scope)},
            certificates={certificate.name for certificate in store.list(CERTIFICATE, scope)},
            agents={agent.name: labels_of(agent) for agent in store.list(AGENT, scope)},
        )

    # Writing.

    def plan(self, scope: str, *, cause: str, subject: str, actor: str) -> Plan:
        following = configuration.NextVersion.after(self.newest(scope))
        for agent in [name for name in following.pins if self._store.get(AGENT, scope, name) is None]:
            del following.pins[agent]  # it was deleted, and no longer keeps its version alive
        return Plan(cause=cause, subject=subject, actor=actor, next=following)

    async def redeploy(self, scope: str, *, cause: str, subject: str, actor: str) -> None:
        """A version with the same contents, because someone's share of them has changed."""
        async with self.editing(scope):
            self.require(scope)
            plan = self.plan(scope, cause=cause, subject=subject, actor=actor)
            plan.redeploy = True
            await self.commit(scope, plan)

    async def commit(self, scope: str, plan: Plan) -> Any:
        """Write it all; what was put as the plan's subject, if anything. The caller holds the lock."""
        for put in plan.puts:
            _mention(plan.next, put.kind, put.name, put.spec)
        for gone in plan.deletes:
            _forget(plan.next, gone)
        versions = list(self._store.list(CONFIG_VERSION, scope))
        newest = versions[-1].spec if versions else None
        made = self._made(newest, plan)
        old = _surplus([one.spec for one in versions], made)
        dropped = self._unmentioned(scope, old, [one.spec for one in versions], made)
        added = {name: part for name, part in plan.next.parts.items() if self.part(scope, name) is None}

        def change(draft: Draft) -> AnyResource | None:
            for also in plan.also:
                also(draft)
            for gone in plan.deletes:
                draft.delete(_kind(gone.kind), gone.scope, gone.name)
            written = {put.name: _write(draft, scope, put) for put in plan.puts}
            if made is not None:
                self._write_version(draft, scope, made, added)
                for version in old:
                    draft.delete(CONFIG_VERSION, scope, version_name(version.version))
                for name in dropped:
                    self._drop(draft, scope, name)
            return written.get(plan.subject)

        touches = [
            *(put.kind.key(scope, put.name) for put in plan.puts),
            *(gone.key for gone in plan.deletes),
            *_version_keys(scope, made, old, (*added, *dropped)),
        ]
        done = await self._store.transact(change, actor=plan.actor, action=plan.cause, touches=touches)
        return done.value

    def _made(self, newest: ConfigVersionSpec | None, plan: Plan) -> ConfigVersionSpec | None:
        """The version that a plan makes; None if it says what the newest says already."""
        number = 1 if newest is None else newest.version + 1
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
    ) -> list[str]:
        """Parts that only versions on their way out mention."""
        if not old:
            return []
        gone = {version.version for version in old}
        candidates = {name for version in old for name in configuration.mentioned(version)}
        for version in (*versions, made):
            if version is not None and version.version not in gone:
                candidates.difference_update(configuration.mentioned(version))
        return sorted(name for name in candidates if self.part(scope, name) is not None)

    def _drop(self, draft: Draft, scope: str, name: str) -> None:
        part = draft.delete(CONFIG_PART, scope, name).spec
        if part.certificate is not None:
            self._vault.remove(draft, part.id, part.certificate.fingerprint)


def _mention(draft: configuration.NextVersion, kind: AnyKind, name: str, spec: Any) -> None:
    """Certificates and agents are not here: what of them is served is the caller's decision."""
    match spec:
        case VirtualHostSpec():
            draft.put("virtual_hosts", PartSpec(id=name, virtual_host=spec))
        case UpstreamSpec():
            draft.put("upstreams", PartSpec(id=name, upstream=spec))
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


def _write(draft: Draft, scope: str, put: Put) -> AnyResource:
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


_BY_NAME = {kind.name: kind for kind in (VIRTUAL_HOST, UPSTREAM, CERTIFICATE, SETTINGS, AGENT)}


def _kind(name: str) -> AnyKind:
    return _BY_NAME[name]


def _surplus(
    versions: Sequence[ConfigVersionSpec], made: ConfigVersionSpec | None
) -> list[ConfigVersionSpec]:
    """The oldest, beyond what is kept. A version that someone is pinned to stays."""
    if made is None:
        return []
    pinned = set(made.pins.values())
    return [
        version
        for version in versions[: max(0, len(versions) + 1 - VERSIONS_KEPT)]
        if version.version not in pinned
    ]


def _version_keys(
    scope: str, made: ConfigVersionSpec | None, old: Iterable[ConfigVersionSpec], parts: Iterable[str]
) -> list[Key]:
    if made is None:
        return []
    numbers = (made.version, *(version.version for version in old))
    return [
        *(CONFIG_VERSION.key(scope, version_name(number)) for number in numbers),
        *(CONFIG_PART.key(scope, name) for name in parts),
    ]
