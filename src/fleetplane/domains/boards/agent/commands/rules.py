"""Which programs a caller may run on this board, with which arguments, and within which limits. Pure.

Nothing is allowed that the node's own configuration does not name: an absolute path, and the forms its
arguments may take, position by position. There is no shell, so its characters mean nothing; a name is
looked up among the rules and nowhere else, so no path and no environment can put another program in its
place. `PROFILES` holds the read-only diagnostic commands that come with the agent; the node's owner enables
them.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from fleetplane.domains.boards.agent.logs.entries import Pattern, compiled
from fleetplane.kernel.errors import InvalidArgument, PermissionDenied, SettingsError

TIMEOUT_SECONDS: Final = 30
TIMEOUT_LIMIT_SECONDS: Final = 300
OUTPUT_BYTES: Final = 256 * 1024
OUTPUT_LIMIT_BYTES: Final = 1024 * 1024
"""Of each stream: both fit a message of 4 MiB."""
ARGUMENTS_LIMIT: Final = 64
ARGUMENT_LIMIT: Final = 4096
"""In characters."""
STDIN_LIMIT_BYTES: Final = 64 * 1024
ENVIRONMENT_LIMIT: Final = 16
VALUE_LIMIT: Final = 1024
PROCESSES: Final = 32
MEMORY_BYTES: Final = 256 * 1024 * 1024
REPEAT: Final = "..."
"""At the end of a form: its last pattern may match any number of arguments."""
FORBIDDEN_VARIABLES: Final = ("LD_", "PYTHON", "BASH", "PERL", "RUBY", "NODE_", "GCONV_", "MALLOC_", "GLIBC_")
FORBIDDEN_NAMES: Final = frozenset(
    {"PATH", "HOME", "LANG", "IFS", "ENV", "SHELL", "PAGER", "EDITOR", "SYSTEMD_PAGER", "LESSOPEN"}
)
"""No profile may let callers set these: they choose what code runs."""


class Free(StrEnum):
    """Who may run what no profile names; decided on the node."""

    NEVER = "never"
    ADMINS = "admins"
    CONTROLLERS = "controllers"
    """Admins, and servers that say they act for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    program: str
    """Absolute; also known by the last part of it."""
    forms: tuple[tuple[str, ...], ...] = ((),)
    """Each a pattern per argument, which must match it whole; `...` at the end repeats the last."""
    compiled_forms: tuple[tuple[Pattern, ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not posixpath.isabs(self.program) or posixpath.normpath(self.program) != self.program:
            raise SettingsError(f"{self.program!r} is no absolute path of a program", field="program")
        made = []
        for form in self.forms:
            if REPEAT in form[:-1] or form == (REPEAT,):
                raise SettingsError(f"{self.program}: {REPEAT} stands last, after a pattern", field="forms")
            if len(form) > ARGUMENTS_LIMIT:
                raise SettingsError(
                    f"{self.program}: a form has at most {ARGUMENTS_LIMIT} patterns", field="forms"
                )
            patterns = form[:-1] if form[-1:] == (REPEAT,) else form
            made.append(tuple(compiled(one, field="forms", trusted=True) for one in patterns))
        object.__setattr__(self, "compiled_forms", tuple(made))

    @property
    def name(self) -> str:
        return posixpath.basename(self.program)

    def allows(self, arguments: Sequence[str]) -> bool:
        return any(
            _fits(patterns, arguments, repeat=form[-1:] == (REPEAT,))
            for form, patterns in zip(self.forms, self.compiled_forms, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramProfile:
    name: str
    rules: tuple[Rule, ...]
    timeout_seconds: int = TIMEOUT_SECONDS
    """Unless the caller asks for less, or for more up to the limit."""
    timeout_limit_seconds: int = TIMEOUT_LIMIT_SECONDS
    output_bytes: int = OUTPUT_BYTES
    run_as: str = ""
    """A user's name; else the one that the configuration gives for all."""
    environment: tuple[str, ...] = ()
    """Variables that a caller may set."""
    working_dirs: tuple[str, ...] = ()
    stdin: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.timeout_seconds <= self.timeout_limit_seconds <= TIMEOUT_LIMIT_SECONDS:
            raise SettingsError(
                f"{self.name}: timeouts are 1 to {TIMEOUT_LIMIT_SECONDS} s", field="timeout_seconds"
            )
        if not 1 <= self.output_bytes <= OUTPUT_LIMIT_BYTES:
            raise SettingsError(
                f"{self.name}: output is 1 to {OUTPUT_LIMIT_BYTES} bytes", field="output_bytes"
            )
        for variable in self.environment:
            if not variable.isidentifier() or not variable.isascii() or _chooses_code(variable):
                raise SettingsError(
                    f"{self.name}: callers may not set {variable!r}: it can choose what code runs",
                    field="environment",
                )
        for folder in self.working_dirs:
            if not posixpath.isabs(folder):
                raise SettingsError(f"{self.name}: {folder!r} is not absolute", field="working_dirs")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandPolicy:
    profiles: tuple[ProgramProfile, ...] = ()
    """None: every command is refused."""
    free: Free = Free.NEVER
    run_as: str = "nobody"
    """When the agent itself is root."""
    processes: int = PROCESSES
    memory_bytes: int = MEMORY_BYTES

    def __post_init__(self) -> None:
        names = [profile.name for profile in self.profiles]
        if len(names) != len(set(names)):
            raise SettingsError("two profiles have the same name", field="profiles")
        if self.processes < 1 or self.memory_bytes < 16 * 1024 * 1024:
            raise SettingsError("commands need at least 1 process and 16 MiB", field="commands")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRequest:
    """What a caller wants run."""

    command: str
    arguments: tuple[str, ...] = ()
    profile: str = ""
    timeout_seconds: int = 0
    working_dir: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    max_output_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramJob:
    """What may be run."""

    program: str
    arguments: tuple[str, ...]
    profile: str
    """Empty for a free one."""
    timeout_seconds: int
    output_bytes: int
    working_dir: str
    environment: Mapping[str, str]
    stdin: bytes
    run_as: str


def decide(policy: CommandPolicy, asked: ProgramRequest, *, free: bool) -> ProgramJob:
    """The job, or PermissionDenied or InvalidArgument. `free`: the caller may run what no profile names."""
    program, arguments = _words(asked)
    candidates = [one for one in policy.profiles if asked.profile in ("", one.name)]
    if asked.profile and not candidates:
        raise _denied(f"there is no profile {asked.profile[:64]!r} on this node", "profile")
    known = False
    for profile in candidates:
        for rule in profile.rules:
            if program in (rule.program, rule.name):
                known = True
                if rule.allows(arguments):
                    return _job(policy, profile, rule.program, arguments, asked)
    if free and not asked.profile and posixpath.isabs(program):
        return _job(policy, ProgramProfile(name="", rules=(), stdin=True), program, arguments, asked)
    if not policy.profiles and policy.free is Free.NEVER:
        raise _denied("this node runs no commands", "off", hint="its owner can allow some, by profiles")
    if known:
        raise _denied(f"{program[:128]!r} is not allowed with these arguments", "arguments")
    raise _denied(f"{program[:128]!r} is not on this node's allow list", "program")


def _words(asked: ProgramRequest) -> tuple[str, tuple[str, ...]]:
    """The program and its arguments. A command line in one piece is split, and by quotes only."""
    command, arguments = asked.command, asked.arguments
    if not command or len(command) > ARGUMENT_LIMIT or "\0" in command:
        raise InvalidArgument(f"command has 1 to {ARGUMENT_LIMIT} characters and no NUL", field="command")
    if not arguments and any(space in command for space in " \t"):
        try:
            command, *rest = shlex.split(command)
        except ValueError as error:
            raise InvalidArgument(f"command cannot be split into words: {error}", field="command") from error
        arguments = tuple(rest)
    if len(arguments) > ARGUMENTS_LIMIT:
        raise InvalidArgument(f"args has at most {ARGUMENTS_LIMIT} entries", field="args")
    for argument in arguments:
        if len(argument) > ARGUMENT_LIMIT or "\0" in argument:
            raise InvalidArgument(
                f"an argument has at most {ARGUMENT_LIMIT} characters and no NUL", field="args"
            )
    return command, arguments


def _job(
    policy: CommandPolicy,
    profile: ProgramProfile,
    program: str,
    arguments: tuple[str, ...],
    asked: ProgramRequest,
) -> ProgramJob:
    timeout = asked.timeout_seconds or profile.timeout_seconds
    if not 1 <= timeout <= profile.timeout_limit_seconds:
        raise InvalidArgument(
            f"timeout_seconds is 1 to {profile.timeout_limit_seconds}", field="timeout_seconds"
        )
    output = asked.max_output_bytes or profile.output_bytes
    if not 1 <= output <= OUTPUT_LIMIT_BYTES:
        raise InvalidArgument(f"max_output_bytes is 1 to {OUTPUT_LIMIT_BYTES}", field="max_output_bytes")
    if asked.working_dir and asked.working_dir not in profile.working_dirs:
        raise _denied("working_dir is not on this node's list", "working-dir", field="working_dir")
    _check_stdin(profile, asked.stdin)
    _check_environment(profile, asked.environment)
    return ProgramJob(
        program=program,
        arguments=arguments,
        profile=profile.name,
        timeout_seconds=timeout,
        output_bytes=min(output, max(profile.output_bytes, OUTPUT_BYTES)),
        working_dir=asked.working_dir or "/",
        environment=asked.environment,
        stdin=asked.stdin,
        run_as=profile.run_as or policy.run_as,
    )


def _check_stdin(profile: ProgramProfile, stdin: bytes) -> None:
    if stdin and not profile.stdin:
        raise _denied("this profile takes no input", "stdin", field="stdin")
    if len(stdin) > STDIN_LIMIT_BYTES:
        raise InvalidArgument(f"stdin has at most {STDIN_LIMIT_BYTES} bytes", field="stdin")


def _check_environment(profile: ProgramProfile, environment: Mapping[str, str]) -> None:
    if len(environment) > ENVIRONMENT_LIMIT:
        raise InvalidArgument(f"environment has at most {ENVIRONMENT_LIMIT} entries", field="environment")
    for name, value in environment.items():
        if name not in profile.environment:
            raise _denied(f"environment: {name[:64]!r} may not be set", "environment", field="environment")
        if len(value) > VALUE_LIMIT or "\0" in value:
            raise InvalidArgument(
                f"environment: a value has at most {VALUE_LIMIT} characters and no NUL", field="environment"
            )


def _fits(patterns: Sequence[Pattern], arguments: Sequence[str], *, repeat: bool) -> bool:
    if not repeat:
        return len(patterns) == len(arguments) and all(
            pattern.fullmatch(argument) for pattern, argument in zip(patterns, arguments, strict=True)
        )
    fixed, last = patterns[:-1], patterns[-1]
    return (
        len(arguments) >= len(fixed)
        and all(pattern.fullmatch(one) for pattern, one in zip(fixed, arguments, strict=False))
        and all(last.fullmatch(one) for one in arguments[len(fixed) :])
    )


def _chooses_code(variable: str) -> bool:
    return variable in FORBIDDEN_NAMES or variable.startswith(FORBIDDEN_VARIABLES)


def _denied(message: str, cause: str, *, field: str = "command", hint: str | None = None) -> PermissionDenied:
    return PermissionDenied(message, field=field, hint=hint, details={"cause": cause})


NAME: Final = "diagnostics"
_UNIT: Final = r"[A-Za-z0-9][A-Za-z0-9@._:-]{0,127}"
_COUNT: Final = "[0-9]{1,4}"
_NETWORK: Final = "addr|address|link|route|neigh"

RULES: Final = (
    ("/usr/bin/uptime", ((), ("-p|-s",))),
    ("/usr/bin/df", ((), ("-[hiTkP]{1,5}",))),
    ("/usr/bin/free", ((), ("-[bkmght]{1,4}",))),
    ("/usr/bin/uname", ((), ("-[asnrvmpio]{1,5}",))),
    ("/usr/sbin/ip", ((_NETWORK,), ("-[46sbd]{1,2}", _NETWORK))),
    ("/usr/bin/ip", ((_NETWORK,), ("-[46sbd]{1,2}", _NETWORK))),
    ("/usr/bin/ss", ((), ("-[tulnapsie46]{1,8}",))),
    (
        "/usr/bin/journalctl",
        (
            ("--no-pager", "-n", _COUNT),
            ("--no-pager", "-n", _COUNT, "-u", _UNIT),
            ("--no-pager", "-k", "-n", _COUNT),
        ),
    ),
    (
        "/usr/bin/vcgencmd",
        (("get_throttled|measure_temp|version",), ("measure_volts|measure_clock", "[a-z0-9]{2,8}")),
    ),
    ("/usr/local/bin/k3s", (("kubectl", "get", "nodes|pods|services|events", "-A|-o|wide", REPEAT),)),
    (
        "/usr/bin/systemctl",
        (
            ("--no-pager", "status", _UNIT),
            ("is-active|is-enabled|is-failed", _UNIT),
            ("--no-pager", "--failed"),
        ),
    ),
)


def diagnostics(exists: Callable[[Path], bool] = Path.exists) -> ProgramProfile:
    """The diagnostic programs that this machine has."""
    rules = (Rule(program=program, forms=forms) for program, forms in RULES if exists(Path(program)))
    return ProgramProfile(name=NAME, rules=tuple(rules))
