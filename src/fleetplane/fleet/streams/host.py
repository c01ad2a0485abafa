"""One bidirectional stream of one agent, from its first message to its end.

The first message proves which agent it is. One task reads and one writes; outgoing messages wait in
the session's bounded queue. A newer stream of the same agent supersedes the older one, whose
unfinished work is settled before the newer stream opens; on several servers the newest supersedes
those on all of them, and the server of an older one settles that. An agent that does not read is
disconnected after a write time-out. An agent that sends faster than the policy allows is read at that
rate: it feels back-pressure, and nothing is dropped. A revocation ends the stream at once, also while
a write is blocked. When the server stops, each agent gets a last message first.

Admission, the meaning of messages and the wording of the end belong to the domain: its
`StreamProtocol`. Messages are whatever the transport delivers: bytes, or decoded messages.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import structlog

from fleetplane.fleet.streams.presence import L, Out, Presences
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict, Unavailable
from fleetplane.kernel.presence import PresenceRegistry
from fleetplane.kernel.sessions import STOPPING, SUPERSEDED, Session, Sessions
from fleetplane.rpc import CallContext, Rate
from fleetplane.rpc.methods import TokenBucket
from fleetplane.rpc.serving.exchange import ClientGone

log = structlog.get_logger(__name__)

TURN_MESSAGES = 64
"""Messages of one stream handled before other tasks get a turn of the event loop: some milliseconds."""
SETTLE_ATTEMPTS = 4
"""At settling an ended stream, which its connection, its deadline and the end of the server may cut short."""
ADMISSIONS_PER_SECOND = 400.0
"""Streams that begin on one of several servers, where the agents of another may arrive all at once. Opening
one takes about a millisecond of the event loop, which meanwhile must say that this server lives, too."""
ADMISSIONS_BURST = 100
STUCK = "stuck"
"""Why a stream is ended: its agent does not read what it is sent."""

In = TypeVar("In")
In_contra = TypeVar("In_contra", contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPolicy:
    hello_seconds: float = 10.0
    """From the opening of a stream to its first message."""
    queue_limit: int = 64
    """Messages waiting to be written."""
    write_seconds: float = 60.0
    """Time-out of one write. Small messages fit into the flow-control window and leave at once."""
    pace: Rate | None = None
    """The rate at which one agent's messages are read; None: as fast as they are handled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnding(Generic[Out]):
    """The last message and the status of a stream that the server ends."""

    last: Out | None = None
    """A message before the status."""
    error: Exception | None = None
    """The status; None ends the stream with OK."""


class Entrance(Protocol[Out, L]):
    """Registers an authenticated stream as its agent's current one."""

    async def __call__(
        self,
        agent: str,
        live: Callable[[Session[Out]], L],
        *,
        principal: str,
        serial: int | None = None,
        check: Callable[[L], None] | None = None,
        settle: Callable[[], Awaitable[None]] | None = None,
        hello_at_ns: int = 0,
        digest: bytes = b"",
    ) -> L:
        """Ends the agent's older stream and settles it, then opens a session and makes a `Live` of it.

        Where several servers share the store, a hello whose time or digest was accepted before, by any of
        them, is refused (`ReplayedHello`), and ends nothing. `check` raises if an older stream of this server
        must not be superseded. `settle` is awaited while the agent has no open stream here; it handles what
        an earlier stream or an earlier server process left unfinished.
        Raises if the caller was revoked meanwhile, too many sessions are open, or the agent has begun a newer
        session on another server.
        """


class StreamProtocol(Protocol[In_contra, Out, L]):
    """The domain's part."""

    async def admit(self, first: In_contra | None, context: CallContext, enter: Entrance[Out, L]) -> L:
        """Authenticate, and call `enter` once, or raise. `first` is None if no message came in time."""

    def opened(self, live: L) -> None:
        """Called after the response headers were sent."""

    async def arrived(self, live: L) -> None:
        """Send what waited for the agent; runs beside reader and writer, and is cancelled with them."""

    async def take(self, live: L, message: In_contra) -> None:
        """Handle a message; an exception ends the stream."""

    async def left(self, live: L) -> None:
        """Settle the unfinished work of an ended stream; a newer stream of the same agent waits for it.

        Called again if it was cancelled before it finished.
        """

    def ending(self, live: L, reason: str, error: Exception | None) -> StreamEnding[Out]:
        """`error` is what reading or `take` raised; otherwise the session's `reason` says why it ended."""


class StreamHost(Generic[In, Out, L]):
    def __init__(
        self,
        protocol: StreamProtocol[In, Out, L],
        *,
        stream: str,
        presences: Presences[L],
        sessions: Sessions,
        clock: Clock,
        policy: StreamPolicy,
        whereabouts: PresenceRegistry | None = None,
    ) -> None:
        """`stream` names the kind of stream in the sessions; `whereabouts` are those of its agents.

        Without them, a stream is superseded by newer ones of this server alone.
        """
        self._protocol = protocol
        self._stream = stream
        self._presences = presences
        self._sessions = sessions
        self._clock = clock
        self._policy = policy
        self._whereabouts = whereabouts
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._queue = AdmissionQueue()
        self._stopping = False
        if whereabouts is not None:
            whereabouts.on_moved(self._moved)

    def __repr__(self) -> str:
        return f"<StreamHost {self._stream} {self._presences!r}>"

    async def serve(self, requests: AsyncIterator[In], context: CallContext) -> None:
        first = await self._first(requests)
        live = await self._admit(first, context)
        found: list[Exception] = []
        try:
            await context.send_initial_metadata(())
            self._protocol.opened(live)
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._listen(requests, live, found))
                arrival = tasks.create_task(self._protocol.arrived(live))
                await self._speak(live, context)
                reader.cancel()
                arrival.cancel()
        finally:
            live.session.close()
            await self._settle(live)
        await self._end(live, context, found[0] if found else None)

    def stop(self, last: Callable[[L], Out] | None = None) -> None:
        """Close all streams because the server stops, each after the message that `last` makes, if any.

        Those that are being admitted are turned away: they would keep the server until its patience ends.
        """
        self._stopping = True
        for live in self._presences:
            if last is not None:
                live.session.offer(last(live))
        self._sessions.close_all(STOPPING, flush=True)

    # Beginning.

    async def _first(self, requests: AsyncIterator[In]) -> In | None:
        try:
            async with asyncio.timeout(self._policy.hello_seconds):
                return await anext(requests, None)
        except TimeoutError:
            return None

    async def _admit(self, first: In | None, context: CallContext) -> L:
        entered: list[L] = []

        async def enter(
            agent: str,
            live: Callable[[Session[Out]], L],
            *,
            principal: str,
            serial: int | None = None,
            check: Callable[[L], None] | None = None,
            settle: Callable[[], Awaitable[None]] | None = None,
            hello_at_ns: int = 0,
            digest: bytes = b"",
        ) -> L:
            assert not entered, "a stream enters once"
            async with self._placed(agent, check, hello_at_ns=hello_at_ns, digest=digest) as place:
                while True:
                    await self._make_way(agent, check if place is None else None)
                    if settle is not None:
                        await settle()
                    if self._holder(agent) is None:
                        break
                if self._stopping:
                    raise Unavailable("the server is shutting down")
                self._check_place(agent, place)
                # Nothing is awaited from here on: of two that waited for the same place, one has it.
                session: Session[Out] = self._sessions.open(
                    agent, self._stream, limit=self._policy.queue_limit, principal=principal, serial=serial
                )
                made = live(session)
                made.place = place or 0
                if place is None and self._whereabouts is not None:
                    self._whereabouts.enter_alone(agent)
                entered.append(made)
                self._presences.came(made)
                return made

        try:
            return await self._protocol.admit(first, context, enter)
        except BaseException:
            for live in entered:
                live.session.close()
                await self._settle(live)
            raise

    @asynccontextmanager
    async def _placed(
        self, agent: str, check: Callable[[L], None] | None, *, hello_at_ns: int, digest: bytes
    ) -> AsyncIterator[int | None]:
        """Begin the agent's session among all servers, and end it if the stream does not open.

        None where there is only one server. Before the older stream ends: a hello that is refused must not
        end it. Of two streams of one agent that begin here at once, the later is checked against the earlier.
        """
        where = self._whereabouts
        if where is None or not where.shared:
            yield None
            return
        async with self._turns.setdefault(agent, asyncio.Lock()):
            await self._queue.turn(self._clock)
            if check is not None and (older := self._presences.get(agent)) is not None:
                check(older)
            place = await where.enter(agent, hello_at_ns=hello_at_ns, digest=digest)
            try:
                yield place
            except BaseException:
                where.leaving(agent, place)
                raise

    def _check_place(self, agent: str, place: int | None) -> None:
        if place is None or self._whereabouts is None or self._whereabouts.session_here(agent) == place:
            return
        raise Conflict("superseded", hint="a newer session of the same agent has begun")

    def _moved(self, agent: str, session: int) -> None:
        """The agent has a newer session on another server."""
        live = self._presences.current(agent)
        if live is not None and live.place == session:
            live.moved = True
            live.session.close(SUPERSEDED)

    def _holder(self, agent: str) -> L | None:
        """The agent's current stream, until it is settled."""
        live = self._presences.current(agent)
        return live if live is not None and not live.is_over else None

    async def _make_way(self, agent: str, check: Callable[[L], None] | None) -> None:
        """Supersede the agent's current stream, and settle its work before the new stream opens."""
        while (older := self._holder(agent)) is not None:
            if check is not None and older.session.is_open:
                check(older)
            older.session.close(SUPERSEDED)
            await self._settle(older, own=False)

    # Writing.

    async def _speak(self, live: L, context: CallContext) -> None:
        """Write until the session ends; a connection that broke, or is not read, ends it."""
        try:
            async for message in live.session:
                waiting = context.push(message)
                if waiting is not None:  # the transport has no room for it yet
                    await self._written(live.session, waiting)
        except ClientGone:
            live.session.close()
        except TimeoutError:
            live.session.close(STUCK)

    async def _written(self, session: Session[Out], waiting: Awaitable[None]) -> None:
        """Await a blocked write until its time-out, or until the session is closed without a flush."""
        async with asyncio.timeout(self._policy.write_seconds) as limit:

            def cut(_closed: asyncio.Future[str]) -> None:
                if not session.flushing:
                    limit.reschedule(asyncio.get_running_loop().time())

            session.closed.add_done_callback(cut)
            try:
                await waiting
            finally:
                session.closed.remove_done_callback(cut)

    # Reading.

    async def _listen(self, requests: AsyncIterator[In], live: L, found: list[Exception]) -> None:
        """Never raises: an error here ends the stream by way of its writer.

        Each message is handled before the next is read; the unread ones are the agent's back-pressure.
        """
        pace = _MessagePace(self._policy.pace, self._clock) if self._policy.pace is not None else None
        taken = 0
        try:
            async for message in requests:
                await self._protocol.take(live, message)
                taken += 1
                if taken % TURN_MESSAGES == 0:
                    await asyncio.sleep(0)
                if pace is not None and await pace.keep():
                    log.warning("streams.agent_slowed", stream=self._stream, agent=live.agent)
        except ClientGone:
            pass  # its connection broke: nothing is wrong, and nobody is there to be told
        except Exception as error:
            found.append(error)
        finally:
            live.session.close(flush=True)

    # Ending.

    async def _settle(self, live: L, *, own: bool = True) -> None:
        """Settle a stream once: at its own end or when a newer stream replaces it, whichever comes first.

        If the newer stream is cancelled meanwhile, the older one's own end settles it from the start.
        """
        while not live.is_over:
            if live.settling is not None:
                await asyncio.wait((live.settling,))
                continue
            settling = live.settling = asyncio.get_running_loop().create_future()
            try:
                await (self._left(live) if own else self._leave(live))
            except asyncio.CancelledError:
                live.settling = settling if own else None
                raise
            finally:
                if live.settling is not None:
                    self._presences.gone(live)
                settling.set_result(None)

    async def _left(self, live: L) -> None:
        """Settle from the start if cancelled: an agent often ends its stream and then cuts the connection.

        Nobody else would settle it. The cancellation is passed on afterwards.
        """
        cancelled: asyncio.CancelledError | None = None
        for _ in range(SETTLE_ATTEMPTS):
            try:
                await self._leave(live)
                break
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _leave(self, live: L) -> None:
        """First say that the session has ended, and to which server: only then is it known what to write."""
        if self._whereabouts is not None:
            if live.departing is None:
                live.departing = self._whereabouts.leaving(live.agent, live.place)
            if not await asyncio.shield(live.departing):
                live.moved = True
        if self._presences.current(live.agent) is live:
            await self._protocol.left(live)

    async def _end(self, live: L, context: CallContext, error: Exception | None) -> None:
        """Send the reason of the end, unless the agent ended the stream."""
        ending = self._protocol.ending(live, live.session.reason or "", error)
        if ending.last is not None:
            try:
                async with asyncio.timeout(self._policy.write_seconds):
                    await context.write(ending.last)
            except (ClientGone, TimeoutError):
                pass  # the status says the same
        if ending.error is not None:
            raise ending.error


class AdmissionQueue:
    """Lets those who come begin one after the other, in the order in which they came, at a rate.

    Whoever goes away while it waits has taken no place: an agent that comes and goes without end would
    otherwise keep all others out.
    """

    def __init__(self, *, per_second: float = ADMISSIONS_PER_SECOND, burst: int = ADMISSIONS_BURST) -> None:
        self._gap_seconds = 1 / per_second
        self._burst_seconds = burst / per_second
        self._next = -math.inf
        self._first = asyncio.Lock()
        """Held by who is next; those behind it wait in order."""

    async def turn(self, clock: Clock) -> None:
        """Return when it is the caller's turn, which takes it."""
        async with self._first:
            now = clock.monotonic()
            at = max(self._next, now - self._burst_seconds) + self._gap_seconds
            if at > now:
                await clock.sleep(at - now)
            self._next = at


class _MessagePace:
    """How fast the messages of one stream are taken."""

    def __init__(self, rate: Rate, clock: Clock) -> None:
        self._rate = rate
        self._clock = clock
        self._bucket = TokenBucket(tokens=float(rate.burst), filled_at=clock.monotonic())
        self._slowed = False

    async def keep(self) -> bool:
        """Wait until the next message may be taken; True the first time that this takes time."""
        first = False
        while (seconds := self._bucket.take(self._rate, self._clock.monotonic())) > 0:
            first = first or not self._slowed
            self._slowed = True
            await self._clock.sleep(seconds)
        return first
