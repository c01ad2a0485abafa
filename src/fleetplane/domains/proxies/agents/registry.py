"""Agents as operators see them: made with a registration token, labelled, pinned, removed."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from fleetplane.domains.proxies.agents import machines
from fleetplane.domains.proxies.agents.ports import AgentPresence
from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    AGENT_TOKEN,
    DEPLOYMENT,
    VIRTUAL_HOST,
    Agent,
    AgentSpec,
    AgentTokenSpec,
    Deployment,
    VirtualHost,
    agent_scope,
)
from fleetplane.domains.proxies.kinds.unique import (
    check_match,
    claim_unique,
    hold,
    holders,
    move_unique,
    refuse,
    register,
    unregister,
)
from fleetplane.domains.proxies.kinds.values import NamedAgents
from fleetplane.domains.proxies.rules import conflicts as clashes
from fleetplane.domains.proxies.rules import raw_text
from fleetplane.domains.proxies.rules.raw_text import RawRight
from fleetplane.domains.proxies.rules.streams import labelled_clashes
from fleetplane.domains.proxies.rules.validation import name_problems
from fleetplane.domains.proxies.serving.basis import decided_again
from fleetplane.domains.proxies.serving.workspaces import PutObject, Workspaces
from fleetplane.fleet import selectors
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store, transact_found
from fleetplane.kernel.unbroken import run_to_completion
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.web.rest.problems import Code, Problem

TOKEN_PREFIX = "nxmesh_agent_"  # noqa: S105  # its beginning
DIGEST = "digest"
NAME = "name"
NAME_LIMIT = 63
REVOKED = "revoked"
"""Why a stream ends whose credential was revoked."""
EXPIRY_HOURS_LIMIT = 8760
_SECRET_BYTES = 32
NS_PER_HOUR = 3600 * 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnrolment:
    """A new agent and the token that lets it in. Only its digest is kept."""

    agent: Agent
    token: str
    expires_at_ns: int


def token_digest(token: str) -> str:
    """How a registration token is known here."""
    return hashlib.sha256(token.encode()).hexdigest()


class Agents:
    def __init__(self, store: Store, clock: Clock, workspaces: Workspaces, presence: AgentPresence) -> None:
        self._store = store
        self._clock = clock
        self._workspaces = workspaces
        self._presence = presence

    def get(self, scope: str, identity: str) -> Agent:
        found = self._store.get(AGENT, scope, identity)
        if found is None:
            raise NotFound("agent not found")
        return found

    def deployments(self, agent: Agent) -> list[Deployment]:
        """Newest first."""
        return list(reversed(self._store.list(DEPLOYMENT, agent_scope(agent.scope, agent.name))))

    async def enrol(
        self, scope: str, name: str, labels: dict[str, str], *, hours: int, actor: str
    ) -> AgentEnrolment:
        refuse([*name_problems(name, limit=NAME_LIMIT), *_label_problems(labels), *_hour_problems(hours)])
        identity = new_uuid(self._clock)
        token = self._new_token(identity)
        digest = token_digest(token)

        def change(draft: Draft) -> AgentEnrolment:
            self._workspaces.require(scope, at=draft)
            claim_unique(draft, AGENT, scope, NAME, name, identity)
            register(draft, AGENT, scope, identity)
            draft.claim(AGENT_TOKEN, "", DIGEST, digest, identity)
            expires = draft.now_ns + hours * NS_PER_HOUR
            draft.put(AGENT_TOKEN, scope, identity, spec=AgentTokenSpec(digest=digest, expires_at_ns=expires))
            made = draft.put(AGENT, scope, identity, spec=AgentSpec(name=name, labels=labels))
            return AgentEnrolment(agent=made, token=token, expires_at_ns=expires)

        async with self._workspaces.editing(scope):
            touches = [AGENT.key(scope, identity), AGENT_TOKEN.key(scope, identity)]
            done = await self._store.transact(change, actor=actor, action="agent.enrol", touches=touches)
        return done.value

    async def reissue(self, scope: str, identity: str, *, hours: int, actor: str) -> AgentEnrolment:
        """Revoke everything that an agent can show, and make it a new registration token."""
        refuse(_hour_problems(hours))
        token = self._new_token(identity)
        digest = token_digest(token)

        def change(draft: Draft) -> AgentEnrolment:
            agent, before = draft.get(AGENT, scope, identity), draft.get(AGENT_TOKEN, scope, identity)
            if agent is None or before is None:
                raise NotFound("agent not found")
            draft.release(AGENT_TOKEN, "", DIGEST, before.spec.digest, identity)
            draft.claim(AGENT_TOKEN, "", DIGEST, digest, identity)
            expires = draft.now_ns + hours * NS_PER_HOUR
            draft.put(AGENT_TOKEN, scope, identity, spec=AgentTokenSpec(digest=digest, expires_at_ns=expires))
            machines.clear_alert(draft, agent)
            return AgentEnrolment(agent=agent, token=token, expires_at_ns=expires)

        async def written(found: Agent) -> AgentEnrolment:
            done = await self._store.transact(
                change, actor=actor, action="agent.reissue_token", touches=machines.touches(found)
            )
            self._presence.disconnect(identity, reason=REVOKED)
            return done.value

        async with self._workspaces.editing(scope):
            return await run_to_completion(written(self.get(scope, identity)))

    def _new_token(self, agent: str) -> str:
        secret = base64.urlsafe_b64encode(self._clock.token_bytes(_SECRET_BYTES)).rstrip(b"=").decode()
        said = json.dumps({"agent_id": agent, "secret": secret})
        return TOKEN_PREFIX + base64.b64encode(said.encode()).decode()

    @decided_again
    async def update(
        self,
        scope: str,
        identity: str,
        given: dict[str, Any],
        *,
        if_match: str | None,
        actor: str,
        raw: RawRight | None = None,
    ) -> Agent:
        """`raw` decides inside the transaction about hosts with raw text that the agent would lose."""
        async with self._workspaces.editing(scope):
            before = self.get(scope, identity)
            check_match(if_match, before)
            spec = msgspec.structs.replace(before.spec, **given)
            refuse([*name_problems(spec.name, limit=NAME_LIMIT), *_label_problems(spec.labels)])
            also = None
            if raw is not None:
                labels = before.spec.labels, spec.labels
                also = partial(raw_text.decide_labels, right=raw, scope=scope, agent=identity, labels=labels)
            return await self._write(before, spec, cause="agent.update", actor=actor, also=also)

    @decided_again
    async def pin(
        self, scope: str, identity: str, version: int | None, *, actor: str, raw: RawRight | None = None
    ) -> Agent:
        """Serve what a version said, or (None) what the newest says; either way under a new number.

        `raw` decides inside the transaction about raw text that the version differs in.
        """
        async with self._workspaces.editing(scope):
            before = self.get(scope, identity)
            kept = self._workspaces.version(scope, version) if version is not None else None
            if version is not None and kept is None:
                raise NotFound(f"version {version} is not kept")
            also = None
            if kept is not None and raw is not None:
                also = partial(raw_text.decide_version, right=raw, scope=scope, wanted=kept)
            spec = msgspec.structs.replace(before.spec, pinned_version=version)
            cause = "agent.rollback" if version is not None else "agent.release"
            return await self._write(before, spec, cause=cause, actor=actor, also=also)

    async def _write(
        self,
        before: Agent,
        spec: AgentSpec,
        *,
        cause: str,
        actor: str,
        also: Callable[[Draft], None] | None = None,
    ) -> Agent:
        """The caller holds the workspace's lock."""
        scope, identity = before.scope, before.name
        hosts = self._workspaces.hosts(scope)
        old, new = before.spec.labels, spec.labels
        streams = self._workspaces.streams(scope)
        hold(
            "the agent's labels",
            [
                *clashes.label_clashes(identity, new, hosts),
                *labelled_clashes(identity, new, hosts, streams),
            ],
        )
        plan = self._workspaces.plan(scope, cause=cause, subject=identity, actor=actor)
        plan.puts.append(PutObject(kind=AGENT, name=identity, spec=spec, before=before))
        if also is not None:
            plan.also.append(also)
        plan.also.append(
            lambda draft: move_unique(draft, AGENT, scope, NAME, before.spec.name, spec.name, identity)
        )
        if spec.pinned_version is None:
            if before.spec.pinned_version is not None:  # else it is a rollout's
                plan.next.pins.pop(identity, None)
        else:
            plan.next.pins[identity] = spec.pinned_version
        plan.redeploy = any(
            clashes.targets(host.target_agents, identity, old)
            != clashes.targets(host.target_agents, identity, new)
            for host in hosts.values()
        )
        written: Agent = await self._workspaces.commit(scope, plan)
        return written

    async def delete(self, scope: str, identity: str, *, if_match: str | None, actor: str) -> None:
        """Its token ends with it, and its session too."""
        below = agent_scope(scope, identity)

        def deployments(reader: Store | Draft) -> list[Key]:
            return [one.key for one in reader.list(DEPLOYMENT, below)]

        def change(draft: Draft, found: Sequence[Key]) -> None:
            agent = draft.get(AGENT, scope, identity)
            if agent is None:
                raise NotFound("agent not found")
            check_match(if_match, agent)
            hold(
                "virtual hosts name this agent",
                holders("target_agents", "virtual host", _naming(draft, scope, identity)),
            )
            _remove(draft, agent, found)

        async with self._workspaces.editing(scope):
            await transact_found(
                self._store,
                deployments,
                change,
                actor=actor,
                action="agent.delete",
                touches=[AGENT.key(scope, identity), AGENT_TOKEN.key(scope, identity)],
            )
        self._presence.disconnect(identity, reason="deleted")


def _naming(draft: Draft, scope: str, agent: str) -> Iterator[VirtualHost]:
    for host in draft.list(VIRTUAL_HOST, scope):
        if isinstance(host.spec.target_agents, NamedAgents) and agent in host.spec.target_agents.agent_ids:
            yield host


def _remove(draft: Draft, agent: Agent, deployments: Sequence[Key]) -> None:
    scope, identity = agent.scope, agent.name
    draft.delete(AGENT, scope, identity)
    draft.release(AGENT, scope, NAME, agent.spec.name, identity)
    unregister(draft, AGENT, scope, identity)
    token = draft.get(AGENT_TOKEN, scope, identity)
    if token is not None:
        draft.delete(AGENT_TOKEN, scope, identity)
        draft.release(AGENT_TOKEN, "", DIGEST, token.spec.digest, identity)
    for key in deployments:
        draft.delete(DEPLOYMENT, key.scope, key.name)


def _label_problems(labels: dict[str, str]) -> list[Problem]:
    return [
        Problem(
            field=f"labels.{key}" if key else "labels",
            message=message,
            code=Code.INVALID_FORMAT if key else Code.TOO_MANY,
        )
        for key, message in selectors.label_problems(labels)
    ]


def _hour_problems(hours: int) -> list[Problem]:
    if 1 <= hours <= EXPIRY_HOURS_LIMIT:
        return []
    message = f"Must be between 1 and {EXPIRY_HOURS_LIMIT}"
    return [Problem(field="expires_in_hours", message=message, code=Code.OUT_OF_RANGE)]
