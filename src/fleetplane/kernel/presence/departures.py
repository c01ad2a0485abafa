"""The stored presence of an agent, and how the leader ends presences whose server or agent is gone.

A presence is one resource for each agent of a channel. It outlives its session, marked as left: the time of
its hello must stay known for as long as that hello could be replayed.

A server is gone when it was not heard of for as long as it may write, or when a later process of its name
has begun. Its agents get one reconnect period to reach another server; then their presences are
marked as left, but only those that still name a session of that process. The period begins when the leader
first sees the server gone, so it is never shorter after a takeover, a stall or an outage.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NoReturn

import msgspec
import structlog

from fleetplane.kernel.boundary import contained
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.presence.last_seen import answered
from fleetplane.kernel.resources import Kind, Nothing, Resource
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.store.store import SYSTEM


class PresenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    server: str
    """Which has the session, or had it; empty once nobody has anything to do about its end."""
    boot: int
    """The process of that server; 0 if it forgot the session."""
    session: int
    """The revision that the session began with: a later one has a higher number, on whichever server."""
    hello_at_ns: int = 0
    """The time of the newest hello that was accepted, by the agent's clock; 0 if hellos say none."""
    digest: bytes = b""
    """Of that hello."""
    left_at_ns: int = 0
    """When the session ended; 0 while it lasts."""

    @property
    def is_open(self) -> bool:
        return self.left_at_ns == 0


PRESENCE: Kind[PresenceSpec, Nothing] = Kind("presence", PresenceSpec, Nothing)
"""Its scope is the channel, its name the agent."""


log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
BATCH = 256
RECONNECT_SECONDS = 10.0
"""What agents of a server that is gone have to come to another one."""
LATE_SECONDS = 3.0
"""Between two looks: more means that this server was held up, and what it saw before counts for nothing."""
KEEP_SECONDS = 3600.0
"""How long a session that has ended is remembered: longer than any hello could be shown again."""
SWEEP_SECONDS = 60.0

Ended = Callable[[str, int], Awaitable[None]]
_Process = tuple[str, int]
_Presence = Resource[PresenceSpec, Nothing]


class Departures:
    def __init__(self, store: Store, clock: Clock, *, channel: str, ended: Ended) -> None:
        self._store = store
        self._clock = clock
        self._channel = channel
        self._tell = ended
        self._gone: dict[_Process, float] = {}
        """Processes that have presences and are gone, and since when."""
        self._looked = -math.inf
        self._seen: tuple[int, Mapping[str, int]] = (-1, {})
        self._swept = clock.monotonic()

    def __repr__(self) -> str:
        return f"<Departures {self._channel} gone={len(self._gone)}>"

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            try:
                await self._look(await answered(self._store.living()))
                if self._clock.monotonic() - self._swept >= SWEEP_SECONDS:
                    await self._sweep()
                    self._swept = self._clock.monotonic()
            except FleetplaneError as error:
                log.warning("presence.departures_not_seen", channel=self._channel, error=error.message)
                self._gone.clear()
            await self._clock.sleep(LOOK_SECONDS)

    async def _look(self, living: Mapping[str, int]) -> None:
        now = self._clock.monotonic()
        if now - self._looked > LATE_SECONDS:
            self._gone.clear()
        self._looked = now
        seen = (self._store.kind_revision(PRESENCE), living)
        if seen == self._seen and not self._gone:
            return  # nothing has changed since everybody was there
        self._seen = seen
        found: dict[_Process, list[_Presence]] = {}
        for presence in self._store.list(PRESENCE, self._channel):
            spec = presence.spec
            if spec.server and living.get(spec.server) != spec.boot:
                found.setdefault((spec.server, spec.boot), []).append(presence)
        self._gone = {process: self._gone.get(process, now) for process in found}
        for process, since in tuple(self._gone.items()):
            if now - since >= RECONNECT_SECONDS:
                await self._end(process, found[process])
        self._looked = self._clock.monotonic()

    async def _end(self, process: _Process, presences: Sequence[_Presence]) -> None:
        open_ = sum(presence.spec.is_open for presence in presences)
        log.info(
            "presence.server_gone", channel=self._channel, server=process[0], boot=process[1], agents=open_
        )
        for at in range(0, len(presences), BATCH):
            batch = {one.name: one.spec.session for one in presences[at : at + BATCH]}
            taken = await self._each(batch, "presence.gone", _marked_left)
            told = await asyncio.gather(*(self._told(agent, session) for agent, session in taken.items()))
            settled = {agent: taken[agent] for agent, was_told in zip(taken, told, strict=True) if was_told}
            await self._each(settled, "presence.settled", _settled)

    async def _told(self, agent: str, session: int) -> bool:
        with contained(f"{self._channel}/departures", about=agent):  # it is told again at the next look
            await self._tell(agent, session)
            return True
        return False

    async def _each(
        self,
        sessions: Mapping[str, int],
        action: str,
        alter: Callable[[PresenceSpec, int], PresenceSpec | None],
    ) -> Mapping[str, int]:
        """Change presences that still name these sessions; returns those that do. None takes one away."""
        if not sessions:
            return {}

        def change(draft: Draft) -> dict[str, int]:
            done: dict[str, int] = {}
            for agent, session in sessions.items():
                found = draft.get(PRESENCE, self._channel, agent)
                if found is None or found.spec.session != session:
                    continue
                done[agent] = session
                spec = alter(found.spec, draft.now_ns)
                if spec is None:
                    draft.delete(PRESENCE, self._channel, agent)
                else:
                    draft.put(PRESENCE, self._channel, agent, spec=spec)
            return done

        keys = [PRESENCE.key(self._channel, agent) for agent in sessions]
        return (await self._store.transact(change, actor=SYSTEM, action=action, touches=keys)).value

    async def _sweep(self) -> None:
        """Forget who has been away for so long that no old hello of theirs would be accepted anyway."""
        before_ns = self._store.clock.now_ns() - round(KEEP_SECONDS * 1e9)
        old = [
            (one.name, one.spec.session)
            for one in self._store.list(PRESENCE, self._channel)
            if 0 < one.spec.left_at_ns <= before_ns
        ]
        for at in range(0, len(old), BATCH):
            await self._each(dict(old[at : at + BATCH]), "presence.forget", _forgotten)


def _marked_left(spec: PresenceSpec, now_ns: int) -> PresenceSpec:
    return msgspec.structs.replace(spec, left_at_ns=spec.left_at_ns or max(1, now_ns))


def _settled(spec: PresenceSpec, _now_ns: int) -> PresenceSpec:
    return msgspec.structs.replace(spec, server="")


def _forgotten(_spec: PresenceSpec, _now_ns: int) -> None:
    """A session that has ended does not begin again."""
