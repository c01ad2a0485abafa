"""What the server may ask of NGINX, and what really came of it.

One command at a time, in order. A command that comes twice is done once and answered twice.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

import structlog

from fleetplane.domains.proxies.agent.nginx.applier import ApplyOutcome, VersionApplier
from fleetplane.domains.proxies.agent.nginx.confinement import Confinement
from fleetplane.domains.proxies.agent.nginx.confirmation import VersionState
from fleetplane.domains.proxies.agent.nginx.control import Nginx
from fleetplane.domains.proxies.agent.observing.observed import ObservedNginx
from fleetplane.domains.proxies.agent.observing.takeover import Takeover
from fleetplane.domains.proxies.agent.outbox import ProxyOutbox
from fleetplane.domains.proxies.nginx.reading import foreign_fault, text_to_test
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError

REMEMBERED: Final = 256
WAITING_LIMIT: Final = 64
STOP_SECONDS: Final = 20.0
"""Less than the 30 s the server waits for a restart."""
OUTPUT_LIMIT: Final = 16_000
SHOWN_LIMIT: Final = 60_000
"""Characters of what is shown of an observed NGINX, which pages itself."""
VALID: Final = "The configuration is valid"
NO_SANDBOX: Final = (
    "this node has no sandbox to test a configuration in: it needs Linux 5.13 with Landlock, or an agent "
    "that runs as root, on x86-64 or 64-bit ARM"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    success: bool
    message: str
    output: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NginxObserving:
    """An NGINX that was found, and whose it is by now."""

    nginx: ObservedNginx
    takeover: Takeover


class CommandHandler:
    def __init__(
        self,
        *,
        applier: VersionApplier,
        nginx: Nginx,
        confinement: Confinement,
        outbox: ProxyOutbox,
        clock: Clock,
        log: structlog.typing.FilteringBoundLogger,
        status: Callable[[], Mapping[str, object]],
        report_health: Callable[[], None],
        observing: NginxObserving | None = None,
    ) -> None:
        """`observing` is there where the agent was started beside an NGINX which is not its own."""
        self._observing = observing
        self._applier = applier
        self._nginx = nginx
        self._confinement = confinement
        self._outbox = outbox
        self._clock = clock
        self._log = log
        self._status = status
        self._report_health = report_health
        self._waiting: asyncio.Queue[pb.Command] = asyncio.Queue(WAITING_LIMIT)
        self._done: OrderedDict[str, pb.Event | None] = OrderedDict()
        """By id; None while it is being done."""

    def __repr__(self) -> str:
        return f"<Commander waiting={self._waiting.qsize()} remembered={len(self._done)}>"

    def take(self, command: pb.Command) -> None:
        if command.command_id in self._done:
            if (event := self._done[command.command_id]) is not None:
                self._outbox.add(event)
            return
        try:
            self._waiting.put_nowait(command)
        except asyncio.QueueFull:
            self._answer(command, CommandResult(success=False, message="too many commands are waiting"), 0.0)
            return
        self._done[command.command_id] = None

    async def run(self) -> NoReturn:
        while True:
            command = await self._waiting.get()
            began = self._clock.monotonic()
            try:
                result = await self._do(command)
            except (FleetplaneError, OSError) as error:
                result = CommandResult(success=False, message=str(error))
            self._answer(command, result, self._clock.monotonic() - began)
            self._report_health()

    def _answer(self, command: pb.Command, result: CommandResult, seconds: float) -> None:
        name = command.WhichOneof("command") or "unknown"
        event = pb.Event(
            event_id=f"{command.command_id}:result",
            event_type="command.result",
            timestamp=self._clock.now_ns() // 1_000_000,
            data={
                "command_id": command.command_id,
                "command": name,
                "success": "true" if result.success else "false",
                "message": result.message,
                "duration_ms": str(round(seconds * 1000)),
                "output": result.output[: SHOWN_LIMIT if name == "show_observed" else OUTPUT_LIMIT],
            },
        )
        self._log.info("command_done", command=name, success=result.success, message=result.message)
        self._done[command.command_id] = event
        if len(self._done) > REMEMBERED:  # one that waits or is being done would be done twice if forgotten
            del self._done[next(known for known, answer in self._done.items() if answer is not None)]
        self._outbox.add(event)

    async def _do(self, command: pb.Command) -> CommandResult:
        match command.WhichOneof("command"):
            case "reload" if command.reload.graceful:
                return _said(await self._applier.reload(), "Nginx reloaded successfully")
            case "reload":
                return _said(await self._restart(force=False), "Nginx restarted successfully")
            case "restart":
                return _said(await self._restart(force=command.restart.force), "Nginx restarted successfully")
            case "stop":
                seconds = float(command.stop.timeout_seconds or STOP_SECONDS)
                outcome = await self._applier.stop(graceful=command.stop.graceful, within_seconds=seconds)
                return _said(outcome, "Nginx stopped")
            case "get_status":
                running = self._nginx.master() is not None
                words = "Nginx is running" if running else "Nginx is not running"
                return CommandResult(success=True, message=words, output=json.dumps(dict(self._status())))
            case "validate_config" if command.validate_config.HasField("candidate"):
                words = await self._applier.try_out(command.validate_config.candidate)
                return CommandResult(success=not words, message=words or VALID, output=words)
            case "validate_config":
                return await self._validate(command.validate_config.config_content)
            case "show_observed" | "take_over" | "give_back" if self._observing is not None:
                return await self._change_hands(command, self._observing)
            case _:
                return CommandResult(success=False, message="this agent does not know that command")

    async def _change_hands(self, command: pb.Command, observing: NginxObserving) -> CommandResult:
        match command.WhichOneof("command"):
            case "take_over":
                order = command.take_over
                outcome = await observing.takeover.take_over(order.version, order.digest)
                return _said(outcome, f"NGINX was taken over with version {order.version}")
            case "give_back":
                return _said(await observing.takeover.give_back(), "NGINX was given back")
            case _:
                shown = command.show_observed
                if shown.certificate:
                    text = await observing.nginx.certificate(shown.certificate, shown.seal_to)
                elif shown.log:
                    text = await observing.nginx.tail(shown.log, shown.lines)
                else:
                    text = await observing.nginx.page(shown.page)
                return CommandResult(success=True, message="shown", output=text)

    async def _restart(self, *, force: bool) -> ApplyOutcome:
        return await self._applier.restart(force=force, within_seconds=STOP_SECONDS)

    async def _validate(self, content: str) -> CommandResult:
        """Test a text where it can do no harm. NGINX opens what a configuration names, even to test it."""
        if not self._confinement.holds:
            return CommandResult(success=False, message=NO_SANDBOX)
        if fault := await asyncio.to_thread(foreign_fault, content, self._nginx.site.files):
            return CommandResult(success=False, message=fault)
        with self._confinement.folder() as folder:
            config = folder / "nginx.conf"
            config.touch(mode=0o600)
            config.write_text(await asyncio.to_thread(text_to_test, content, folder))
            self._confinement.hand_over(folder)
            words = await self._nginx.test_foreign(config, folder, self._confinement)
            words = words.replace(str(folder), "")
        return CommandResult(success=not words, message=words or VALID, output=words)


def _said(outcome: ApplyOutcome, words: str) -> CommandResult:
    good = outcome.state is VersionState.SUCCESS
    return CommandResult(success=good, message=words if good else outcome.error, output=outcome.error)
