"""`cmd.run`: one program with its arguments. No shell: nothing in them is expanded or split."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from typing import Final

from fleetplane.domains.edge.agent.tools import contract as read
from fleetplane.domains.edge.agent.tools.contract import (
    BadArguments,
    Claims,
    CommandOutcomeReport,
    ErrorKind,
    PermittedCall,
    ProgramPrivileges,
    ToolFailed,
    ToolState,
)
from fleetplane.kernel.errors import SettingsError
from fleetplane.node.programs import containment
from fleetplane.node.programs import run as programs
from fleetplane.node.programs.containment import Containment, Program, ProgramUser, ResourceLimits
from fleetplane.node.programs.run import Streamed

KNOWN: Final = frozenset({"command", "args", "cwd", "timeout_secs", "env"})
DEFAULT_TIMEOUT_SECONDS: Final = 600.0
LONGEST_SECONDS: Final = 24 * 3600.0
TERM_SECONDS: Final = 5.0
"""Between asking a program to end and ending it."""
WORDS_LIMIT: Final = 1024
"""Characters of a failed program's last output in the message; the output has more."""
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class RunCommand:
    name = "cmd.run"

    def __repr__(self) -> str:
        return "<RunCommand>"

    def claims(self, arguments: Mapping[str, object]) -> Claims:
        read.only(arguments, KNOWN)
        command = read.text(arguments, "command")
        if not command.strip():
            raise BadArguments("command: is empty", field="command")
        if "/" in command and not command.startswith("/"):
            raise BadArguments("command: is neither a name nor an absolute path", field="command")
        words, variables = read.texts(arguments, "args"), read.text_map(arguments, "env")
        for name in variables:
            if _VARIABLE.fullmatch(name) is None:
                raise BadArguments(f"env: {name[:80]!r} is no variable's name", field="env")
        return Claims(
            command=command,
            subcommand=words[0] if words else "",
            variables=tuple(variables),
            paths=(read.absolute_path(arguments, "cwd"),) if arguments.get("cwd") is not None else (),
            timeout_seconds=read.number(
                arguments, "timeout_secs", DEFAULT_TIMEOUT_SECONDS, low=0.001, high=LONGEST_SECONDS
            ),
        )

    async def run(self, call: PermittedCall) -> CommandOutcomeReport:
        command = read.text(call.arguments, "command")
        environment = {**call.environment, **read.text_map(call.arguments, "env")}
        # Looked up on the daemon's own path: a variable of the call must not choose the program.
        path = shutil.which(command, path=call.environment.get("PATH", os.defpath))
        if path is None:
            raise ToolFailed(ErrorKind.INTERNAL, f"{command!r} is no program on this machine")
        folder = next((str(resolved) for resolved in call.paths.values()), "/")
        whom = account_of(call.privileges)
        if whom.uid is not None:
            environment["HOME"] = whom.home
        program = Program(
            path=path, arguments=read.texts(call.arguments, "args"), folder=folder, environment=environment
        )
        output = Streamed(call.emit, limit_bytes=call.output_limit_bytes)
        try:
            ended = await programs.run(program, contained(call, whom), output)
        except (OSError, ValueError) as error:
            raise ToolFailed(ErrorKind.INTERNAL, f"{command!r} could not be started: {error}") from error
        return _outcome(ended, output)


def account_of(privileges: ProgramPrivileges) -> ProgramUser:
    """The user that programs run as; ToolFailed if the daemon cannot become that user."""
    if not privileges.run_as:
        return ProgramUser()
    if os.geteuid() != 0:
        raise ToolFailed(
            ErrorKind.INTERNAL,
            f"programs.run_as: is {privileges.run_as!r}, but the daemon is not root; "
            "run the daemon as root, or as that user without this setting",
        )
    try:
        return containment.account(privileges.run_as)
    except SettingsError as error:
        raise ToolFailed(ErrorKind.INTERNAL, f"programs.run_as: {error.message}") from error


def contained(call: PermittedCall, whom: ProgramUser) -> Containment:
    """The owner's limits and privileges as a containment."""
    limits = ResourceLimits(
        processes=call.limits.processes,
        data_bytes=call.limits.memory_bytes,
        open_files=call.limits.open_files,
        file_bytes=call.limits.file_bytes,
    )
    return Containment(
        account=whom,
        no_new_privileges=call.privileges.no_new_privileges,
        may_detach=call.privileges.may_detach,
        limits=limits,
        umask=None,
        term_seconds=TERM_SECONDS,
    )


def _outcome(ended: programs.ProgramExit, output: Streamed) -> CommandOutcomeReport:
    structured = {"dropped_bytes": output.dropped_bytes} if output.dropped_bytes else None
    stdout, stderr = bytes(output.stdout), bytes(output.stderr)
    if ended.exit_code == 0:
        return CommandOutcomeReport(stdout=stdout, stderr=stderr, structured=structured)
    words = stderr[-WORDS_LIMIT:].decode(errors="replace").strip()
    ending = f"ended by signal {ended.signal}" if ended.signal else f"ended with {ended.exit_code}"
    return CommandOutcomeReport(
        state=ToolState.ERROR,
        kind=ErrorKind.NONZERO_EXIT,
        message=f"{ending}: {words}" if words else ending,
        exit_code=ended.exit_code,
        stdout=stdout,
        stderr=stderr,
        structured=structured,
    )
