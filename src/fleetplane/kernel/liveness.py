"""Who is alive, decided from heartbeats alone.

Knows nothing of gRPC, storage or the wall clock: every method takes the moment it should
believe in, so a simulated day costs milliseconds. Heartbeats stay in memory; only a change
of state that they cause is worth a write, and that write is the caller's business.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

AgentId = NewType("AgentId", str)


class Liveness(StrEnum):
    ONLINE = "online"
    STALE = "stale"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessPolicy:
    stale_after_seconds: float = 90.0  # three missed heartbeats of 30 s
    dead_after_seconds: float = 300.0

    def __post_init__(self) -> None:
        if not 0 < self.stale_after_seconds <= self.dead_after_seconds:
            raise ValueError("liveness needs 0 < stale_after_seconds <= dead_after_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessChanged:
    agent: AgentId
    before: Liveness | None
    """None for an agent that was never heard from."""
    after: Liveness


class LivenessTracker:
    """Decide who is online, stale or dead.

    All agents share one policy, so the order of last words is the order of expiry: each
    state keeps its agents oldest first, and `tick` looks only at those that expire.
    """

    def __init__(self, policy: LivenessPolicy) -> None:
        self._policy = policy
        self._heard: dict[Liveness, OrderedDict[AgentId, float]] = {
            state: OrderedDict() for state in Liveness
        }
        self._since = -math.inf

    def __repr__(self) -> str:
        numbers = " ".join(f"{state}={len(agents)}" for state, agents in self._heard.items())
        return f"<LivenessTracker {numbers}>"

    def heard_from(self, agent: AgentId, *, now: float) -> Iterator[LivenessChanged]:
        before = self.state(agent)
        if before is not None:
            del self._heard[before][agent]
        self._heard[Liveness.ONLINE][agent] = now
        if before is not Liveness.ONLINE:
            yield LivenessChanged(agent=agent, before=before, after=Liveness.ONLINE)

    def grant(self, since: float) -> None:
        """Count nobody's silence from before this moment: the server itself was not listening then.

        See `stalls.Term`. Everybody has a whole new term, those that were stale already included.
        """
        self._since = max(self._since, since)

    def tick(self, *, now: float) -> Iterator[LivenessChanged]:
        """Move everyone whose silence has lasted long enough."""
        steps = (
            (Liveness.ONLINE, Liveness.STALE, self._policy.stale_after_seconds),
            (Liveness.STALE, Liveness.DEAD, self._policy.dead_after_seconds),
        )
        for before, after, limit_seconds in steps:
            waiting = self._heard[before]
            while waiting:
                agent, heard_at = next(iter(waiting.items()))
                if now - max(heard_at, self._since) < limit_seconds:
                    break
                del waiting[agent]
                self._heard[after][agent] = heard_at
                yield LivenessChanged(agent=agent, before=before, after=after)

    def next_expiry(self) -> float:
        """The moment before which `tick` has nothing to do; infinity when nobody can expire."""
        limits = (
            (Liveness.ONLINE, self._policy.stale_after_seconds),
            (Liveness.STALE, self._policy.dead_after_seconds),
        )
        return min(
            (
                max(next(iter(self._heard[state].values())), self._since) + limit
                for state, limit in limits
                if self._heard[state]
            ),
            default=math.inf,
        )

    def forget(self, agent: AgentId) -> None:
        for agents in self._heard.values():
            agents.pop(agent, None)

    def state(self, agent: AgentId) -> Liveness | None:
        return next((state for state, agents in self._heard.items() if agent in agents), None)

    def agents(self) -> Iterator[tuple[AgentId, Liveness]]:
        for state, agents in self._heard.items():
            for agent in agents:
                yield agent, state
