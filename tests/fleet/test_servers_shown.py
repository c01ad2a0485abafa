"""What is shown of the servers that share a database, and what of it is worth telling again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fleetplane.fleet.servers import (
    OwnFacts,
    ServerNeighbours,
    ServerStatusView,
    matters,
    servers,
    shown,
)
from fleetplane.kernel.store.engines.postgres_servers import SeenServer, ServerState
from fleetplane.kernel.store.notifiers.notifier import BusKind, BusState
from fleetplane.kernel.store.servers.engine import ServerReport
from fleetplane.kernel.values.times import NS, spelled

NOW_NS = 1_800_000_000 * NS
OWN = OwnFacts(
    domains=("gpus",),
    version="2",
    revision=7,
    started_at_ns=NOW_NS - 60 * NS,
    writable=True,
    watchers=3,
    level=1,
    supported_level=2,
    report=ServerReport(agents=5, controllers=2),
)
ACTIVE = SeenServer(
    name="one",
    boot=4,
    version="2",
    state=ServerState.ACTIVE,
    term=9,
    silent_seconds=0.5,
    lag_groups=0,
    lag_seconds=0.0,
)
STANDBY = replace(
    ACTIVE, name="two", boot=1, version="1", state=ServerState.STANDBY, term=0, lag_groups=3, lag_seconds=0.2
)


@dataclass
class FixedRoster:
    servers: Sequence[SeenServer]
    size_bytes: int | None = 1 << 20
    age_seconds: float = 0.0

    async def run(self, is_watched: Callable[[], bool], report: Callable[[], ServerReport]) -> None: ...


def told(
    *seen: SeenServer, own: OwnFacts = OWN, name: str = "one", age: float = 0.0, stands_by: bool = False
) -> list[ServerStatusView]:
    beside = ServerNeighbours(
        name=name, roster=FixedRoster(seen, age_seconds=age), leads=lambda: not stands_by
    )
    return [status for _, status in shown(own, beside, NOW_NS)]


class Domain:
    """As much of the running domain as is asked."""

    def __init__(self, *seen: SeenServer, own: OwnFacts = OWN) -> None:
        self.seen, self.own = seen, own

    def servers(self) -> object:
        return shown(self.own, ServerNeighbours(name="one", roster=FixedRoster(self.seen)), NOW_NS)


def test_the_answering_server_tells_of_itself_what_the_database_does_not_know() -> None:
    mine, other = told(ACTIVE, STANDBY)
    assert (mine.id, mine.answers, mine.state, mine.revision, mine.agents) == ("one", True, "active", 7, 5)
    assert (mine.boot, mine.term, mine.fresh, mine.silent_since) == (4, 9, True, None)
    assert (mine.database.engine, mine.database.size_bytes) == ("postgresql", 1 << 20)
    assert (mine.bus.kind, mine.bus.connected, mine.controllers) == ("none", False, 2)
    assert (other.id, other.answers, other.state, other.version) == ("two", False, "standby", "1")
    assert (other.revision, other.watchers, other.started_at, other.agents) == (None, None, None, 0)
    assert (other.lag_groups, other.lag_seconds, other.writable) == (3, 0.2, False)
    assert [(one.level, one.supported_level) for one in (mine, other)] == [(1, 2), (1, 1)]


def test_a_standby_tells_what_the_active_server_said_of_itself() -> None:
    said = replace(ACTIVE, agents=7, controllers=4, bus=BusState(kind=BusKind.NATS, connected=True))
    mine, other = told(said, STANDBY, own=replace(OWN, report=ServerReport()), name="two", stands_by=True)
    assert (mine.state, mine.writable, mine.lag_groups) == ("standby", False, 3)
    assert (mine.agents, mine.controllers) == (0, 0)
    assert (other.state, other.writable, other.agents, other.term) == ("active", True, 7, 9)
    assert (other.controllers, other.bus.kind, other.bus.connected) == (4, "nats", True)


def test_what_was_heard_long_ago_says_since_when() -> None:
    """Also where it is the database that does not answer: its last answer grows old."""
    silent = replace(STANDBY, silent_seconds=40.0, state=ServerState.GONE)
    _, gone = told(ACTIVE, silent)
    assert (gone.fresh, gone.silent_since) == (False, spelled(NOW_NS - 40 * NS))
    mine, other = told(ACTIVE, STANDBY, age=9.5)
    assert (mine.fresh, mine.silent_since) == (False, spelled(NOW_NS - 10 * NS))
    assert (other.state, other.fresh) == ("standby", False)
    _, left = told(ACTIVE, replace(silent, silent_seconds=None, lag_seconds=None))
    assert (left.state, left.fresh, left.silent_since, left.lag_seconds) == ("gone", False, None, None)


def test_before_the_database_has_answered_the_server_is_there_all_the_same() -> None:
    (mine,) = told()
    assert (mine.state, mine.boot, mine.fresh) == ("active", 0, True)


def test_a_file_is_the_database_of_one_server(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    file.write_bytes(b"x" * 100)
    frozen = replace(OWN, writable=False)
    ((_, mine),) = shown(frozen, ServerNeighbours(name="host", file=file), NOW_NS)
    assert (mine.state, mine.writable, mine.database.engine) == ("active", False, "sqlite")
    assert mine.database.size_bytes == 100
    ((_, mine),) = shown(OWN, ServerNeighbours(name="host", file=tmp_path / "none"), NOW_NS)
    assert mine.database.size_bytes is None


def test_names_are_parts_of_a_path_and_never_the_same_twice() -> None:
    seen = [replace(STANDBY, name="host:/a/b"), replace(STANDBY, name="host:/a.b")]
    names = [one.name for one in servers(Domain(*seen))]  # type: ignore[arg-type]
    assert names[:2] == ["one", "host:.a.b"]
    assert len(set(names)) == 3
    assert not any("/" in name for name in names)


def test_only_what_is_worth_telling_makes_a_server_another() -> None:
    def mattering(*seen: SeenServer, own: OwnFacts = OWN) -> list[object]:
        return [matters(one) for one in servers(Domain(*seen, own=own))]  # type: ignore[arg-type]

    before = mattering(ACTIVE, STANDBY)
    quiet = replace(OWN, revision=8, watchers=4)
    assert mattering(ACTIVE, replace(STANDBY, silent_seconds=1.4), own=quiet) == before
    for other in (
        replace(STANDBY, lag_groups=300),
        replace(STANDBY, state=ServerState.ACTIVE),
        replace(STANDBY, boot=2),
        replace(STANDBY, version="3"),
        replace(STANDBY, silent_seconds=5.5),
    ):
        assert mattering(ACTIVE, other) != before
    assert (
        mattering(ACTIVE, STANDBY, own=replace(OWN, report=ServerReport(agents=6, controllers=2))) != before
    )


def test_a_bus_that_goes_away_is_told() -> None:
    there = replace(OWN, report=ServerReport(bus=BusState(kind=BusKind.NATS, connected=True)))
    away = replace(OWN, report=ServerReport(bus=BusState(kind=BusKind.NATS, trouble="nats://x: refused")))
    (before,), (after,) = (list(servers(Domain(ACTIVE, own=own))) for own in (there, away))  # type: ignore[arg-type]
    assert matters(before) != matters(after)
    assert after.status is not None
    assert after.status.bus.trouble == "nats://x: refused"
