"""`cmd.run`: one program with its arguments. No shell: nothing in them is expanded or split."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from typing import Final

from fleetplane.domains.edge.agent import processes
from fleetplane.domains.edge.agent.tools import arguments as read
from fleetplane.domains.edge.agent.tools.contract import (
    BadArguments,
    Call,
    Claims,
    ErrorKind,
    Outcome,
    State,
    ToolFailed,
)

KNOWN: Final = frozenset({"command", "args", "cwd", "timeout_secs", "env"})
DEFAULT_TIMEOUT_SECONDS: Final = 600.0
LONGEST_SECONDS: Final = 24 * 3600.0
WORDS_LIMIT: Final = 1024
"""Of a failed program's last words in the message; more of them is in the output."""
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

    async def run(self, call: Call) -> Outcome:
        command = read.text(call.arguments, "command")
        environment = {**call.environment, **read.text_map(call.arguments, "env")}
        # Looked up on the daemon's own path: a variable of the call must not choose the program.
        path = shutil.which(command, path=call.environment.get("PATH", os.defpath))
        if path is None:
            raise ToolFailed(ErrorKind.INTERNAL, f"{command!r} is no program on this machine")
        folder = next((str(resolved) for resolved in call.paths.values()), "/")
        program = processes.Program(
            path=path, arguments=read.texts(call.arguments, "args"), folder=folder, environment=environment
        )
        try:
            ended = await processes.run(program, call.emit, output_limit_bytes=call.output_limit_bytes)
        except (OSError, ValueError) as error:
            raise ToolFailed(ErrorKind.INTERNAL, f"{command!r} could not be started: {error}") from error
        return _outcome(ended)


def _outcome(ended: processes.Ended) -> Outcome:
    structured = {"dropped_bytes": ended.dropped_bytes} if ended.dropped_bytes else None
    if ended.exit_code == 0:
        return Outcome(stdout=ended.stdout, stderr=ended.stderr, structured=structured)
    words = ended.stderr[-WORDS_LIMIT:].decode(errors="replace").strip()
    ending = f"ended by signal {ended.signal}" if ended.signal else f"ended with {ended.exit_code}"
    return Outcome(
        state=State.ERROR,
        kind=ErrorKind.NONZERO_EXIT,
        message=f"{ending}: {words}" if words else ending,
        exit_code=ended.exit_code,
        stdout=ended.stdout,
        stderr=ended.stderr,
        structured=structured,
    )
