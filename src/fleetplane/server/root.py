"""The server's composition root: opens the store, and serves as what this server is to its database."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog

from fleetplane import environment
from fleetplane.kernel.boundary import Failures, count_into
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.errors import IntegrityError, SettingsError
from fleetplane.kernel.files import ensure_private
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings, lineage
from fleetplane.kernel.store.servers.replica import Replica
from fleetplane.server import assembly, ready_file
from fleetplane.server.offline import MasterKeys
from fleetplane.server.serving import Announce, RunningServer, Turn
from fleetplane.settings import Settings

log = structlog.get_logger(__name__)

INSISTING_SECONDS = 0.5
"""Signals this close together are one request: `timeout`, a terminal and a supervisor may each pass it on."""
BEGIN_SECONDS = 1.0
"""Before a server serves that stands by: who is alone, or first, is active by then."""
RETRY_SECONDS = 5.0
"""Before what could not be built while standing by is built again."""


async def serve(settings: Settings, *, announce: Announce) -> None:
    """Run until SIGTERM or SIGINT, then end what is open cleanly."""
    clock: Clock = SystemClock()
    failures = Failures()
    count_into(failures)  # before anything is begun
    stop = _stop_on_signals()
    supervisor = environment.taken("NOTIFY_SOCKET")  # a listener alone would say that the server is ready
    data_dir = Path(settings.data_dir)
    ensure_private(data_dir, setting="data_dir")
    blueprints = assembly.blueprints(settings)
    assembly.shared_objects(settings)  # or an error, before anything is opened
    kinds = [*KERNEL_KINDS, *(kind for blueprint in blueprints for kind in blueprint.kinds)]
    keys = MasterKeys(settings, clock)
    joined: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
    async with contextlib.AsyncExitStack() as stack:
        opening = Store.open(
            _store_settings(settings, data_dir, clock),
            kinds=kinds,
            clock=clock,
            audit_key=lambda is_new: keys.audit(may_create=is_new),
            meanwhile=lambda standby: _tell(joined, standby),
        )
        turn = asyncio.ensure_future(stack.enter_async_context(opening))
        serving = RunningServer(
            settings,
            keys,
            blueprints,
            clock,
            announce=announce,
            turn=turn,
            failures=failures,
            stop=stop,
            supervisor=supervisor,
        )
        try:
            await _live(serving, joined, turn, stop)
        except (IntegrityError, SettingsError):
            if turn.done() and not turn.cancelled() and turn.exception() is not None:
                ready_file.withdraw(settings.ready_file)  # of ours: nobody else has it open
            raise
        finally:
            turn.cancel()
            await asyncio.gather(turn, return_exceptions=True)
    log.info("server.stopped")


async def _live(
    serving: RunningServer, joined: asyncio.Future[Replica], turn: Turn, stop: asyncio.Event
) -> None:
    """Serve until stopped: while others are active as one that stands by, then as the one that is."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await _first(joined, turn, stopping)
        await _first(turn, stopping, seconds=BEGIN_SECONDS)
        while not (stop.is_set() or turn.done()):
            await _stood_by(serving, joined.result(), turn, stopping)
            if serving.leads:
                return
            await _first(turn, stopping, seconds=RETRY_SECONDS)
        if not stop.is_set():
            turn.result()  # or what prevents it
            await serving.run(joined.result() if joined.done() else None, leads=True)
    finally:
        stopping.cancel()


async def _stood_by(
    serving: RunningServer, standby: Replica, turn: Turn, stopping: asyncio.Future[Any]
) -> None:
    """Serve as one that stands by, and go on so when its turn comes; what does not serve yet is dropped."""
    attempt = asyncio.ensure_future(serving.run(standby, leads=False))
    try:
        await _first(attempt, turn, stopping)
        if not serving.is_up:
            attempt.cancel()
        await asyncio.wait([attempt])
        if attempt.cancelled() or (error := attempt.exception()) is None:
            return
        if serving.leads:
            raise error
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        log.warning("standby.reads_not_served", error=getattr(error, "message", repr(error)))
    finally:
        attempt.cancel()
        await asyncio.gather(attempt, return_exceptions=True)


async def _first(*ends: asyncio.Future[Any], seconds: float | None = None) -> None:
    await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


def _tell(joined: asyncio.Future[Replica], standby: Replica) -> Coroutine[Any, Any, None]:
    """This server has loaded its store, and follows the others from now on."""
    joined.set_result(standby)
    return asyncio.sleep(0)


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    asked_at = math.inf

    def handle(number: signal.Signals) -> None:
        nonlocal asked_at
        if loop.time() - asked_at >= INSISTING_SECONDS:  # asked again: whoever asks means it
            log.warning("server.killed", signal=number.name)
            os._exit(130)
        asked_at = min(asked_at, loop.time())
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    return stop


def _store_settings(settings: Settings, data_dir: Path, clock: Clock) -> StoreSettings:
    return StoreSettings(
        first_revision=lineage.first_revision(clock.now_ns()),
        # A key that was given is no sign of an earlier start; one that a server made is.
        evidence=() if settings.identity.master_key else (data_dir / "master.key",),
        path=data_dir / "fleetplane.db",
        url=settings.store.url,
        server=settings.server_name,
        bus=settings.bus.nats,
        ring_events=settings.store.ring_events,
        history_revisions=settings.store.history_revisions,
        group_limit=settings.store.group_limit,
        level_delay_seconds=settings.store.level_delay_seconds,
    )
