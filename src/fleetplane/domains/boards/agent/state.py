"""What the services and the reports say of this node: one place that knows who it is and how it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleetplane.domains.boards.agent import health
from fleetplane.domains.boards.agent.audit import BoardAuditLog
from fleetplane.domains.boards.agent.commands.commands import BoardCommands
from fleetplane.domains.boards.agent.health import BoardHealth
from fleetplane.domains.boards.agent.logs.logs import Logs
from fleetplane.domains.boards.agent.metrics.sampler import MetricsSampler
from fleetplane.domains.boards.agent.pins.pins import Pins
from fleetplane.kernel.clock import Clock


@dataclass(slots=True, kw_only=True)
class BoardAgentState:
    version: str
    clock: Clock
    pins: Pins
    sampler: MetricsSampler
    logs: Logs
    commands: BoardCommands
    audit: BoardAuditLog
    gpio_wanted: bool
    """Whether pins are expected here: then it is a fault that there are none."""
    certificate_life: tuple[float, float] | None = None
    """When the certificate in use begins and ends."""
    node_id: int = 0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock.monotonic()

    def __repr__(self) -> str:
        return f"<NodeState {self.node_id} version={self.version}>"

    @property
    def uptime_seconds(self) -> float:
        """Seconds since the agent started."""
        return self.clock.monotonic() - self.started

    @property
    def capabilities(self) -> list[str]:
        found = ["metrics", "logs", "health", "programs", "packages"]
        if self.pins.available:
            found += ["gpio", "pwm"]
        if "journal" in self.logs.sources:
            found.append("journal")
        if self.commands.allowed:
            found.append("commands")
        return sorted(found)

    def health(self) -> BoardHealth:
        life = self.certificate_life
        return health.assess(
            health.CheckFacts(
                now=self.clock.now_ns() / 1e9,
                gpio_wanted=self.gpio_wanted,
                gpio_available=self.pins.available,
                gpio_reason=self.pins.unavailable_reason,
                snapshot=self.sampler.latest,
                log_sources=self.logs.sources,
                journal_reason=self.logs.journal_unavailable_reason,
                audit_lost=self.audit.lost,
                certificate_begins=life[0] if life else None,
                certificate_ends=life[1] if life else None,
            )
        )
