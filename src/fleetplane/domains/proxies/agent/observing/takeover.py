"""Whose NGINX serves here: the one that was found, or the agent's own. The way there, and the way back.

    phase         serves                         an agent that finds it at its start
    OBSERVING     the one that was found         looks on
    TAKING_OVER   nobody for a moment            goes back: ours is stopped, the other one started
    TAKEN_OVER    the agent's own                goes on
    GIVING_BACK   nobody for a moment            goes on giving back

The phase is written before anything is touched. No file of the NGINX that was found is ever written, so the
way back is to start it as it was started before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec
import structlog

from fleetplane.domains.proxies.agent.nginx.applier import ApplyOutcome, Report, VersionApplier
from fleetplane.domains.proxies.agent.nginx.confirmation import VersionState, VersionStatus
from fleetplane.domains.proxies.agent.observing.observed import ObservedNginx
from fleetplane.domains.proxies.agent.observing.origin import Origin, is_alive
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError, IntegrityError
from fleetplane.kernel.files import write_durably

VERSION_SECONDS: Final = 30.0
"""In which the version to be served has to come; the server sends it as soon as it hears of the change."""
STAND_DOWN_SECONDS: Final = 10.0
RETRY_SECONDS: Final = 5.0
"""Before an NGINX that could not be given back is tried again."""
HELD: Final = "this agent observes an NGINX that is not its own; take it over first"
INTERRUPTED: Final = "the agent ended before the take-over was done"


class TakeoverPhase(StrEnum):
    OBSERVING = "observing"
    TAKING_OVER = "taking_over"
    TAKEN_OVER = "taken_over"
    GIVING_BACK = "giving_back"


class TakeoverRecord(msgspec.Struct, frozen=True, kw_only=True):
    phase: TakeoverPhase = TakeoverPhase.OBSERVING
    origin: Origin | None = None
    """How the NGINX ran that was found, from the moment it is to be stopped on."""
    pid_file: str = ""
    error: str = ""
    """Why the last change of hands failed."""


class Takeover:
    """One change of hands at a time; `step` is told of each step that is done, for tests that end there."""

    def __init__(
        self,
        *,
        applier: VersionApplier,
        observed: ObservedNginx,
        path: Path,
        clock: Clock,
        log: structlog.typing.FilteringBoundLogger,
        changed: Callable[[], None] = lambda: None,
        step: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._applier = applier
        self._observed = observed
        self._path = path
        self._clock = clock
        self._log = log
        self._changed = changed
        self._step = step
        self._lock = asyncio.Lock()  # one change of hands at a time
        self._expected: asyncio.Future[ApplyOutcome] | None = None
        self._version = 0
        self._arrived = asyncio.Event()
        self.record = TakeoverRecord()

    def __repr__(self) -> str:
        return f"<Takeover {self.record.phase} error={self.record.error!r}>"

    @property
    def is_ours(self) -> bool:
        """Whether the agent's own NGINX is the one that serves."""
        return self.record.phase is TakeoverPhase.TAKEN_OVER

    @property
    def expects(self) -> bool:
        """Whether the next version that comes is to be served in the place of the other NGINX."""
        return self._expected is not None

    @property
    def shown_phase(self) -> TakeoverPhase:
        return TakeoverPhase.TAKING_OVER if self.expects else self.record.phase

    # Coming to life.

    def open(self) -> None:
        """Before the applier is opened: nothing of ours may start while the other NGINX is to serve."""
        self.record = _read(self._path)
        self._applier.held = "" if self.is_ours else HELD

    async def recover(self) -> None:
        """After the applier was opened: finish what the last agent was about to do."""
        async with self._lock:
            if self.record.phase is TakeoverPhase.TAKING_OVER:
                self._log.warning("takeover_was_interrupted")
                await self._return(INTERRUPTED)
            elif self.record.phase is TakeoverPhase.GIVING_BACK:
                await self._hand_back()

    async def run(self) -> None:
        """Try again what could not be given back, until cancelled."""
        while True:
            await self._clock.sleep(RETRY_SECONDS)
            async with self._lock:
                if self.record.phase is TakeoverPhase.TAKING_OVER and not self.expects:
                    await self._return(self.record.error)

    # Taking over.

    async def take_over(self, version: int, digest: str) -> ApplyOutcome:
        """Serve a version in the place of the NGINX that was found, or have that one serve as before."""
        async with self._lock:
            if self.record.phase is not TakeoverPhase.OBSERVING:
                raise FailedPrecondition(f"the NGINX of this machine is {self.record.phase}")
            look = await self._observed.look()
            if look.configuration.digest != digest:
                raise FailedPrecondition(
                    "the observed configuration was changed since the plan was made", hint="plan again"
                )
            if look.origin is not None and look.origin.pid == 1:
                raise FailedPrecondition(
                    "the observed NGINX is the first process here: all would end with it"
                )
            return await self._served(version)

    async def _served(self, version: int) -> ApplyOutcome:
        """Wait for the version, and for how it went."""
        expected: asyncio.Future[ApplyOutcome] = asyncio.get_running_loop().create_future()
        self._arrived.clear()
        self._expected, self._version = expected, version
        try:
            self._changed()
            try:
                async with asyncio.timeout(VERSION_SECONDS):
                    await self._arrived.wait()
            except TimeoutError:
                if not self._arrived.is_set():
                    raise FailedPrecondition(f"version {version} did not come in time") from None
            return await expected
        finally:
            self._expected = None
            self._changed()

    async def apply(self, update: pb.ConfigUpdate, report: Report) -> ApplyOutcome:
        """Serve the version that was expected; called by whoever receives versions."""
        expected = self._expected
        assert expected is not None
        self._arrived.set()
        outcome = _failed(INTERRUPTED)
        try:
            outcome = await self._apply(update, report)
        except (OSError, FleetplaneError) as error:
            outcome = _failed(str(error))
            if self.record.phase is TakeoverPhase.TAKING_OVER:
                outcome = await self._return(str(error))
        finally:  # also if the way back fails: whoever waits holds the lock that trying again needs
            if not expected.done():
                expected.set_result(outcome)
        return outcome

    async def _apply(self, update: pb.ConfigUpdate, report: Report) -> ApplyOutcome:
        if update.version != self._version:
            return _failed(f"version {update.version} came, and version {self._version} was planned")
        if words := await self._applier.try_out(update):
            return _failed(words)
        look = await self._observed.look()
        self._write(
            TakeoverRecord(phase=TakeoverPhase.TAKING_OVER, origin=look.origin, pid_file=str(look.pid_file))
        )
        self._step("recorded")
        if look.origin is not None and (fault := await self._observed.runner.stop(look.origin)):
            return await self._return(fault)
        self._step("stopped")

        async def pass_on(status: VersionStatus) -> None:
            if not status.state.final:  # how it ended is told once the other NGINX need not come back
                await report(status)

        outcome = await self._applier.apply(update, pass_on, takes_over=True)
        self._step("applied")
        if outcome.state is not VersionState.SUCCESS or outcome.set_aside:
            return await self._return(outcome.error or "not all of the version can be served")
        self._write(msgspec.structs.replace(self.record, phase=TakeoverPhase.TAKEN_OVER))
        self._log.info("nginx_taken_over", version=update.version)
        return outcome

    async def _return(self, why: str) -> ApplyOutcome:
        """Have the other NGINX serve again, after a take-over that failed."""
        fault = await self._other_serves()
        if fault:
            self._log.error("observed_nginx_not_started", error=fault)
            said = f"{why}; and the observed NGINX does not start: {fault}".removeprefix("; and ")
            self._write(msgspec.structs.replace(self.record, error=said[:2000]))
        else:
            await self._applier.forget_all()
            self._write(TakeoverRecord(error=why))
        return _failed(self.record.error)

    async def _other_serves(self) -> str:
        """Stop ours and start the other NGINX, unless it runs; why it does not serve, if it does not."""
        if not await self._applier.stand_down(HELD, within_seconds=STAND_DOWN_SECONDS):
            return "the agent's own NGINX does not stop"
        self._step("stood down")
        origin, pid_file = self.record.origin, Path(self.record.pid_file)
        if origin is None or self._observed.serves(origin, pid_file):
            return ""  # there was none to start; or it was never stopped, or is back already
        if is_alive(origin):
            await self._observed.runner.end(origin)
        return await self._observed.runner.start(origin, lambda: self._observed.serves(origin, pid_file))

    # Giving back.

    async def give_back(self) -> ApplyOutcome:
        async with self._lock:
            if not self.is_ours:
                raise FailedPrecondition(f"the NGINX of this machine is {self.record.phase}")
            self._write(msgspec.structs.replace(self.record, phase=TakeoverPhase.GIVING_BACK, error=""))
            self._step("giving back")
            return await self._hand_back()

    async def _hand_back(self) -> ApplyOutcome:
        fault = await self._other_serves()
        self._step("other started")
        if fault:
            self._log.error("nginx_not_given_back", error=fault)
            await self._applier.stand_up()
            self._write(
                msgspec.structs.replace(self.record, phase=TakeoverPhase.TAKEN_OVER, error=fault[:2000])
            )
            return _failed(f"the observed NGINX does not start, and the agent's own serves on: {fault}")
        await self._applier.forget_all()
        self._write(TakeoverRecord())
        self._log.info("nginx_given_back")
        return ApplyOutcome(state=VersionState.SUCCESS)

    def _write(self, record: TakeoverRecord) -> None:
        write_durably(self._path, msgspec.json.encode(record), mode=0o600)
        self.record = record
        self._changed()


def _failed(words: str) -> ApplyOutcome:
    return ApplyOutcome(state=VersionState.FAILED, error=words)


def _read(path: Path) -> TakeoverRecord:
    try:
        return msgspec.json.decode(path.read_bytes(), type=TakeoverRecord)
    except FileNotFoundError:
        return TakeoverRecord()
    except msgspec.MsgspecError as error:
        raise IntegrityError(
            f"{path} is damaged: {error}", hint="see which NGINX serves, then remove it"
        ) from error
