"""What a bus owes that carries a bell, and what is said about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

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
