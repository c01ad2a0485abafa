"""Something that can be rolled out, on agents that exist only here and live in a clock's time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fleetplane.fleet.rollouts.records import Period
from fleetplane.fleet.rollouts.rules.states import TargetFact
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.values.times import NS


class Killed(BaseException):
    """The server is killed: nothing may catch it and go on."""


@dataclass
class SimulatedAgent:
    version: str = "1"
    wanted: str = "1"
    wanted_at_ns: int = 0
    applies_seconds: float = 2.0
    refuses: str = ""
    """A version that it does not take."""
    online: bool = True
    healthy: bool = True
    labels: dict[str, str] = field(default_factory=dict)
    ever: set[str] = field(default_factory=lambda: {"1"})


class SimulatedSubject:
    name = "sim.version"
    domain = "sim"
    summary = "the version of simulated agents"
    measures: Mapping[str, str] = {"error_rate": "whatever the test says"}
    watches: Sequence[AnyKind] = ()
    versions: Sequence[AnyKind] = ()

    def __init__(self, clock: Clock, agents: dict[str, SimulatedAgent]) -> None:
        self.clock = clock
        self.agents = agents
        self.everyone = "1"
        self.latest = "2"
        self.error_rate: float | None = None
        self.kills = 0
        """How often the server is killed before it has said what agents should have."""
        self.retried: list[str] = []
        self.measured: list[Period] = []

    def scope(self, text: str) -> str:
        if text != "tenant/a":
            raise NotFound(f"there is no {text}")
        return text

    def scopes(self, below: str) -> Sequence[str]:
        return ["tenant/a"] if "tenant/a".startswith(below) else []

    def version(self, _scope: str, text: str) -> str:
        return self.latest if text == "newest" else text

    def newest(self, _scope: str) -> str:
        return self.latest

    def waiting(self, _scope: str) -> str:
        return "" if self.everyone == self.latest else self.latest

    def default(self, _scope: str) -> str:
        return self.everyone

    def targets(self, _scope: str) -> Mapping[str, TargetFact]:
        return {name: self._fact(agent) for name, agent in self.agents.items()}

    def _fact(self, agent: SimulatedAgent) -> TargetFact:
        now_ns = self.clock.now_ns()
        due = agent.wanted_at_ns + round(agent.applies_seconds * NS) <= now_ns
        error = ""
        if agent.online and agent.wanted != agent.version and due:
            if agent.wanted == agent.refuses:
                error = "refused"
            else:
                agent.version = agent.wanted
                agent.ever.add(agent.version)
        return TargetFact(
            version=agent.version,
            online=agent.online,
            healthy=agent.healthy,
            labels=agent.labels,
            error=error,
            error_at_ns=now_ns if error else 0,
            error_version=agent.wanted,
        )

    async def steer(
        self, _scope: str, versions: Mapping[str, str], *, rollout: str, default: str = ""
    ) -> None:
        assert rollout
        if self.kills > 0:
            self.kills -= 1
            raise Killed
        self.everyone = default or self.everyone
        for name, version in versions.items():
            self._want(name, version or self.everyone)

    def _want(self, name: str, version: str) -> None:
        agent = self.agents.get(name)
        if agent is not None and agent.wanted != version:
            agent.wanted, agent.wanted_at_ns = version, self.clock.now_ns()

    async def again(self, _scope: str, targets: Collection[str]) -> None:
        self.retried += targets

    async def settle(self, _scope: str, version: str, *, rollout: str, held: bool) -> None:
        assert rollout
        assert not held
        self.everyone = version
        for name in self.agents:
            self._want(name, version)

    async def measure(
        self, _scope: str, _query: str, targets: Collection[str], period: Period
    ) -> float | None:
        assert targets
        assert period.from_ns <= period.to_ns
        self.measured.append(period)
        return self.error_rate
