"""Small parts of the node's agent: health, the audit log, requests done once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import structlog

from fleetplane.domains.boards.agent import audit as audit_trail
from fleetplane.domains.boards.agent import health
from fleetplane.domains.boards.agent import reporter as reporters
from fleetplane.domains.boards.agent.audit import BoardAuditLog
from fleetplane.domains.boards.agent.gpio.chip import HardwareSilent
from fleetplane.domains.boards.agent.grpc import access, node_agent
from fleetplane.domains.boards.agent.grpc.access import RevokedCallers
from fleetplane.domains.boards.agent.grpc.node_agent import OnceByMethod
from fleetplane.domains.boards.agent.health import CheckFacts, CheckStatus, assess
from fleetplane.domains.boards.agent.membership import BoardIdentityFolder
from fleetplane.domains.boards.agent.metrics.values import BlockDevice, Power, Reserve, Snapshot, Zone
from fleetplane.domains.boards.agent.reporter import BoardReporter
from fleetplane.domains.boards.agent.wire.messages import uptime
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import (
    Conflict,
    InvalidArgument,
    PermissionDenied,
    SettingsError,
    Unauthenticated,
    Unavailable,
)
from fleetplane.node.connection import ConnectionAttempt
from fleetplane.node.host.psutil_host import Disk

NOW = 1_000_000.0


def disk(percent: float) -> Disk:
    return Disk(
        device="",
        mountpoint="/",
        filesystem="",
        total_bytes=1,
        used_bytes=1,
        free_bytes=0,
        usage_percent=percent,
        inodes_total=0,
        inodes_used=0,
        inodes_free=0,
        inodes_usage_percent=0,
    )


def snapshot(**more: Any) -> Snapshot:
    return Snapshot(**{"at_ns": int(NOW * 1e9), "disks": (disk(10),), **more})


def facts(**more: Any) -> CheckFacts:
    known: dict[str, Any] = {
        "now": NOW,
        "gpio_wanted": True,
        "gpio_available": True,
        "gpio_reason": "",
        "snapshot": snapshot(),
        "log_sources": ("agent",),
        "journal_reason": "",
        "audit_lost": 0,
        "certificate_begins": NOW - 10,
        "certificate_ends": NOW + 1000,
    }
    return CheckFacts(**{**known, **more})


def storage(reserve: Reserve) -> BlockDevice:
    return BlockDevice(name="mmcblk0", kind="sd", bytes_read=0, bytes_written=0, reserve=reserve)


@pytest.mark.parametrize(
    ("more", "name", "status"),
    [
        ({}, "gpio", CheckStatus.OK),
        ({"gpio_available": False, "gpio_reason": "gone"}, "gpio", CheckStatus.DEGRADED),
        ({"gpio_available": False, "gpio_wanted": False}, "gpio", CheckStatus.OK),
        ({"journal_reason": "none here"}, "logs", CheckStatus.OK),
        ({"snapshot": None}, "metrics", CheckStatus.DEGRADED),
        ({"now": NOW + 100}, "metrics", CheckStatus.FAILED),
        ({"audit_lost": 1}, "audit", CheckStatus.FAILED),
        ({"snapshot": snapshot(disks=(disk(95),))}, "disk", CheckStatus.DEGRADED),
        ({"snapshot": snapshot(disks=(disk(99),))}, "disk", CheckStatus.FAILED),
        ({"snapshot": snapshot(root_read_only=True)}, "disk", CheckStatus.FAILED),
        ({"snapshot": snapshot(storage=(storage(Reserve.URGENT),))}, "disk", CheckStatus.DEGRADED),
        ({"snapshot": snapshot(zones=(Zone(name="cpu", celsius=82),))}, "temperature", CheckStatus.DEGRADED),
        ({"snapshot": snapshot(zones=(Zone(name="cpu", celsius=91),))}, "temperature", CheckStatus.FAILED),
        ({"snapshot": snapshot(power=Power.of(0x1))}, "power", CheckStatus.DEGRADED),
        ({"snapshot": snapshot(power=Power.of(0x50000))}, "power", CheckStatus.OK),
        ({"snapshot": snapshot(clock_synchronised=False)}, "clock", CheckStatus.DEGRADED),
        ({"certificate_ends": NOW - 1}, "certificate", CheckStatus.FAILED),
        (
            {"certificate_begins": NOW - 1000, "certificate_ends": NOW + 100},
            "certificate",
            CheckStatus.DEGRADED,
        ),
        ({"certificate_begins": None}, "certificate", CheckStatus.DEGRADED),
    ],
)
def test_each_check_and_what_it_makes_of_the_whole(
    more: dict[str, Any], name: str, status: CheckStatus
) -> None:
    found = assess(facts(**more))
    assert {check.status for check in found.checks if check.name == name} == {status}
    assert found.status is status  # the others are well


def test_health_has_the_checks_that_are_promised() -> None:
    names = {check.name for check in assess(facts()).checks}
    assert names == {"gpio", "metrics", "logs", "disk", "temperature", "power", "clock", "certificate"}
    assert health.CERTIFICATE_WORRY_SHARE < 1 / 3


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0s"), (59, "59s"), (61, "1m1s"), (3600, "1h0m0s"), (90_061, "25h1m1s")]
)
def test_uptimes_are_written_as_the_originals_write_them(seconds: float, text: str) -> None:
    assert uptime(seconds) == text


# The audit log.


def trail(path: Path, **more: Any) -> BoardAuditLog:
    return BoardAuditLog(path, SystemClock(), structlog.get_logger(), **more)


def test_the_audit_log_is_bounded_and_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with trail(path, limit_bytes=4000) as made:
        for number in range(200):
            made.note("thing", {"number": number, "blank": ""})
    older, newer = ((tmp_path / name).read_text() for name in ("audit.jsonl.1", "audit.jsonl"))
    kept = [json.loads(line) for line in (older + newer).splitlines()]
    assert [entry["number"] for entry in kept][-1] == 199
    assert [entry["number"] for entry in kept] == list(range(200))[-len(kept) :]
    assert "blank" not in kept[0]
    assert {one.name for one in tmp_path.iterdir()} == {"audit.jsonl", "audit.jsonl.1"}
    assert all(
        one.stat().st_size <= 4000 and one.stat().st_mode & 0o777 == 0o600 for one in tmp_path.iterdir()
    )


def test_a_line_that_is_too_long_is_shortened_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with trail(path) as made:
        made.note("thing", {"user": "me", "args": ["x" * audit_trail.LINE_LIMIT_BYTES], "exit_code": 3})
    (entry,) = (json.loads(line) for line in path.read_text().splitlines())
    assert (entry["user"], entry["exit_code"], entry["shortened"]) == ("me", 3, True)


def test_what_cannot_be_written_is_counted_and_what_must_be_is_an_error(tmp_path: Path) -> None:
    made = trail(tmp_path / "none" / "audit.jsonl")
    made.note("thing", {})
    with pytest.raises(Unavailable):
        made.require("thing", {})
    assert made.lost == 2


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").symlink_to(tmp_path / "elsewhere")
    made = trail(tmp_path / "audit.jsonl")
    made.note("thing", {})
    assert made.lost == 1
    assert not (tmp_path / "elsewhere").exists()


# Once.


async def test_all_who_ask_with_one_id_get_one_outcome() -> None:
    acts = OnceByMethod[str](SystemClock(), repeatable=False)
    calls, gate = 0, asyncio.Event()

    async def act() -> str:
        nonlocal calls
        calls += 1
        await gate.wait()
        return f"outcome {calls}"

    asked = [asyncio.create_task(acts.do("me", "1", b"x", act)) for _ in range(3)]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*asked) == ["outcome 1"] * 3
    assert await acts.do("me", "1", b"x", act) == "outcome 1"
    assert await acts.do("another", "1", b"x", act) == "outcome 2"
    assert await acts.do("me", "", b"x", act) == "outcome 3"
    with pytest.raises(InvalidArgument, match="another request"):
        await acts.do("me", "1", b"y", act)
    with pytest.raises(InvalidArgument, match="characters"):
        await acts.do("me", "1" * 200, b"y", act)


async def test_what_was_refused_may_be_asked_for_again() -> None:
    acts = OnceByMethod[str](SystemClock(), repeatable=False)
    outcomes: Iterator[str | Exception] = iter([PermissionDenied("no"), "yes"])

    async def act() -> str:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with pytest.raises(PermissionDenied):
        await acts.do("me", "1", b"", act)
    assert await acts.do("me", "1", b"", act) == "yes"


@pytest.mark.parametrize("repeatable", [False, True])
async def test_what_was_cut_short_is_done_again_only_if_that_does_no_harm(repeatable: bool) -> None:
    acts, started = OnceByMethod[str](SystemClock(), repeatable=repeatable), asyncio.Event()

    async def hang() -> str:
        started.set()
        await asyncio.Event().wait()
        return ""

    async def act() -> str:
        return "done"

    first = asyncio.create_task(acts.do("me", "1", b"", hang))
    await started.wait()
    waiting = asyncio.create_task(acts.do("me", "1", b"", act))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(Conflict):
        await waiting
    if repeatable:
        assert await acts.do("me", "1", b"", act) == "done"
    else:
        with pytest.raises(Conflict):
            await acts.do("me", "1", b"", act)


async def test_what_is_remembered_is_bounded_by_number_size_and_time() -> None:
    class Time(SystemClock):
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Time()
    acts, calls = OnceByMethod[bytes](clock, repeatable=False, size_of=len), 0

    async def act() -> bytes:
        nonlocal calls
        calls += 1
        return b"x" * (1 << 20)

    for number in range(20):
        await acts.do("me", str(number), b"", act)
    assert acts._held_bytes <= node_agent.REMEMBERED_BYTES
    await acts.do("me", "19", b"", act)
    assert calls == 20
    clock.now += node_agent.KEEP_SECONDS + 1
    await acts.do("me", "19", b"", act)
    assert calls == 21
    assert len(acts._acts) == 1


# While something else is under way.


async def test_pins_are_made_safe_later_if_the_hardware_is_silent_when_the_server_is_lost() -> None:
    class SilentOnce:
        calls = 0

        async def control_lost(self) -> None:
            self.calls += 1
            if self.calls == 1:
                raise HardwareSilent("gpio did not answer within 5 s")

    pins = SilentOnce()
    reporter = BoardReporter(
        node=cast("Any", SimpleNamespace(clock=SystemClock(), pins=pins)),
        loss_after_seconds=0.0,
        log=structlog.get_logger(),
        **dict.fromkeys(
            (
                "folder",
                "membership",
                "describe",
                "identity_changed",
                "revocations_came",
                "revocation_list",
                "keeper",
            ),
            cast("Any", None),
        ),
    )
    watching = asyncio.create_task(reporter._watch())
    async with asyncio.timeout(60):
        while pins.calls < 2:
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    watching.cancel()
    assert pins.calls == 2, "and once only where it was heard"


async def test_a_new_identity_that_could_not_be_taken_up_is_taken_up_with_the_next_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts: list[bool] = []

    async def identity_changed() -> None:
        attempts.append(len(attempts) > 0)
        if not attempts[-1]:
            raise SettingsError("listener agent does not start")

    class Renews:
        def __init__(self, *_: object) -> None:
            pass

        async def update(self, *_: object, renew: bool) -> tuple[object, bool]:
            return membership, renew

    def out_of_reach() -> NoReturn:
        raise Unavailable("far enough")

    membership = SimpleNamespace(node_id=1)
    monkeypatch.setattr(reporters, "BoardRegistrar", Renews)
    reporter = BoardReporter(
        node=cast("Any", SimpleNamespace(clock=SystemClock())),
        folder=cast("Any", SimpleNamespace(credentials=out_of_reach)),
        identity_changed=identity_changed,
        loss_after_seconds=60.0,
        log=structlog.get_logger(),
        **dict.fromkeys(
            ("membership", "describe", "revocations_came", "revocation_list", "keeper"), cast("Any", None)
        ),
    )
    with pytest.raises(SettingsError):
        await reporter._register(cast("Any", None), cast("Any", None), renew=True)
    for _ in range(2):
        with pytest.raises(Unavailable):
            await reporter._connected(ConnectionAttempt(SystemClock()))
    assert attempts == [False, True]


def test_a_list_of_revocations_is_told_to_hold_only_once_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    class Found:
        number, complete, principals = 7, True, ()

        @property
        def serials(self) -> tuple[str, ...]:
            told.append(revoked.number)  # as the loop would report it now
            return ("ab",)

    revoked = RevokedCallers(BoardIdentityFolder(tmp_path), structlog.get_logger())
    monkeypatch.setattr(RevokedCallers, "_authorities", lambda _: [])
    monkeypatch.setattr(access, "opened", lambda *_: Found())
    assert revoked.take(b"list")
    assert (told, revoked.number) == ([0], 7)
    with pytest.raises(Unauthenticated):
        revoked.check(principal="operator/ann", serial="ab", is_server=False)
