"""The servers of an installation, as objects of the resource API: the one that answers, and those beside it.

Servers that share a database know of each other what the database has heard of each; of itself the one that
answers knows more. Nothing here asks: `ServerRoster` has done so a moment ago, for everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from zlib import crc32

from fleetplane.fleet.resources.common import VIEW, as_stored, at_root, made_up
from fleetplane.fleet.resources.declaration import Column, ObservedPart, PublicResource, ResourceShape
from fleetplane.kernel.resources import AnyResource, Kind
from fleetplane.kernel.store.notifiers.notifier import BusState
from fleetplane.kernel.store.servers.engine import ServerReport
from fleetplane.kernel.values.times import NS, spelled

FRESH_SECONDS = 5.0
"""Servers renew every second: one that did not for this long is shown with its age."""
SIZE_STEP_BYTES = 16 * 1024**2
"""A database that grew by this much is worth telling; it always grows."""


class ServerSpecView(ResourceShape, frozen=True):
    domains: Sequence[str]
    """Fleets that it serves; of another server than the one that answers, none are known."""


class DatabaseView(ResourceShape, frozen=True):
    engine: str
    """`sqlite` or `postgresql`."""
    size_bytes: int | None
    """Null before it was asked for."""


class BusView(ResourceShape, frozen=True):
    kind: Literal["none", "notify", "nats"]
    """Over what servers that share a database tell each other of writes: nothing, PostgreSQL or NATS."""
    connected: bool
    trouble: str
    """Why it is not connected, of the server that answers. Changes of other servers are seen later then."""


class ServerStatusView(ResourceShape, frozen=True):
    id: str
    """As `fleetplane servers` prints it."""
    state: str
    """`active`, `standby` or `gone`."""
    version: str
    answers: bool
    """Whether it is the one that gave this answer; null below is what only that one would know."""
    writable: bool
    """Whether it takes writes."""
    revision: int | None
    """The last that it has."""
    started_at: str | None
    watchers: int | None
    agents: int
    """Streams of agents that it holds; of another server, as it said some seconds ago."""
    controllers: int
    """Controllers that it runs for all servers, likewise."""
    boot: int
    """How often a server of this name has begun; 0 where the store is a file."""
    term: int
    """Of the active one: how many times a server became active; else 0."""
    fresh: bool
    """Whether it was heard of a moment ago."""
    silent_since: str | None
    """When it was last heard of, if that was longer ago; null after it left."""
    lag_groups: int
    """Groups of changes that it had not applied then."""
    lag_seconds: float | None
    """For how long the first of them had been there; null where that is not known."""
    level: int
    """Of the store: what may be written, by all servers."""
    supported_level: int
    """The highest that this server's release supports."""
    database: DatabaseView
    bus: BusView


SERVER: Kind[ServerSpecView, ServerStatusView] = Kind("server", ServerSpecView, ServerStatusView)


class SeenByDatabase(Protocol):
    """A server as the database has last heard of it (`SeenServer`)."""

    @property
    def name(self) -> str: ...
    @property
    def boot(self) -> int: ...
    @property
    def version(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def term(self) -> int: ...
    @property
    def silent_seconds(self) -> float | None: ...
    @property
    def lag_groups(self) -> int: ...
    @property
    def lag_seconds(self) -> float | None: ...
    @property
    def agents(self) -> int: ...
    @property
    def controllers(self) -> int: ...
    @property
    def bus(self) -> BusState: ...
    @property
    def level(self) -> int: ...
    @property
    def supported_level(self) -> int: ...


class ServersRoster(Protocol):
    """See `ServerRoster` of the database's engine."""

    @property
    def servers(self) -> Sequence[Any]: ...
    @property
    def size_bytes(self) -> int | None: ...
    @property
    def age_seconds(self) -> float: ...
    async def run(self, is_watched: Callable[[], bool], report: Callable[[], ServerReport]) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNeighbours:
    """Where this server finds those beside it, and its database."""

    name: str
    """Of this server."""
    roster: ServersRoster | None = None
    """None where the store is a file, which one server uses alone."""
    file: Path | None = None
    leads: Callable[[], bool] = lambda: True
    """Whether this server is the active one."""

    def database(self) -> DatabaseView:
        """What is known of the database now."""
        if self.roster is not None:
            return DatabaseView(engine="postgresql", size_bytes=self.roster.size_bytes)
        try:
            size = self.file.stat().st_size if self.file is not None else None
        except OSError:  # it is being moved away, and nobody here depends on its size
            size = None
        return DatabaseView(engine="sqlite", size_bytes=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFacts:
    """What the server that answers knows of itself."""

    domains: Sequence[str]
    version: str
    revision: int
    started_at_ns: int
    writable: bool
    watchers: int
    level: int
    supported_level: int
    report: ServerReport


def shown(
    own: OwnFacts, beside: ServerNeighbours, now_ns: int
) -> Iterator[tuple[ServerSpecView, ServerStatusView]]:
    """This server first, then the others. Pure, but for the size of a file."""
    roster, leads = beside.roster, beside.leads()
    listed: Iterable[SeenByDatabase] = roster.servers if roster is not None else ()
    database, age = beside.database(), roster.age_seconds if roster is not None else 0.0
    others = [one for one in listed if one.name != beside.name]
    mine = next((one for one in listed if one.name == beside.name), None)
    yield (
        ServerSpecView(domains=own.domains),
        ServerStatusView(
            id=beside.name,
            state="active" if leads else "standby",
            version=own.version,
            answers=True,
            writable=own.writable and leads,
            revision=own.revision,
            started_at=spelled(own.started_at_ns),
            watchers=own.watchers,
            agents=own.report.agents,
            controllers=own.report.controllers,
            boot=mine.boot if mine is not None else 0,
            term=mine.term if mine is not None else 0,
            fresh=mine is None or _is_fresh(mine, age),
            silent_since=_silent_since(mine, age, now_ns) if mine is not None else None,
            lag_groups=mine.lag_groups if mine is not None else 0,
            lag_seconds=mine.lag_seconds if mine is not None else 0.0,
            level=own.level,
            supported_level=own.supported_level,
            database=database,
            bus=_bus(own.report.bus),
        ),
    )
    for one in others:
        is_active = one.state == "active"
        yield (
            ServerSpecView(domains=()),
            ServerStatusView(
                id=one.name,
                state=str(one.state),
                version=one.version,
                answers=False,
                writable=is_active,
                revision=None,
                started_at=None,
                watchers=None,
                agents=one.agents,
                controllers=one.controllers,
                boot=one.boot,
                term=one.term,
                fresh=_is_fresh(one, age),
                silent_since=_silent_since(one, age, now_ns),
                lag_groups=one.lag_groups,
                lag_seconds=one.lag_seconds,
                level=one.level,
                supported_level=one.supported_level,
                database=database,
                bus=_bus(one.bus),
            ),
        )


def _bus(state: BusState) -> BusView:
    return BusView(kind=state.kind.value, connected=state.connected, trouble=state.trouble)


def _silent_since(one: SeenByDatabase, age_seconds: float, now_ns: int) -> str | None:
    if one.silent_seconds is None or _is_fresh(one, age_seconds):
        return None
    return spelled(now_ns - round((one.silent_seconds + age_seconds) * NS))


def _is_fresh(one: SeenByDatabase, age_seconds: float) -> bool:
    return one.silent_seconds is not None and one.silent_seconds + age_seconds <= FRESH_SECONDS


class ServingParts(Protocol):
    """What of the running domain is needed to tell servers."""

    def servers(self) -> Iterable[tuple[ServerSpecView, ServerStatusView]]: ...


def servers(domain: ServingParts) -> Iterator[AnyResource]:
    """Every server that is known."""
    taken: set[str] = set()
    for spec, status in domain.servers():
        name = status.id.replace("/", ".")  # a name is one part of a path
        if name in taken:
            name = f"{name}.{crc32(status.id.encode()):08x}"
        taken.add(name)
        yield made_up(SERVER, name, spec=spec, status=status)


def matters(made: Any) -> object:
    """Everything but what moves all the time while all is well."""
    status: ServerStatusView = made.status
    size = (status.database.size_bytes or 0) // SIZE_STEP_BYTES
    return (
        made.spec,
        (status.version, status.state, status.started_at, status.writable, status.agents),
        (status.boot, status.term, status.fresh, status.lag_groups.bit_length()),
        (status.controllers, status.bus.connected, status.level, status.supported_level),
        (status.database.engine, status.database.size_bytes is None, size),
    )


SERVERS = PublicResource(
    name="server",
    plural="servers",
    summary="A server of this installation",
    kind=SERVER,
    spec=ServerSpecView,
    status=ServerStatusView,
    view=as_stored,
    place=at_root,
    permission=VIEW,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="STATE", value=".status.state"),
        Column(title="VERSION", value=".status.version"),
        Column(title="WRITABLE", value=".status.writable"),
        Column(title="LAG", value=".status.lagGroups", type="number"),
        Column(title="SILENT", value=".status.silentSince", type="age"),
        Column(title="AGENTS", value=".status.agents", type="number"),
        Column(title="REVISION", value=".status.revision", type="number"),
        Column(title="STARTED", value=".status.startedAt", type="age"),
        Column(title="TERM", value=".status.term", type="number", wide=True),
        Column(title="BOOT", value=".status.boot", type="number", wide=True),
        Column(title="LEVEL", value=".status.level", type="number", wide=True),
        Column(title="SUPPORTS", value=".status.supportedLevel", type="number", wide=True),
        Column(title="CONTROLLERS", value=".status.controllers", type="number", wide=True),
        Column(title="BUS", value=".status.bus.kind", wide=True),
        Column(title="DATABASE", value=".status.database.engine", wide=True),
        Column(title="DOMAINS", value=".spec.domains", wide=True),
    ),
    computed=servers,
    observed=ObservedPart(matters=matters),
)
