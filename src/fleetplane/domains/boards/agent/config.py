"""The node's own configuration: what its owner allows, in one file. Nothing from afar changes it.

A word that is not known, or a rule that contradicts itself, stops the agent before it touches anything.
"""

from __future__ import annotations

import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec

from fleetplane.domains.boards.agent.buses.buses import BusPolicy
from fleetplane.domains.boards.agent.commands import rules as command_rules
from fleetplane.domains.boards.agent.commands.rules import (
    CommandPolicy,
    Free,
    ProgramProfile,
    Rule,
    diagnostics,
)
from fleetplane.domains.boards.agent.desired.packages import PackagePolicy
from fleetplane.domains.boards.agent.logs.entries import Redaction
from fleetplane.domains.boards.agent.pins.rules import PinOperation, PinPolicy, PinRule, SafeState
from fleetplane.kernel.errors import InvalidArgument, SettingsError

FILE_LIMIT_BYTES: Final = 1024 * 1024
FILES_LIMIT: Final = 64
PORT: Final = 9091


class GpioDriverName(StrEnum):
    AUTO = "auto"
    """The board's chip, if it has one."""
    GPIOD = "gpiod"
    """The board's chip; it is a fault if there is none."""
    SIMULATED = "simulated"
    NONE = "none"


class BoardSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, by names only, and strict about them."""


class BoardNodeSection(BoardSection, frozen=True):
    name: str = ""
    labels: dict[str, str] = {}


class ListenSection(BoardSection, frozen=True):
    addresses: tuple[str, ...] = ("0.0.0.0",)  # noqa: S104  # a server must reach it; certificates are required
    port: int = PORT
    plaintext: str = ""
    """`127.0.0.1:PORT`: the original service without TLS, for original programs."""
    allow_remote_plaintext: bool = False


class PinSection(BoardSection, frozen=True):
    pin: int
    safe_state: SafeState = SafeState.INPUT
    safe_on_loss: bool = False
    dwell_seconds: float = 0.0


class GpioSection(BoardSection, frozen=True):
    driver: GpioDriverName = GpioDriverName.AUTO
    operations: tuple[PinOperation, ...] = tuple(PinOperation)
    unprotected: tuple[int, ...] = ()
    restricted: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    safe_state: SafeState = SafeState.INPUT
    safe_on_loss: bool = False
    dwell_seconds: float = 0.0
    pins: tuple[PinSection, ...] = ()

    def policy(self) -> PinPolicy:
        return PinPolicy(
            operations=frozenset(self.operations),
            unprotected=frozenset(self.unprotected),
            restricted=frozenset(self.restricted),
            allowed=None if self.allowed is None else frozenset(self.allowed),
            rules={
                one.pin: PinRule(
                    safe_state=one.safe_state,
                    safe_on_loss=one.safe_on_loss,
                    dwell_seconds=one.dwell_seconds,
                )
                for one in self.pins
            },
            default_rule=PinRule(
                safe_state=self.safe_state, safe_on_loss=self.safe_on_loss, dwell_seconds=self.dwell_seconds
            ),
        )


class BoardBusSection(BoardSection, frozen=True):
    spi_channels: tuple[int, ...] = (0, 1)
    i2c_buses: tuple[int, ...] = (1,)

    def policy(self) -> BusPolicy:
        return BusPolicy(spi_channels=frozenset(self.spi_channels), i2c_buses=frozenset(self.i2c_buses))


class RuleSection(BoardSection, frozen=True):
    program: str
    forms: tuple[tuple[str, ...], ...] = ((),)


class ProfileSection(BoardSection, frozen=True):
    name: str
    rules: tuple[RuleSection, ...]
    timeout_seconds: int = command_rules.TIMEOUT_SECONDS
    timeout_limit_seconds: int = command_rules.TIMEOUT_LIMIT_SECONDS
    output_bytes: int = command_rules.OUTPUT_BYTES
    run_as: str = ""
    environment: tuple[str, ...] = ()
    working_dirs: tuple[str, ...] = ()
    stdin: bool = False

    def profile(self) -> ProgramProfile:
        said = msgspec.structs.asdict(self)
        rules = tuple(Rule(program=one.program, forms=one.forms) for one in self.rules)
        return ProgramProfile(**{**said, "rules": rules})


class CommandSection(BoardSection, frozen=True):
    diagnostics: bool = False
    """Allow the profile that comes with the agent."""
    free: Free = Free.NEVER
    run_as: str = "nobody"
    processes: int = command_rules.PROCESSES
    memory_bytes: int = command_rules.MEMORY_BYTES
    profiles: tuple[ProfileSection, ...] = ()

    def policy(self) -> CommandPolicy:
        shipped = (diagnostics(),) if self.diagnostics else ()
        return CommandPolicy(
            profiles=(*shipped, *(one.profile() for one in self.profiles)),
            free=self.free,
            run_as=self.run_as,
            processes=self.processes,
            memory_bytes=self.memory_bytes,
        )


class ProgramsSection(BoardSection, frozen=True):
    """Programs that the server may have kept running here; without rules there are none."""

    rules: tuple[RuleSection, ...] = ()
    run_as: str = "nobody"
    environment: tuple[str, ...] = ()
    working_dirs: tuple[str, ...] = ()
    processes: int = command_rules.PROCESSES
    memory_bytes: int = command_rules.MEMORY_BYTES

    def policy(self) -> CommandPolicy:
        rules = tuple(Rule(program=one.program, forms=one.forms) for one in self.rules)
        profile = ProgramProfile(
            name="programs", rules=rules, environment=self.environment, working_dirs=self.working_dirs
        )
        return CommandPolicy(
            profiles=(profile,) if rules else (),
            run_as=self.run_as,
            processes=self.processes,
            memory_bytes=self.memory_bytes,
        )


class PackagesSection(BoardSection, frozen=True):
    """Debian packages that the server may have installed here; without names there are none."""

    allow: tuple[str, ...] = ()
    """Names, in which * stands for anything. Dependencies are installed only if they are named as well."""
    sudo: bool = False
    """Run apt-get by `sudo -n` if the agent is not root."""
    timeout_seconds: float = 600.0

    def policy(self) -> PackagePolicy:
        return PackagePolicy(allow=self.allow, sudo=self.sudo, timeout_seconds=self.timeout_seconds).checked()


class LogSection(BoardSection, frozen=True):
    files: dict[str, str] = {}
    redact: tuple[str, ...] = ()
    journalctl: str = ""

    def paths(self) -> dict[str, Path]:
        if len(self.files) > FILES_LIMIT:
            raise SettingsError(f"logs.files has at most {FILES_LIMIT} entries", field="logs.files")
        for name, path in self.files.items():
            if not name or not name.isascii() or not name.replace("-", "_").replace(".", "_").isidentifier():
                raise SettingsError(f"logs.files: {name!r} is no name", field="logs.files")
            if not Path(path).is_absolute():
                raise SettingsError(f"logs.files.{name}: {path!r} is not absolute", field="logs.files")
        return {name: Path(path) for name, path in self.files.items()}


class AccessSection(BoardSection, frozen=True):
    refuse: tuple[str, ...] = ()
    """Principals and serial numbers of certificates (hexadecimal) that are not let in."""


class ReportSection(BoardSection, frozen=True):
    loss_after_seconds: float = 90.0
    """Seconds without a message from the server after which pins configured for it are made safe."""


class BoardAgentConfig(BoardSection, frozen=True):
    node: BoardNodeSection = BoardNodeSection()
    listen: ListenSection = ListenSection()
    gpio: GpioSection = GpioSection()
    buses: BoardBusSection = BoardBusSection()
    commands: CommandSection = CommandSection()
    programs: ProgramsSection = ProgramsSection()
    packages: PackagesSection = PackagesSection()
    logs: LogSection = LogSection()
    access: AccessSection = AccessSection()
    report: ReportSection = ReportSection()

    def redaction(self) -> Redaction:
        return Redaction.of(self.logs.redact, field="logs.redact")

    def check(self) -> BoardAgentConfig:
        """Whatever can be wrong with it, found now."""
        self.gpio.policy()
        self.commands.policy()
        self.programs.policy()
        self.packages.policy()
        self.logs.paths()
        self.redaction()
        if not 0 <= self.listen.port <= 65_535:
            raise SettingsError(f"listen.port {self.listen.port} is no port", field="listen.port")
        if not self.listen.addresses:
            raise SettingsError("listen.addresses is empty", field="listen.addresses")
        if self.report.loss_after_seconds < 1:
            raise SettingsError("report.loss_after_seconds is at least 1", field="report.loss_after_seconds")
        return self


def load(path: Path | None) -> BoardAgentConfig:
    if path is None:
        return BoardAgentConfig()
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > FILE_LIMIT_BYTES:
        raise SettingsError(f"{path} is larger than {FILE_LIMIT_BYTES} bytes")
    try:
        return decode(tomllib.loads(raw.decode()), source=str(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error


def decode(document: dict[str, Any], *, source: str = "the configuration") -> BoardAgentConfig:
    try:
        return msgspec.convert(document, BoardAgentConfig).check()
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {error}") from error
    except InvalidArgument as error:  # a pattern
        raise SettingsError(f"{source}: {error.message}", field=error.field) from error
