"""What happens to a proxy's agent while it waits for something else. Without an NGINX and a server."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import msgspec
import pytest
import structlog

from fleetplane.domains.proxies.agent import agent as agents
from fleetplane.domains.proxies.agent.agent import ProxyAgent, ProxyAgentPolicy
from fleetplane.domains.proxies.agent.commands import REMEMBERED, WAITING_LIMIT, CommandHandler
from fleetplane.domains.proxies.agent.enrolment import Credential, CredentialFile
from fleetplane.domains.proxies.agent.nginx import processes
from fleetplane.domains.proxies.agent.nginx.applier import ApplyOutcome, VersionApplier
from fleetplane.domains.proxies.agent.nginx.confirmation import (
    Confirmed,
    NginxWorker,
    VersionState,
    VersionStatus,
)
from fleetplane.domains.proxies.agent.nginx.control import Nginx
from fleetplane.domains.proxies.agent.nginx.processes import Master
from fleetplane.domains.proxies.agent.observing.takeover import Takeover, TakeoverPhase
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import SystemClock
from fleetplane.node.connection import ConnectionAttempt
from fleetplane.sim.clock import VirtualClock

OLD = Credential(agent_id="a", key_pem="key", certificate_pem="old")
NEW = msgspec.structs.replace(OLD, certificate_pem="new")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def make(folder: Path, **parts: Any) -> ProxyAgent:
    found = SimpleNamespace(wake=asyncio.Event(), **parts)
    return ProxyAgent(
        parts=cast("Any", found),
        node=cast("Any", None),
        credential=CredentialFile(folder / "credential"),
        token="",
        connect=lambda _: grpc.aio.insecure_channel("nobody"),
        enroller=parts.get("enroller"),
        clock=SystemClock(),
        log=structlog.get_logger(),
        policy=ProxyAgentPolicy(drift_seconds=0.0, repair_drift=True),
    )


# Drift.


class Drifting:
    """Files of a release that are looked at while another one takes its place, and are gone then."""

    def __init__(self) -> None:
        self.begun, self.go, self.looks = threading.Event(), threading.Event(), list[object]()

    def drifted(self, live: object) -> bool:
        self.looks.append(live)
        if len(self.looks) > 1:
            return False
        self.begun.set()
        assert self.go.wait(60)
        return True


class Judged:
    def __init__(self) -> None:
        self.said: list[bool] = []

    @property
    def drifted(self) -> bool:
        return bool(self.said) and self.said[-1]

    @drifted.setter
    def drifted(self, value: bool) -> None:
        self.said.append(value)


async def test_a_release_that_is_replaced_while_it_is_looked_at_has_not_drifted(tmp_path: Path) -> None:
    repaired = list[object]()

    async def repair() -> ApplyOutcome:
        repaired.append(applier.live)
        return ApplyOutcome(state=VersionState.SUCCESS)

    applier = SimpleNamespace(live=SimpleNamespace(name="1-1"), repair=repair)
    files, observer, told = Drifting(), Judged(), list[str]()
    bulletin = SimpleNamespace(event=lambda name, **_: told.append(name))
    agent = make(tmp_path, applier=applier, releases=files, observer=observer, bulletin=bulletin)
    watching = asyncio.create_task(agent._watch_drift())
    try:
        await until(files.begun.is_set)
        applier.live = SimpleNamespace(name="2-2")
        files.go.set()
        await until(lambda: len(files.looks) > 2)
    finally:
        watching.cancel()
    assert (any(observer.said), told, repaired) == (False, [], [])


# Rotation.


async def test_an_agent_that_ends_while_it_rotates_a_log_has_nginx_reopen_it(tmp_path: Path) -> None:
    signals, begun, go = list[signal.Signals](), threading.Event(), threading.Event()
    site = SimpleNamespace(paths=SimpleNamespace(journal=tmp_path / "journal"))
    applier = VersionApplier(
        nginx=cast("Any", SimpleNamespace(site=site, signal=signals.append)),
        releases=cast("Any", SimpleNamespace(make_logs=(tmp_path / "made").touch)),
        clock=SystemClock(),
        log=structlog.get_logger(),
        managed=True,
    )

    def rename() -> None:
        begun.set()
        assert go.wait(60)
        (tmp_path / "renamed").touch()

    rotating = asyncio.create_task(applier.reopen_logs(rename))
    await until(begun.is_set)
    rotating.cancel()
    asyncio.get_running_loop().call_soon(go.set)
    with pytest.raises(asyncio.CancelledError):
        await rotating
    assert ((tmp_path / "renamed").exists(), signals) == (True, [signal.SIGUSR1])


# NGINX's master and its figures.


def site(folder: Path, program: str) -> Any:
    names = ("state", "logs", "error_log", "config", "pid", "socket")
    paths = SimpleNamespace(**{name: folder / name for name in names})
    return SimpleNamespace(paths=paths, binary=SimpleNamespace(path=Path(program)))


async def test_an_nginx_that_says_its_number_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, masters = VirtualClock(), list[Master]()

    async def answering(_self: Nginx) -> str:
        return "1-1"

    monkeypatch.setattr(Nginx, "answering", answering)
    monkeypatch.setattr(Nginx, "master", lambda _self: masters[0] if masters else None)
    monkeypatch.setattr(processes, "workers", lambda _master: frozenset({NginxWorker(8, 1)}))
    starting = asyncio.create_task(Nginx(site(tmp_path, "/bin/true"), clock).start("1-1"))
    await until(lambda: clock.sleepers)
    await clock.advance(5.0)
    assert not starting.done()
    masters.append(Master(pid=7, started=1))
    await clock.advance(5.0)
    async with asyncio.timeout(60):
        assert await starting == Confirmed()


async def test_a_question_that_nginx_answers_too_late_is_no_visitors(folder: Path) -> None:
    heard, nginx = asyncio.Event(), Nginx(site(folder, "/bin/true"), SystemClock())

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        heard.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(silent, folder / "socket"):
        asking = asyncio.create_task(nginx.figures())
        async with asyncio.timeout(60):
            await heard.wait()
        asking.cancel()
        await asyncio.wait([asking])
    assert nginx.asked == 1, "NGINX has counted it"


# Credentials.


class Enroller:
    """Answers when it is told to, with what it is told to."""

    def __init__(self) -> None:
        self.asked, self.answer = list[Credential](), asyncio.Future[Credential]()

    async def ready(self, credential: Credential, *, doubted: bool = False) -> Credential:
        self.asked.append(credential)
        return await asyncio.shield(self.answer)


class HeldSession:
    """Registers when it is told to."""

    go: asyncio.Event

    def __init__(
        self, _channel: object, _node: object, shown: Credential, *, registered: Callable[[Credential], None]
    ) -> None:
        self._shown, self._registered = shown, registered

    async def run(self) -> None:
        await self.go.wait()
        self._registered(self._shown)


async def test_a_certificate_that_is_renewed_while_the_old_one_registers_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HeldSession.go = asyncio.Event()
    monkeypatch.setattr(agents, "ProxySession", HeldSession)
    agent = make(tmp_path)
    agent._credential = agent._shown = OLD
    serving = asyncio.create_task(agent._serve(ConnectionAttempt(SystemClock())))
    await asyncio.sleep(0)  # the session has begun, with the old one
    agent._file.store(NEW)
    agent._credential = NEW
    HeldSession.go.set()
    await serving
    assert agent._credential == agent._file.load("") == NEW


async def test_a_renewal_that_brought_nothing_does_not_undo_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "RENEWAL_CHECK_SECONDS", 0.0)
    enroller = Enroller()
    agent = make(tmp_path, enroller=enroller)
    agent._credential = OLD
    renewing = asyncio.create_task(agent._renew_in_time())
    await until(lambda: enroller.asked)
    agent._credential = NEW  # by whoever connected meanwhile
    enroller.answer.set_result(OLD)
    await until(lambda: len(enroller.asked) > 1)
    renewing.cancel()
    assert enroller.asked[:2] == [OLD, NEW]


# Taking over.


class FullDisk:
    """An applier that can write nothing until it is told so."""

    def __init__(self) -> None:
        self.held, self.full = "", True

    async def try_out(self, _update: pb.ConfigUpdate) -> str:
        return ""

    async def apply(self, _update: pb.ConfigUpdate, _report: object, *, takes_over: bool) -> ApplyOutcome:
        assert takes_over
        raise OSError(28, "No space left on device")

    async def stand_down(self, why: str, *, within_seconds: float) -> bool:
        self.held = why
        return within_seconds > 0

    async def forget_all(self) -> None:
        if self.full:
            raise OSError(28, "No space left on device")


class NobodyServes:
    async def look(self) -> SimpleNamespace:
        return SimpleNamespace(
            configuration=SimpleNamespace(digest="d"), origin=None, pid_file=Path("/nowhere")
        )


async def test_a_take_over_whose_way_back_fails_ends_and_is_gone_back_from_later(tmp_path: Path) -> None:
    applier = FullDisk()
    hands = Takeover(
        applier=cast("Any", applier),
        observed=cast("Any", NobodyServes()),
        path=tmp_path / "takeover",
        clock=SystemClock(),
        log=structlog.get_logger(),
    )

    async def told(status: VersionStatus) -> None:
        raise AssertionError(status)

    ordered = asyncio.create_task(hands.take_over(3, "d"))
    await until(lambda: hands.expects)
    with pytest.raises(OSError, match="No space left"):
        await hands.apply(pb.ConfigUpdate(version=3), told)
    async with asyncio.timeout(60):
        outcome = await ordered
    assert (outcome.state, "No space left" in outcome.error) == (VersionState.FAILED, True)
    assert (hands.expects, hands.record.phase) == (False, TakeoverPhase.TAKING_OVER)
    applier.full = False
    async with asyncio.timeout(60):
        await hands.recover()
    assert hands.record.phase is TakeoverPhase.OBSERVING


class NoMaster:
    """An NGINX that does not run, and a note of what is started in its place."""

    def __init__(self, folder: Path) -> None:
        self.site = SimpleNamespace(paths=SimpleNamespace(journal=folder / "journal"))
        self.started = list[str]()

    def master(self) -> None:
        return None

    def signal(self, _number: signal.Signals) -> None:
        pass

    async def start(self, release: str) -> Confirmed:
        self.started.append(release)
        return Confirmed()


async def test_nothing_is_revived_between_the_other_nginx_and_the_version_that_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nginx, rotating, go = NoMaster(tmp_path), threading.Event(), threading.Event()
    applier = VersionApplier(
        nginx=cast("Any", nginx),
        releases=cast("Any", SimpleNamespace(make_logs=lambda: None)),
        clock=SystemClock(),
        log=structlog.get_logger(),
        managed=True,
        least_gap_seconds=0.0,
    )
    empty = SimpleNamespace(version=0, checksum="", lineage="", set_aside={})
    applier.live = cast("Any", SimpleNamespace(name="0-1", manifest=empty))
    hands = Takeover(
        applier=applier,
        observed=cast("Any", NobodyServes()),
        path=tmp_path / "takeover",
        clock=SystemClock(),
        log=structlog.get_logger(),
    )
    hands.open()

    async def nothing_to_say(_update: pb.ConfigUpdate) -> str:
        return ""

    def rename() -> None:
        rotating.set()
        assert go.wait(60)

    async def told(_status: VersionStatus) -> None:
        raise OSError(5, "far enough")

    monkeypatch.setattr(applier, "try_out", nothing_to_say)
    ordered = asyncio.create_task(hands.take_over(3, "d"))
    await until(lambda: hands.expects)
    turning = asyncio.create_task(applier.reopen_logs(rename))
    await until(rotating.is_set)
    reviving = asyncio.create_task(applier.revive())
    await asyncio.sleep(0)  # it waits for the rotation
    taking = asyncio.create_task(hands.apply(pb.ConfigUpdate(version=3), told))
    await until(lambda: hands.record.phase is TakeoverPhase.TAKING_OVER)
    await asyncio.sleep(0)
    go.set()
    async with asyncio.timeout(60):
        await turning
        assert (await reviving, nginx.started) == (None, [])
    for task in (taking, ordered):
        task.cancel()
    await asyncio.gather(taking, ordered, return_exceptions=True)


# Commands.


async def test_commands_that_are_refused_do_not_let_one_that_is_being_done_be_done_again() -> None:
    go, restarts = asyncio.Event(), list[bool]()

    async def restart(*, force: bool, within_seconds: float) -> ApplyOutcome:
        assert within_seconds
        restarts.append(force)
        await go.wait()
        return ApplyOutcome(state=VersionState.SUCCESS)

    answers = list[pb.Event]()
    handler = CommandHandler(
        applier=cast("Any", SimpleNamespace(restart=restart)),
        outbox=cast("Any", SimpleNamespace(add=answers.append)),
        clock=SystemClock(),
        log=structlog.get_logger(),
        report_health=lambda: None,
        **dict.fromkeys(("nginx", "confinement", "status"), cast("Any", None)),
    )
    wanted = pb.Command(command_id="restart", restart=pb.RestartCommand(force=True))
    handler.take(wanted)
    working = asyncio.create_task(handler.run())
    await until(lambda: restarts)
    for number in range(WAITING_LIMIT + 2 * REMEMBERED):
        handler.take(pb.Command(command_id=f"unknown-{number}"))
    assert len(answers) == 2 * REMEMBERED
    handler.take(wanted)
    assert len(answers) == 2 * REMEMBERED, "neither refused nor answered: it is being done"
    assert len(handler._done) <= REMEMBERED
    go.set()
    await until(lambda: len(answers) == 2 * REMEMBERED + 1 + WAITING_LIMIT)
    working.cancel()
    assert restarts == [True]
