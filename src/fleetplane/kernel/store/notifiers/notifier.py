"""The commit notifier of a server: announces its own commits, and wakes the follower on commits of others.

A notification carries the number of the newest group and nothing else; the groups are read from the
database. A message that is lost, repeated or forged costs at most a late or an unnecessary read.
So the bus may be away for any time: followers poll as well, at longer intervals.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn, Protocol

import structlog

from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, Unavailable

MESSAGE_BYTES = 128
"""A lineage of 32 characters, a space, and a number of at most 19 digits: 52. What is larger is no bell."""
NUMBER_LIMIT = 2**63
"""Groups are counted by the database's bigint."""

_MESSAGE = re.compile(rb"([0-9a-f]{1,64}) ([0-9]{1,19})")


class BusKind(StrEnum):
    NONE = "none"
    """The store is a file, or nobody follows it."""
    NOTIFY = "notify"
    """PostgreSQL's LISTEN and NOTIFY."""
    NATS = "nats"


@dataclass(frozen=True, slots=True, kw_only=True)
class BusState:
    kind: BusKind = BusKind.NONE
    connected: bool = False
    trouble: str = ""
    """Why it is not connected."""


NO_BUS = BusState()


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsSettings:
    servers: Sequence[str]
    """`nats://host:port`, or `tls://` for one that must speak TLS."""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    credentials_file: str = ""
    token: str = ""
    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"<NatsSettings {', '.join(self.servers)}>"

    @property
    def needs_tls(self) -> bool:
        return bool(self.ca_file or self.cert_file) or any(one.startswith("tls://") for one in self.servers)

    @property
    def secret(self) -> str:
        """The setting with which this server shows who it is."""
        if self.credentials_file:
            return "bus.credentials_file"
        if self.user:
            return "bus.user and bus.password"
        return "bus.token" if self.token else "bus.user, bus.token or bus.credentials_file (none is set)"


Heard = Callable[[bytes | None], None]
"""Told every message, whoever sent it, and None where some were dropped; returns at once, never raises."""


class BusLine(Protocol):
    """A connection to a bus."""

    async def ring(self, message: bytes) -> None:
        """Send a message to all who listen; returns once the bus has it. Raises Unavailable."""
        ...

    async def check(self) -> None:
        """Raise Unavailable unless messages would arrive here."""
        ...

    async def lost(self) -> str:
        """Return once the connection is lost, saying why."""
        ...


class Bus(Protocol):
    @property
    def kind(self) -> BusKind: ...

    def line(self, lineage: str, heard: Heard) -> AbstractAsyncContextManager[BusLine]:
        """Connect, and listen to what is rung for a lineage. Raises Unavailable, naming a setting to mend."""
        ...


def message(lineage: str, number: int) -> bytes:
    """What is rung: whose database, and its newest group that the ringing server knows of."""
    return f"{lineage} {number}".encode()


def number_of(found: bytes, lineage: str) -> int | None:
    """The number that a message names; None if it is not one of this lineage. Anybody may have sent it."""
    if len(found) > MESSAGE_BYTES or (parts := _MESSAGE.fullmatch(found)) is None:
        return None
    whose, number = parts[1].decode(), int(parts[2])
    return number if whose == lineage and number < NUMBER_LIMIT else None


log = structlog.get_logger(__name__)

FIRST_RETRY_SECONDS = 0.25
LAST_RETRY_SECONDS = 15.0
CHECK_SECONDS = 10.0
"""Between two questions whether the bus still listens to us: a line that is cut says nothing."""
ANSWER_SECONDS = 5.0
IDLE_SECONDS = 0.1
"""After a bell at which nothing was found, before the next is answered: a flood of them costs ten reads a
second, less than the readers of one watch."""


@dataclass(slots=True, kw_only=True)
class NotifierCounts:
    rung: int = 0
    """Messages sent."""
    coalesced: int = 0
    """Commits that were announced together with a later one."""
    heard: int = 0
    """Messages that named a group which was not there yet."""
    known: int = 0
    """Messages about what was there already, such as this server's own."""
    ignored: int = 0
    """Messages that were no bell of this lineage."""
    dropped: int = 0
    """Times when messages were too many or too large to be held. They are answered by one read."""
    reads: int = 0
    """Times the log was read because of a bell."""
    connections: int = 0


class CommitNotifier:
    def __init__(
        self,
        bus: Bus,
        lineage: str,
        clock: Clock,
        *,
        known: Callable[[], int],
        read: Callable[[], Awaitable[None]],
    ) -> None:
        """`known` tells the last group that memory has; `read` brings everything into it that there is."""
        self._bus = bus
        self._lineage = lineage
        self._clock = clock
        self._known = known
        self._read = read
        self._number = 0
        self._asked = asyncio.Event()
        """To ring, since the last message was sent."""
        self._woken = asyncio.Event()
        self._wanted = 0
        """The newest group that a bell has named, since the log was read."""
        self._connected = False
        self._trouble = "not connected yet"
        self.counts = NotifierCounts()

    def __repr__(self) -> str:
        return f"<Doorbell {self.state.kind} connected={self._connected}>"

    @property
    def state(self) -> BusState:
        trouble = "" if self._connected else self._trouble
        return BusState(kind=self._bus.kind, connected=self._connected, trouble=trouble)

    def ring(self, number: int) -> None:
        """Tell the others that there is a group of this number; returns at once, and costs nothing if they
        cannot be told."""
        self._number = max(self._number, number)
        if self._asked.is_set():
            self.counts.coalesced += 1
        self._asked.set()

    def heard(self, found: bytes | None) -> None:
        """A message, by whomever; None if there were more than could be held."""
        if found is None:
            self.counts.dropped += 1
            self._wake(self._known() + 1)
        elif (number := number_of(found, self._lineage)) is None:
            self.counts.ignored += 1
        elif number <= self._known():
            self.counts.known += 1
        else:
            self.counts.heard += 1
            self._wake(number)

    def _wake(self, number: int) -> None:
        self._wanted = max(self._wanted, number)
        self._woken.set()

    async def run(self) -> None:
        """Ring and answer until cancelled."""
        async with Boundary() as tasks:
            tasks.keep("bell/answer", self._answer)
            tasks.keep("bell/connect", self._connect)

    async def _answer(self) -> NoReturn:
        while True:
            await self._woken.wait()
            self._woken.clear()
            wanted, self._wanted, before = self._wanted, 0, self._known()
            if wanted <= before:  # somebody else has read it meanwhile
                continue
            self.counts.reads += 1
            with suppress(FleetplaneError):  # who looks by himself meets it too, and knows what it means
                await self._read()
            if self._known() == before:
                await self._clock.sleep(IDLE_SECONDS)

    async def _connect(self) -> NoReturn:
        wait = FIRST_RETRY_SECONDS
        away_since: float | None = None
        while True:
            trouble = ""
            try:
                async with self._bus.line(self._lineage, self.heard) as line:
                    wait = FIRST_RETRY_SECONDS
                    self._connected = True
                    self.counts.connections += 1
                    if away_since is not None:
                        seconds = round(self._clock.monotonic() - away_since, 1)
                        log.info("bus.back", bus=self._bus.kind.value, seconds=seconds)
                        away_since = None
                    self._wake(self._known() + 1)  # who knows what was rung before
                    trouble = await self._use(line)
            except FleetplaneError as error:
                trouble = error.message
            except Exception as error:  # of a client of somebody else's: no bell is worth a server
                trouble = repr(error)
            finally:
                self._connected = False
            self._trouble = trouble
            if away_since is None:
                away_since = self._clock.monotonic()
                log.warning(
                    "bus.away",
                    bus=self._bus.kind.value,
                    error=trouble,
                    consequence="changes of other servers are seen at the next look, not at once",
                )
            await self._clock.sleep(wait * (0.5 + 0.5 * self._clock.random()))  # servers come back apart
            wait = min(2 * wait, LAST_RETRY_SECONDS)

    async def _use(self, line: BusLine) -> str:
        """Ring and listen until the line is lost; returns why it was."""
        work = [
            asyncio.create_task(one, name=f"bell/{name}")
            for name, one in (("lost", line.lost()), ("send", self._send(line)), ("check", self._check(line)))
        ]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in work:
                task.cancel()
            ended = await asyncio.gather(*work, return_exceptions=True)
        for one in ended:
            if isinstance(one, str):
                return one
            if isinstance(one, Exception):
                raise one
        return "the connection was lost"

    async def _send(self, line: BusLine) -> NoReturn:
        while True:
            await self._asked.wait()
            self._asked.clear()
            await _in_time(line.ring(message(self._lineage, self._number)))
            self.counts.rung += 1

    async def _check(self, line: BusLine) -> NoReturn:
        while True:
            await self._clock.sleep(CHECK_SECONDS)
            await _in_time(line.check())


async def _in_time(answer: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await answer
    except TimeoutError as error:
        raise Unavailable(f"the bus did not answer for {ANSWER_SECONDS:.0f} seconds") from error
