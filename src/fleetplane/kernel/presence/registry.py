"""Where each agent of a channel has its session, among all servers.

An agent has one session. Its number is the revision of the transaction that entered it, so the newest wins:
the log says which that is, and every server reads the same log. A server whose session was replaced learns
it from the log, closes the stream and writes nothing about the agent.

Sessions enter and leave many at a time: those of 50 ms, at most 256, are one transaction. On a database file
there are no other servers: nothing is stored, and every question is answered from memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import msgspec
import structlog

from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    Conflict,
    FleetplaneError,
    InvalidArgument,
    OutcomeUnknown,
    Unauthenticated,
    Unavailable,
)
from fleetplane.kernel.presence.departures import PRESENCE, Departures, PresenceSpec
from fleetplane.kernel.resources import Key, Kind, Resource, SpecT, StatusT, check_key
from fleetplane.kernel.store import Draft, Store, follow
from fleetplane.kernel.store.store import SYSTEM

log = structlog.get_logger(__name__)

BATCH = 256
"""Sessions in one transaction, so that it never holds up other writers for long."""
GATHER_SECONDS = 0.05
"""How long the first of a batch waits for others."""
RETRY_SECONDS = 1.0
ORPHANS_SECONDS = 10.0
"""For so long a presence of this process must be one that nobody here knows before it is ended: as long as
an agent may take to come back."""
ORPHANS_LOOK_SECONDS = 60.0
DIGEST_LIMIT_BYTES = 64
MOMENT_LIMIT_NS = 2**63 - 1
ALONE_SESSION = 0
"""The number of every session on a database file."""


class ReplayedHello(Unauthenticated):
    """The hello is not newer than one that was accepted before, on whichever server."""

    reason = "REPLAYED_HELLO"
    hint = (
        "open a new stream with a new hello; if the agent's clock was set back, wait until it has caught up"
    )


class PresenceReader(Protocol):
    """The store, or a draft of a transaction."""

    def get(self, kind: Kind[SpecT, StatusT], scope: str, name: str) -> Resource[SpecT, StatusT] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entering:
    agent: str
    hello_at_ns: int
    digest: bytes
    done: asyncio.Future[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Leaving:
    agent: str
    session: int
    done: asyncio.Future[bool]


class PresenceRegistry:
    def __init__(self, store: Store, clock: Clock, *, channel: str) -> None:
        self._store = store
        self._clock = clock
        self._channel = channel
        self.shared = store.shared
        """Whether other servers may have agents; if not, nothing is stored."""
        self._here: dict[str, int] = {}
        """The session of each agent that is here, where it is stored."""
        self._alone: Counter[str] = Counter()
        """Sessions of each agent here, where none is stored: an older may end after a newer began."""
        self._moved: list[Callable[[str, int], None]] = []
        self._entering: list[_Entering] = []
        self._leaving: list[_Leaving] = []
        self._news = asyncio.Event()
        self._ended = False

    def __repr__(self) -> str:
        return f"<Whereabouts {self._channel} here={len(self._here) + len(self._alone)}>"

    # Asking.

    def session_here(self, agent: str) -> int | None:
        """The session that the agent has on this server; None if it has none, or a newer one elsewhere."""
        if not self.shared:
            return ALONE_SESSION if agent in self._alone else None
        return self._here.get(agent)

    def is_anywhere(self, agent: str) -> bool:
        return self.named(self._store, agent) is not None

    def server_of(self, agent: str) -> str:
        """Which server has the agent; empty if none has it, and where there is only one."""
        found = self._store.get(PRESENCE, self._channel, agent) if self.shared else None
        return found.spec.server if found is not None and found.spec.is_open else ""

    def named(self, reader: PresenceReader, agent: str) -> int | None:
        """The session that the agent has, on whichever server, as a transaction or the store sees it."""
        if not self.shared:
            return self.session_here(agent)
        found = reader.get(PRESENCE, self._channel, agent)
        return found.spec.session if found is not None and found.spec.is_open else None

    def on_moved(self, tell: Callable[[str, int], None]) -> None:
        """Tell of each session of this server that was replaced: its stream is closed, nothing is written."""
        self._moved.append(tell)

    # Coming and going.

    async def enter(self, agent: str, *, hello_at_ns: int = 0, digest: bytes = b"") -> int:
        """Begin a session of the agent here, which ends the one it has; returns its number.

        Raises `ReplayedHello` for a hello that is not newer than the last one that was accepted.
        """
        if not self.shared:
            return self.enter_alone(agent)
        if self._ended:
            raise Unavailable("the server is shutting down")
        check_key(self.key(agent))  # one that could not be stored would fail those who come with it
        if len(digest) > DIGEST_LIMIT_BYTES or not 0 <= hello_at_ns <= MOMENT_LIMIT_NS:
            raise InvalidArgument("the hello's time or digest is out of range", field="hello")
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._entering.append(_Entering(agent=agent, hello_at_ns=hello_at_ns, digest=digest, done=done))
        self._news.set()
        return await done

    def enter_alone(self, agent: str) -> int:
        """The same on a database file, where nobody has to be asked."""
        assert not self.shared, "other servers must be told"
        self._alone[agent] += 1
        return ALONE_SESSION

    async def leave(self, agent: str, session: int) -> bool:
        """End a session, once for each that was entered; True if the agent had no newer one.

        If its caller is cancelled, the session ends all the same.
        """
        return await asyncio.shield(self.leaving(agent, session))

    def leaving(self, agent: str, session: int) -> asyncio.Future[bool]:
        """The same for who cannot wait, or wants to ask again: shared, wait for it and do not cancel it."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if not self.shared:
            self._alone[agent] -= 1
            done.set_result(self._alone[agent] <= 0)
            if self._alone[agent] <= 0:
                del self._alone[agent]
            return done
        if self._here.get(agent) == session:
            del self._here[agent]
        if self._ended or self.named(self._store, agent) != session:
            done.set_result(False)
            return done
        self._leaving.append(_Leaving(agent=agent, session=session, done=done))
        self._news.set()
        return done

    def key(self, agent: str) -> Key:
        """What a transaction touches that calls `forget_in`."""
        return PRESENCE.key(self._channel, agent)

    def forget_in(self, draft: Draft, agent: str) -> None:
        """Take away what is stored of an agent, in the transaction that removes it; ends its session."""
        if self.shared and draft.get(PRESENCE, self._channel, agent) is not None:
            draft.delete(PRESENCE, self._channel, agent)

    async def forget(self, agent: str) -> None:
        """Take away what is stored of an agent that was removed; ends its session."""
        if self.shared:
            await self._store.transact(
                lambda draft: self.forget_in(draft, agent),
                actor=SYSTEM,
                action="presence.forget",
                touches=[self.key(agent)],
            )

    # Working.

    async def run_here(self) -> None:
        """Enter and end sessions, and follow those of other servers, until cancelled. On every server."""
        if not self.shared:
            await asyncio.get_running_loop().create_future()
        self._ended = False
        try:
            async with Boundary() as tasks:
                tasks.keep(f"{self._channel}/presence", self._gather)
                tasks.keep(f"{self._channel}/moves", self._follow)
                tasks.keep(f"{self._channel}/orphans", self._find_orphans)
        finally:
            self._end()

    async def run_for_all(self, ended: Callable[[str, int], Awaitable[None]]) -> None:
        """End sessions of servers that are gone, until cancelled. On the server that has the seat.

        `ended` is told of each, after the presence was taken away; it may be told twice.
        """
        if not self.shared:
            await asyncio.get_running_loop().create_future()
        await Departures(self._store, self._clock, channel=self._channel, ended=ended).run()

    def _end(self) -> None:
        """Nothing is written any more: what is still stored is ended as that of a server that is gone."""
        self._ended = True
        entering, self._entering = self._entering, []
        leaving, self._leaving = self._leaving, []
        for coming in entering:
            if not coming.done.done():
                coming.done.set_exception(Unavailable("the server is shutting down"))
        for going in leaving:
            if not going.done.done():
                going.done.set_result(False)

    async def _gather(self) -> NoReturn:
        while True:
            await self._news.wait()
            await self._clock.sleep(GATHER_SECONDS)
            self._news.clear()
            coming, going = self._taken()
            while coming or going:
                try:
                    await self._write(coming, going)
                except asyncio.CancelledError:
                    self._entering[:0], self._leaving[:0] = coming, going  # `_end` answers them
                    raise
                except Exception as error:
                    log.warning(
                        "presence.not_written",
                        channel=self._channel,
                        entering=len(coming),
                        leaving=len(going),
                        error=str(error),
                    )
                    for one in coming:  # the agent comes again
                        if not one.done.done():
                            one.done.set_exception(_refused(error))
                    self._leaving[:0] = going
                    await self._clock.sleep(RETRY_SECONDS)
                if len(self._entering) + len(self._leaving) < BATCH:  # the rest waits for others, too
                    break
                coming, going = self._taken()
            if self._entering or self._leaving:
                self._news.set()

    def _taken(self) -> tuple[Sequence[_Entering], Sequence[_Leaving]]:
        """The next batch, with each agent once among those who enter: of two, the later is the newer."""
        coming: dict[str, _Entering] = {}
        later: list[_Entering] = []
        for one in self._entering:
            if one.done.done():  # its stream is gone
                continue
            if one.agent in coming or len(coming) >= BATCH:
                later.append(one)
            else:
                coming[one.agent] = one
        self._entering = later
        room = BATCH - len(coming)
        going, self._leaving = self._leaving[:room], self._leaving[room:]
        return list(coming.values()), going

    async def _write(self, coming: Sequence[_Entering], going: Sequence[_Leaving]) -> None:
        author = self._store.author

        def change(draft: Draft) -> tuple[list[int | None], list[bool]]:
            entered = [
                _enter(draft, self._channel, one, server=author.server, boot=author.boot) for one in coming
            ]
            left = [leave_in(draft, self._channel, one.agent, one.session) for one in going]
            return entered, left

        keys = {self.key(agent) for agent in (*(one.agent for one in coming), *(one.agent for one in going))}
        done = await self._store.transact(change, actor=SYSTEM, action="presence.write", touches=keys)
        entered, left = done.value
        for one, session in zip(coming, entered, strict=True):
            self._answer(one, session)
        for leaver, was_there in zip(going, left, strict=True):
            if not leaver.done.done():
                leaver.done.set_result(was_there)

    def _answer(self, one: _Entering, session: int | None) -> None:
        if session is None:
            if not one.done.done():
                one.done.set_exception(ReplayedHello("the hello is not newer than the last one"))
        elif one.done.done():  # cancelled meanwhile: nobody else would end it
            self.leaving(one.agent, session)
        elif self.named(self._store, one.agent) != session:
            one.done.set_exception(Conflict("superseded", hint="a newer session of the same agent has begun"))
        else:
            self._here[one.agent] = session
            one.done.set_result(session)

    # Following.

    async def _follow(self) -> None:
        everybody = follow(
            self._store, PRESENCE, self._channel, begin=lambda _watch: self._look(tuple(self._here))
        )
        async for batch in everybody:
            self._look([event.resource.name for event in batch.events])

    def _look(self, agents: Sequence[str]) -> None:
        """See which of these have their session elsewhere by now."""
        for agent in agents:
            session = self._here.get(agent)
            if session is not None and self.named(self._store, agent) != session:
                del self._here[agent]
                for tell in self._moved:
                    tell(agent, session)

    async def _find_orphans(self) -> NoReturn:
        """End sessions of this process that nobody here knows: of streams that ended with what had served
        agents before this server took the seat, and of an entry that was refused because nobody knew its
        outcome."""
        while True:
            found = self._orphans()
            await self._clock.sleep(ORPHANS_SECONDS)
            still = self._orphans()
            names = [agent for agent, session in found.items() if still.get(agent) == session]
            for at in range(0, len(names), BATCH):
                await self._end_orphans({agent: found[agent] for agent in names[at : at + BATCH]})
            await self._clock.sleep(ORPHANS_LOOK_SECONDS)

    def _orphans(self) -> dict[str, int]:
        process = self._store.author[:2]
        return {
            found.name: found.spec.session
            for found in self._store.list(PRESENCE, self._channel)
            if found.spec.is_open
            and (found.spec.server, found.spec.boot) == process
            and self._here.get(found.name) != found.spec.session
        }

    async def _end_orphans(self, sessions: Mapping[str, int]) -> None:
        def change(draft: Draft) -> None:
            for agent, session in sessions.items():
                leave_in(draft, self._channel, agent, session, forgotten=True)

        keys = [self.key(agent) for agent in sessions]
        try:
            await self._store.transact(change, actor=SYSTEM, action="presence.orphans", touches=keys)
        except FleetplaneError as error:  # they are found again
            log.warning("presence.orphans_not_ended", channel=self._channel, error=error.message)


def _enter(draft: Draft, channel: str, one: _Entering, *, server: str, boot: int) -> int | None:
    """The session's number; None for a hello that was used before."""
    found = draft.get(PRESENCE, channel, one.agent)
    if found is not None and _is_replayed(found.spec, one):
        return None
    spec = PresenceSpec(
        server=server,
        boot=boot,
        session=draft.revision,
        hello_at_ns=max(one.hello_at_ns, found.spec.hello_at_ns if found is not None else 0),
        digest=one.digest,
    )
    draft.put(PRESENCE, channel, one.agent, spec=spec)
    return spec.session


def _is_replayed(last: PresenceSpec, one: _Entering) -> bool:
    if one.hello_at_ns and one.hello_at_ns <= last.hello_at_ns:
        return True
    return bool(one.digest) and one.digest == last.digest


def leave_in(draft: Draft, channel: str, agent: str, session: int, *, forgotten: bool = False) -> bool:
    """Mark a session as ended; False if it has been, or a newer one has begun."""
    found = draft.get(PRESENCE, channel, agent)
    if found is None or not found.spec.is_open or found.spec.session != session:
        return False
    boot = 0 if forgotten else found.spec.boot
    spec = msgspec.structs.replace(found.spec, left_at_ns=max(1, draft.now_ns), boot=boot)
    draft.put(PRESENCE, channel, agent, spec=spec)
    return True


def _refused(error: Exception) -> Exception:
    """What an agent is told whose session could not be written: also if it may have been, it comes again."""
    if isinstance(error, OutcomeUnknown):
        return Unavailable("the session could not be written", hint="come again")
    return error
