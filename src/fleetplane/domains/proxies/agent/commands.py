"""What the server may ask of NGINX, and what really came of it.

One command at a time, in order. A command that comes twice is done once and answered twice.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import structlog

from fleetplane.domains.proxies.agent.applier import Applier, Outcome
from fleetplane.domains.proxies.agent.foreign import foreign_fault, names_pid, with_scratch
from fleetplane.domains.proxies.agent.journal import State
from fleetplane.domains.proxies.agent.nginx import Nginx
from fleetplane.domains.proxies.agent.outbox import Outbox
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError

REMEMBERED: Final = 256
WAITING_LIMIT: Final = 64
STOP_SECONDS: Final = 20.0
"""Less than the 30 s the server waits for a restart."""
OUTPUT_LIMIT: Final = 16_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    success: bool
    message: str
    output: str = ""


class Commander:
    def __init__(
        self,
        *,
        applier: Applier,
        nginx: Nginx,
        outbox: Outbox,
        clock: Clock,
        log: structlog.typing.FilteringBoundLogger,
        status: Callable[[], Mapping[str, object]],
        report_health: Callable[[], None],
    ) -> None:
        self._applier = applier
        self._nginx = nginx
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
                self._outbox.put(event)
            return
        try:
            self._waiting.put_nowait(command)
        except asyncio.QueueFull:
            self._answer(command, Result(success=False, message="too many commands are waiting"), 0.0)
            return
        self._done[command.command_id] = None

    async def run(self) -> NoReturn:
        while True:
            command = await self._waiting.get()
            began = self._clock.monotonic()
            try:
                result = await self._do(command)
            except (FleetplaneError, OSError) as error:
                result = Result(success=False, message=str(error))
            self._answer(command, result, self._clock.monotonic() - began)
            self._report_health()

    def _answer(self, command: pb.Command, result: Result, seconds: float) -> None:
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
                "output": result.output[:OUTPUT_LIMIT],
            },
        )
        self._log.info("command_done", command=name, success=result.success, message=result.message)
        self._done[command.command_id] = event
        while len(self._done) > REMEMBERED:
            self._done.popitem(last=False)
        self._outbox.put(event)

    async def _do(self, command: pb.Command) -> Result:
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
                return Result(success=True, message=words, output=json.dumps(dict(self._status())))
            case "validate_config":
                return await self._validate(command.validate_config.config_content)
            case _:
                return Result(success=False, message="this agent does not know that command")

    async def _restart(self, *, force: bool) -> Outcome:
        return await self._applier.restart(force=force, within_seconds=STOP_SECONDS)

    async def _validate(self, content: str) -> Result:
        """Test a text where it can do no harm. NGINX opens what a configuration names, even to test it."""
        if fault := foreign_fault(content):
            return Result(success=False, message=fault)
        with tempfile.TemporaryDirectory(
            prefix="fleetplane-", dir=self._nginx.site.paths.temporary
        ) as folder:
            config = Path(folder) / "nginx.conf"
            config.touch(mode=0o600)
            config.write_text(with_scratch(content, Path(folder)))
            (Path(folder) / "logs").mkdir()
            extra = "" if names_pid(content) else f"pid {folder}/nginx.pid;"
            words = await self._nginx.test(config, prefix=Path(folder), extra=extra)
            words = words.replace(folder, "")
        return Result(success=not words, message=words or "The configuration is valid", output=words)


def _said(outcome: Outcome, words: str) -> Result:
    good = outcome.state is State.SUCCESS
    return Result(success=good, message=words if good else outcome.error, output=outcome.error)
