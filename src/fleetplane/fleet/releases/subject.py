"""The subject `agents.version`: which release the agents of a domain run, confirmed by their hello.

Nothing is upgraded unless a rollout says so. A rollout names the version of each agent; once it is done its
version is the default of the domain, so that an agent that comes later gets it too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fleetplane.fleet.releases.check_in import CheckIns
from fleetplane.fleet.releases.records import (
    AGENT_DEFAULT,
    AGENT_VERSION,
    DEFAULT,
    PREFIX,
    RELEASE,
    AgentVersion,
    AgentWish,
    DefaultSpec,
    agents_scope,
)
from fleetplane.fleet.rollouts.records import Period
from fleetplane.fleet.rollouts.rules.passes import ACTOR
from fleetplane.fleet.rollouts.rules.states import TargetFact
from fleetplane.kernel.access import covers
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.release_documents import version_key
from fleetplane.kernel.resources import AnyKind, Nothing
from fleetplane.kernel.store import Draft, Store

NAME = "agents.version"
FREEZE_DOMAIN = "agents"
NEWEST = "newest"
ONLINE = "online"


class AgentVersions:
    """See the module."""

    name = NAME
    domain = FREEZE_DOMAIN
    summary = "release of the agents of a domain; confirmed when an agent says hello as that version"
    measures: Mapping[str, str] = {ONLINE: "share of agents that check in, from 0 to 1"}
    watches: Sequence[AnyKind] = (AGENT_VERSION,)
    versions: Sequence[AnyKind] = (RELEASE,)

    def __init__(self, store: Store, check_ins: CheckIns) -> None:
        self._store = store
        self._check_ins = check_ins

    def __repr__(self) -> str:
        return f"<AgentVersions {' '.join(sorted(self._check_ins.registers))}>"

    # Names.

    def scope(self, text: str) -> str:
        """The agents of a domain, by its name or its scope."""
        domain = text.removeprefix(f"{PREFIX}/")
        if domain not in self._check_ins.registers:
            known = ", ".join(sorted(self._check_ins.registers)) or "none"
            raise NotFound(f"there are no agents of {text[:80]!r}", hint=f"name a domain: {known}")
        return agents_scope(domain)

    def scopes(self, below: str) -> Sequence[str]:
        found = (agents_scope(domain) for domain in sorted(self._check_ins.registers))
        return [scope for scope in found if covers(below, scope)]

    def version(self, scope: str, text: str) -> str:
        """A release, or a version that an agent says it has or keeps."""
        if text == NEWEST:
            newest = self.newest(scope)
            if not newest:
                raise NotFound("there is no release", hint="add one with `fleetplane releases add`")
            return newest
        version_key(text, field="to")
        said = (one.status for one in self._store.list(AGENT_VERSION, scope) if one.status is not None)
        if self._check_ins.releases.find(text) is None and not any(
            text == one.version or text in one.kept for one in said
        ):
            raise NotFound(
                f"there is no release {text}", hint="`fleetplane releases list` shows those that there are"
            )
        return text

    def newest(self, scope: str) -> str:  # noqa: ARG002  # releases are for all domains
        found = self._check_ins.releases.list()
        return found[-1].name if found else ""

    def waiting(self, scope: str) -> str:
        """The newest release, if it is newer than what agents are to have: it always waits for a rollout."""
        newest, default = self.newest(scope), self.default(scope)
        if not newest or (default and version_key(newest) <= version_key(default)):
            return ""
        return newest

    # Targets.

    def targets(self, scope: str) -> Mapping[str, TargetFact]:
        """Agents that can replace themselves, in the order of their names for people."""
        domain = _domain(scope)
        register = self._check_ins.registers[domain]
        found: list[tuple[str, str, TargetFact]] = []
        for agent in self._store.list(AGENT_VERSION, scope):
            card = register.card(agent.name)
            if card is None or agent.status is None or not agent.status.can_upgrade:
                continue
            fact = self._fact(domain, agent, card.title, card.labels)
            found.append((card.title, agent.name, fact))
        return {name: fact for _, name, fact in sorted(found, key=lambda one: one[:2])}

    def _fact(self, domain: str, agent: AgentVersion, title: str, labels: Mapping[str, str]) -> TargetFact:
        said, wish = agent.status, agent.spec
        assert said is not None
        online = self._check_ins.is_online(domain, agent.name)
        failed = bool(said.failed_reason) and said.failed_attempt == wish.attempt
        return TargetFact(
            version=said.version,
            online=online,
            healthy=online,
            labels=labels,
            error=said.failed_reason if failed else "",
            error_at_ns=said.failed_at_ns if failed else 0,
            error_version=said.failed_version if failed else "",
            title=title,
        )

    # Moving.

    def default(self, scope: str) -> str:
        return self._check_ins.default(_domain(scope)).version

    async def steer(
        self, scope: str, versions: Mapping[str, str], *, rollout: str, default: str = ""
    ) -> None:
        now = {one.name: one for one in self._store.list(AGENT_VERSION, scope)}
        changed = {name: version for name, version in versions.items() if _moves(now.get(name), version)}
        if changed or (default and default != self.default(scope)):
            await self._want(scope, changed, rollout=rollout, default=default)

    async def again(self, scope: str, targets: Collection[str]) -> None:
        keys = [AGENT_VERSION.key(scope, name) for name in targets]

        def change(draft: Draft) -> None:
            for name in targets:
                found = draft.get(AGENT_VERSION, scope, name)
                if found is not None:
                    wish = AgentWish(version=found.spec.version, attempt=found.spec.attempt + 1)
                    draft.put(AGENT_VERSION, scope, name, spec=wish, status=found.status)

        await self._store.transact(change, actor=ACTOR, action="releases.asked_again", touches=keys)

    async def settle(self, scope: str, version: str, *, rollout: str, held: bool) -> None:  # noqa: ARG002
        named = {one.name: "" for one in self._store.list(AGENT_VERSION, scope) if one.spec.version}
        await self._want(scope, named, rollout=rollout, default=version)

    async def _want(self, scope: str, versions: Mapping[str, str], *, rollout: str, default: str) -> None:
        keys = [AGENT_VERSION.key(scope, name) for name in versions]
        keys.append(AGENT_DEFAULT.key(scope, DEFAULT))

        def change(draft: Draft) -> None:
            for name, version in versions.items():
                found = draft.get(AGENT_VERSION, scope, name)
                if found is not None and _moves(found, version):
                    # The number stays where the default takes the place of the same version.
                    step = 1 if version else 0
                    wish = AgentWish(version=version, attempt=found.spec.attempt + step)
                    draft.put(AGENT_VERSION, scope, name, spec=wish, status=found.status)
            if default:
                draft.put(AGENT_DEFAULT, scope, DEFAULT, spec=DefaultSpec(version=default), status=Nothing())

        await self._store.transact(
            change, actor=ACTOR, action=f"releases.wanted.{rollout}"[:100], touches=keys
        )

    # Gates.

    async def measure(
        self,
        scope: str,
        query: str,  # noqa: ARG002  # there is one
        targets: Collection[str],
        period: Period,  # noqa: ARG002  # that is so now
    ) -> float | None:
        if not targets:
            return None
        online = sum(self._check_ins.is_online(_domain(scope), name) for name in targets)
        return online / len(targets)


def _moves(agent: AgentVersion | None, version: str) -> bool:
    return agent is not None and agent.spec.version != version


def _domain(scope: str) -> str:
    return scope.removeprefix(f"{PREFIX}/")
