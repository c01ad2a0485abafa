"""The interfaces that REST uses of the agents' half, with implementations for a server without it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from fleetplane.domains.proxies.kinds.records import Agent, Certificate
from fleetplane.domains.proxies.kinds.values import AgentHealth, RevocationReason
from fleetplane.domains.proxies.traffic.summary import TrafficReport, TrafficSummary, report
from fleetplane.kernel.commands import Command
from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.reconcile import Explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSighting:
    """What is known of an agent from its open session."""

    last_seen_at_ns: int
    health: AgentHealth | None
    here: bool = True
    """Whether it is connected to this server; of others only what they write down is known."""


class AgentPresence(Protocol):
    """Who is connected, from memory: heartbeats are not written down."""

    def is_present(self, agent_id: str) -> bool:
        """Whether it has an open session, on whichever server."""

    def sighting(self, agent_id: str) -> AgentSighting | None:
        """None without an open session: what was stored last is then all there is."""

    def disconnect(self, agent_id: str, *, reason: str) -> None:
        """End the agent's session, if there is one: it was deleted."""


class Deployer(Protocol):
    """Who brings versions to agents."""

    def retry(self, agent: Agent) -> bool:
        """Have what failed at an agent tried again now; False if it is not connected to this server."""

    async def retried(self, agent: Agent) -> bool:
        """The same of an agent that is connected to any server; False if it is not."""

    def explain(self, agent_id: str) -> Explanation | None:
        """What the last look at an agent found; None if there was none."""


class AgentVerb(StrEnum):
    RELOAD = "reload"
    RESTART = "restart"
    STOP = "stop"
    STATUS = "status"
    VALIDATE = "validate"
    SHOW = "show"
    TAKE_OVER = "take-over"
    GIVE_BACK = "give-back"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOrder:
    """One command for one agent; only the options of its verb count."""

    verb: AgentVerb
    graceful: bool = True
    force: bool = False
    timeout_seconds: int = 30
    config_content: str = ""
    candidate: bytes = b""
    """To be validated instead of a text: a `ConfigUpdate` with what is to be tried."""
    page: int = 0
    """Of the observed configuration."""
    log: str = ""
    """To be shown instead of the configuration: its last `lines`."""
    lines: int = 0
    certificate: str = ""
    """To be sent with its key instead, sealed to `seal_to`."""
    seal_to: bytes = b""
    version: int = 0
    digest: str = ""
    """What a take-over was planned for: the version to be served, and the observed configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    success: bool
    message: str
    output: str = ""


class CommandPort(Protocol):
    async def order(self, agent: Agent, order: AgentOrder, *, actor: str) -> AgentResult:
        """The agent's own answer; raises `Unavailable` if it is away or does not answer in time."""


class AgentTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of some agents over some time. The status classes sum up to `requests_total`."""

    requests_total: int = 0
    requests_per_second: float = 0.0
    error_rate: float = 0.0
    active_connections: int = 0
    in_bytes: int = 0
    out_bytes: int = 0
    status_2xx: int = 0
    status_3xx: int = 0
    status_4xx: int = 0
    status_5xx: int = 0


class AccessLogEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    agent_id: str
    timestamp: str
    remote_addr: str
    method: str
    uri: str
    protocol: str
    host: str
    status: int
    body_bytes_sent: int
    response_time_ms: float
    user_agent: str
    referer: str
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLogQuery:
    """From `from_ns` inclusive to `to_ns` exclusive, newest first."""

    from_ns: int
    to_ns: int
    limit: int
    status_low: int = 0
    status_high: int = 999
    agent_id: str = ""
    host: str = ""
    method: str = ""
    cursor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    entries: Sequence[AccessLogEntry] = ()
    total: int = 0
    """Of all matches, whatever the limit."""
    cursor: str = ""
    """Where to go on; empty at the end."""


LEVELS = ("emerg", "alert", "crit", "error", "warn", "notice", "info", "debug")
"""Of what NGINX writes to its error log, the worst first."""


class ErrorLogEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    agent_id: str
    timestamp: str
    level: str
    message: str
    source: str
    """`nginx_error`, or `agent` for what the agent itself says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorQuery:
    """From `from_ns` inclusive to `to_ns` exclusive, newest first."""

    from_ns: int
    to_ns: int
    limit: int
    severity: int = len(LEVELS) - 1
    """A place in `LEVELS`: that one and worse."""
    agent_id: str = ""
    source: str = ""
    cursor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLogPage:
    entries: Sequence[ErrorLogEntry] = ()
    total: int = 0
    cursor: str = ""


class ReportedRecords(Protocol):
    """What agents reported over time."""

    async def traffic(
        self, workspace: str, agents: Collection[str], *, from_ns: int, to_ns: int
    ) -> AgentTraffic: ...

    async def requests(
        self, workspace: str, *, from_ns: int, to_ns: int, step_seconds: int, host: str = "", source: str = ""
    ) -> TrafficReport:
        """What requests came to, by `step_seconds`; of one virtual host or one agent where that is named."""

    async def requests_total(
        self, workspace: str, *, from_ns: int, to_ns: int, step_seconds: int, host: str = "", source: str = ""
    ) -> TrafficSummary:
        """The same in all, without the most frequent values."""

    async def placed_requests(
        self,
        workspace: str,
        *,
        from_ns: int,
        to_ns: int,
        step_seconds: int,
        host: str = "",
        source: str = "",
        location: str = "",
        upstream: str = "",
    ) -> TrafficReport:
        """The same by location and upstream, without the most frequent values."""

    async def access_log(self, workspace: str, query: AgentLogQuery) -> LogPage: ...

    async def error_log(self, workspace: str, query: ErrorQuery) -> ErrorLogPage: ...


class Revoker(Protocol):
    async def revoke(self, scope: str, identity: str, *, reason: RevocationReason, actor: str) -> Certificate:
        """Have a certificate's issuer tell the world not to trust it any more."""


class NobodyThere:
    """No agent can be connected, and none has reported anything."""

    async def look(self) -> None:
        return None

    def sighting(self, _agent_id: str) -> None:
        return None

    def disconnect(self, _agent_id: str, *, reason: str) -> None:  # noqa: ARG002  # the protocol's word
        return None

    def retry(self, _agent: Agent) -> bool:
        return False

    async def retried(self, _agent: Agent) -> bool:
        return False

    def explain(self, _agent_id: str) -> None:
        return None

    async def order(self, agent: Agent, _order: AgentOrder, *, actor: str) -> AgentResult:  # noqa: ARG002  # same
        raise Unavailable(f"agent {agent.spec.name} is not connected")

    def is_present(self, _target: str) -> bool:
        return False

    def has_room(self, _target: str) -> bool:
        return False

    def deliver(self, _target: str, _command: Command) -> bool:
        return False

    def recall(self, _target: str, _command: str, _reason: str) -> None:
        return None

    async def traffic(self, workspace: str, agents: Collection[str], **window: int) -> AgentTraffic:  # noqa: ARG002
        return AgentTraffic()

    async def requests(self, workspace: str, **_asked: int | str) -> TrafficReport:  # noqa: ARG002
        return report((), step_seconds=1)

    async def requests_total(self, workspace: str, **_asked: int | str) -> TrafficSummary:  # noqa: ARG002
        return TrafficSummary()

    async def placed_requests(self, workspace: str, **_asked: int | str) -> TrafficReport:  # noqa: ARG002
        return report((), step_seconds=1)

    async def access_log(self, workspace: str, query: AgentLogQuery) -> LogPage:  # noqa: ARG002
        return LogPage()

    async def error_log(self, workspace: str, query: ErrorQuery) -> ErrorLogPage:  # noqa: ARG002
        return ErrorLogPage()

    async def revoke(self, scope: str, identity: str, *, reason: RevocationReason, actor: str) -> Certificate:  # noqa: ARG002
        raise Unavailable("this server issues no certificates")
