"""Events for subscribers, derived from writes, in the order of their revisions.

Every event follows from one write alone: from the resource as it is after it. So the same events come out
whether they are sent at once or read from the store's history later, and nothing is remembered in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from fleetplane.domains.proxies.access import ADMINISTER, READ
from fleetplane.domains.proxies.agents.events import AGENT_EVENT, KNOWN, OTHER, AgentEvent
from fleetplane.domains.proxies.agents.live import CHANNEL
from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    AGENT_TOKEN,
    AUDIT_NOTE,
    CERTIFICATE,
    CONFIG_PART,
    CONFIG_VERSION,
    DEPLOYMENT,
    QUOTA_NOTE,
    UPSTREAM,
    VIRTUAL_HOST,
    Agent,
    AgentToken,
    AuditNote,
    Certificate,
    ConfigVersion,
    ConfigVersionSpec,
    Deployment,
    PartSpec,
    QuotaNote,
    version_name,
)
from fleetplane.domains.proxies.kinds.values import CertificateState, DeploymentState
from fleetplane.domains.proxies.rules import deployment
from fleetplane.domains.proxies.rules.alerts import ALERT, Alert
from fleetplane.fleet.feeds.ring import RING_EVENTS, EventRing
from fleetplane.kernel.access import Permission
from fleetplane.kernel.commands import COMMAND_TARGET, CommandState, CommandTarget
from fleetplane.kernel.commands.rules import is_open
from fleetplane.kernel.events import Event, EventType
from fleetplane.kernel.resources import AnyKind, AnyResource
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import spelled, spelled_or_null

KINDS: tuple[AnyKind, ...] = (
    AGENT_TOKEN,
    AGENT,
    DEPLOYMENT,
    ALERT,
    CERTIFICATE,
    CONFIG_VERSION,
    VIRTUAL_HOST,
    UPSTREAM,
    COMMAND_TARGET,
    AGENT_EVENT,
    AUDIT_NOTE,
    QUOTA_NOTE,
)
"""In the order in which the events of one write are sent."""


class Past(Protocol):
    """What a version says and said; of versions that are no longer kept, nothing."""

    def version(self, scope: str, number: int) -> ConfigVersionSpec | None: ...

    def part(self, scope: str, name: str) -> PartSpec | None: ...


_FILTERED = ("workspace_id", "agent_id", "severity")
_PERMISSIONS: Mapping[str, Permission] = {AUDIT_NOTE.name: ADMINISTER}
"""Of those who may hear of a kind, where that is not everyone who may read."""

Facts = Iterator[tuple[str, dict[str, Any]]]
"""An event's type and data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyEvent:
    """One event, encoded once for all clients that subscribed to it and may read it."""

    type: str
    revision: int
    part: int
    """Which of the events that the same change means, from 0."""
    scope: str
    """Of what it is about: who may read that may hear of it."""
    permission: Permission
    facts: Mapping[str, str]
    """What filters look at."""
    text: str
    """As it goes out."""


def events_of(event: Event, past: Past) -> Iterator[ProxyEvent]:
    """The events that one change means."""
    resource = event.resource
    for part, (kind, data) in enumerate(_READERS[resource.kind](resource, event.type, past)):
        yield _event(kind, data, resource, event.revision, part)


def _event(kind: str, data: dict[str, Any], resource: AnyResource, revision: int, part: int) -> ProxyEvent:
    places = _places(resource.scope)
    data.setdefault("workspace_id", places.get("workspace_id"))
    data["revision"] = revision
    data["cursor"] = f"{revision}.{part}"
    envelope = {"type": kind, "timestamp": spelled(resource.updated_at_ns), "data": data}
    facts = places | {name: str(data[name]) for name in _FILTERED if data.get(name) is not None}
    return ProxyEvent(
        type=kind,
        revision=revision,
        part=part,
        scope=resource.scope,
        permission=_PERMISSIONS.get(resource.kind, READ),
        facts=facts,
        text=msgspec.json.encode(envelope).decode(),
    )


def _places(scope: str) -> dict[str, str]:
    """The organisation and workspace of a scope such as `org/{org}/ws/{ws}/…`."""
    parts = scope.split("/")
    found = {}
    if len(parts) >= 2 and parts[0] == "org":
        found["organization_id"] = parts[1]
    if len(parts) >= 4 and parts[2] == "ws":
        found["workspace_id"] = parts[3]
    return found


def _agent(agent: Agent, change: EventType, _past: Past) -> Facts:
    if change is EventType.DELETED:
        yield "agent.deleted", {"agent_id": agent.name, "name": agent.spec.name}
        return
    status = agent.status
    if status is None:
        return
    now_ns = agent.updated_at_ns
    if status.connected_at_ns == now_ns:
        place = {"hostname": status.hostname, "ip_address": status.ip_address}
        yield "agent.connected", {"agent_id": agent.name, **place}
    if status.disconnected_at_ns == now_ns:
        reason = status.reasons[0] if status.reasons else ""
        yield "agent.disconnected", {"agent_id": agent.name, "reason": reason}
    if status.state_changed_at_ns == now_ns:
        state = {"state": status.state, "reasons": status.reasons}
        yield "agent.state_changed", {"agent_id": agent.name, **state}


def _agent_token(token: AgentToken, change: EventType, _past: Past) -> Facts:
    status = token.status
    if change is not EventType.MODIFIED or status is None:
        return
    if status.activated_at_ns == token.updated_at_ns:
        yield "agent.registered", {"agent_id": token.name}
    elif status.machine_changed_at_ns == token.updated_at_ns:
        yield "agent.machine_changed", {"agent_id": token.name}
    refused = status.contender
    if refused is not None and refused.refused_at_ns == token.updated_at_ns:
        place = {"hostname": refused.hostname, "ip_address": refused.address}
        yield "agent.machine_refused", {"agent_id": token.name, "contender_id": refused.id, **place}


def _deployment(found: Deployment, change: EventType, _past: Past) -> Facts:
    status, spec = found.status, found.spec
    if change is EventType.DELETED or status is None:
        return
    about = {
        "agent_id": found.scope.rpartition("/")[2],
        "config_id": spec.config_id,
        "version": spec.version,
    }
    if status.state in deployment.FINAL:
        success = status.state is DeploymentState.SUCCESS
        outcome = {"duration_ms": status.duration_ms or 0, "success": success, "status": status.state}
        partly = {"set_aside": status.set_aside} if success and status.set_aside else {}
        yield "config.applied", {**about, **outcome, **({} if success else {"error": status.error}), **partly}
    elif status.changed_at_ns <= spec.sent_at_ns:
        yield "config.started", about


def _alert(alert: Alert, change: EventType, _past: Past) -> Facts:
    about = {"agent_id": alert.scope.rpartition("/")[2], "alert_id": alert.name}
    if change is EventType.DELETED:
        yield "health.resolved", about
        return
    spec = alert.spec
    found = {"severity": spec.severity, "message": spec.message, "metric": spec.metric, "value": spec.value}
    yield "health.alert", {**about, **found}


def _certificate(certificate: Certificate, change: EventType, _past: Past) -> Facts:
    status = certificate.status
    if change is EventType.DELETED or status is None:
        return
    about = {"certificate_id": certificate.name, "domain": certificate.spec.domain, "error": status.error}
    if status.alarm and status.alarmed_at_ns == certificate.updated_at_ns:
        until = {"severity": status.alarm, "expires_at": spelled_or_null(status.expires_at_ns)}
        yield "certificate.expiring", {**about, **until}
    elif status.state is CertificateState.FAILED:
        yield "certificate.failed", about


_NEW_CERTIFICATE = ("certificate.issue", "certificate.import")


def _config_version(found: ConfigVersion, change: EventType, past: Past) -> Facts:
    """A certificate is news once a version serves it."""
    spec = found.spec
    if change is not EventType.ADDED or spec.cause not in _NEW_CERTIFICATE:
        return
    part = past.part(found.scope, spec.certificates.get(spec.subject, ""))
    if part is None or part.certificate is None:
        return
    before = past.version(found.scope, spec.version - 1)
    renewed = before is not None and spec.subject in before.certificates
    about = {"certificate_id": spec.subject, "domain": part.certificate.domain}
    until = {"expires_at": spelled(part.certificate.expires_at_ns)}
    yield "certificate.renewed" if renewed else "certificate.issued", {**about, **until}


_CHANGES = {EventType.ADDED: "created", EventType.MODIFIED: "updated", EventType.DELETED: "deleted"}


def _virtual_host(host: AnyResource, change: EventType, _past: Past) -> Facts:
    about = {"virtual_host_id": host.name, "name": host.spec.name, "server_name": host.spec.server_name}
    yield f"virtual_host.{_CHANGES[change]}", about


def _upstream(upstream: AnyResource, change: EventType, _past: Past) -> Facts:
    yield f"upstream.{_CHANGES[change]}", {"upstream_id": upstream.name, "name": upstream.spec.name}


def _command(target: CommandTarget, change: EventType, _past: Past) -> Facts:
    if change is EventType.DELETED or target.spec.channel != CHANNEL or is_open(target):
        return
    assert target.status is not None
    yield (
        "command.completed",
        {
            "agent_id": target.spec.target,
            "command_id": target.spec.command,
            "command": target.spec.verb,
            "outcome": target.status.state,
            "success": target.status.state is CommandState.OK,
            "message": target.status.detail,
        },
    )


def _agent_event(event: AgentEvent, change: EventType, _past: Past) -> Facts:
    """Under the type that the agent gave it, if that is known to be one of an agent's."""
    if change is EventType.DELETED:
        return
    spec = event.spec
    kind = spec.event_type if spec.event_type in KNOWN else OTHER
    yield (
        kind,
        {
            "agent_id": event.scope.rpartition("/")[2],
            "event_id": spec.event_id,
            "event_type": spec.event_type,
            "occurred_at": spelled(spec.occurred_at_ns),
            "details": spec.data,
        },
    )


def _audit_note(note: AuditNote, change: EventType, _past: Past) -> Facts:
    if change is EventType.DELETED:
        return
    spec = note.spec
    kind, _, identity = spec.actor.partition("/")
    resource = {"type": spec.resource_type, "id": spec.resource_id, "name": spec.resource_name}
    yield (
        "audit.created",
        {
            "action": spec.action,
            "actor": {"type": kind, "id": identity},
            "resource": resource,
            "organization_id": note.scope.rpartition("/")[2],
            "workspace_id": spec.workspace_id,
            "request_id": spec.request_id,
        },
    )


def _quota_note(note: QuotaNote, change: EventType, _past: Past) -> Facts:
    spec = note.spec
    about = {
        "organization_id": note.scope.rpartition("/")[2],
        "workspace_id": spec.workspace_id,
        "quota": spec.quota,
        "limit": spec.limit,
        "setting": spec.setting,
    }
    if change is EventType.DELETED:
        yield "quota.resolved", about
    else:
        yield "quota.reached" if spec.reached else "quota.warning", {**about, "used": spec.used}


_READERS: Mapping[str, Callable[[Any, EventType, Past], Facts]] = {
    AGENT.name: _agent,
    AGENT_TOKEN.name: _agent_token,
    DEPLOYMENT.name: _deployment,
    ALERT.name: _alert,
    CERTIFICATE.name: _certificate,
    CONFIG_VERSION.name: _config_version,
    VIRTUAL_HOST.name: _virtual_host,
    UPSTREAM.name: _upstream,
    COMMAND_TARGET.name: _command,
    AGENT_EVENT.name: _agent_event,
    AUDIT_NOTE.name: _audit_note,
    QUOTA_NOTE.name: _quota_note,
}


class StoredVersions:
    """What versions of the configuration hold, for events that are about a difference."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def version(self, scope: str, number: int) -> ConfigVersionSpec | None:
        found = self._store.get(CONFIG_VERSION, scope, version_name(number))
        return found.spec if found is not None else None

    def part(self, scope: str, name: str) -> PartSpec | None:
        found = self._store.get(CONFIG_PART, scope, name)
        return found.spec if found is not None else None


def event_ring(store: Store, *, ring_events: int = RING_EVENTS) -> EventRing[ProxyEvent]:
    versions = StoredVersions(store)
    return EventRing(
        store,
        kinds=KINDS,
        events_of=lambda event: events_of(event, versions),
        ring_events=ring_events,
    )
