"""Where somebody sits who uses the command line: at the server's socket, or elsewhere with a context."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from support.shared.cli_runner import COMMAND, Outcome, execute
from support.shared.server_process import ServerProcess

from fleetplane.cli.exits import Exit
from fleetplane.cli.main import run

SOCKET, TLS = "socket", "tls"
CONTEXT = "lab"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """With a folder, and the variables that say which server is meant."""

    folder: Path
    variables: dict[str, str]
    server: ServerProcess
    is_owner: bool

    @property
    def environment(self) -> dict[str, str]:
        """Of a command: nothing of ours but what says which server is meant."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FLEETPLANE_")}
        return kept | self.variables

    def apart(self, *words: str) -> Outcome:
        """As a process of its own."""
        return execute(*words, folder=self.folder, environment=self.environment)

    def __call__(self, *words: str) -> Outcome:
        """In this process, which costs a tenth."""
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, self.environment, clear=True),
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = run(words)
        return Outcome(code=code, out=out.getvalue(), err=err.getvalue())

    def first_lines(
        self, number: int, *words: str, once_there: Callable[[], object] = lambda: None
    ) -> list[str]:
        """The first lines of a command that goes on, which is interrupted then.

        Once the first line is there, something may be done that makes the others come.
        """
        with subprocess.Popen(
            [*COMMAND, *words], stdout=subprocess.PIPE, text=True, cwd=self.folder, env=self.environment
        ) as going:
            assert going.stdout is not None
            found = [going.stdout.readline()]
            once_there()
            found += [going.stdout.readline() for _ in range(number - 1)]
            going.send_signal(signal.SIGINT)
            going.stdout.read()
        assert going.returncode == Exit.INTERRUPTED
        return found


def seated(where: str, server: ServerProcess, data: Path, folder: Path, roles: tuple[str, ...]) -> Seat:
    """A seat at the owner's socket, or over TLS in another folder, with a token that has these roles."""
    if where == SOCKET:
        return Seat(folder=folder, variables={"FLEETPLANE_DATA_DIR": str(data)}, server=server, is_owner=True)
    words = [word for role in roles for word in ("--role", role)]
    made = execute("tokens", "create", folder.name, *words, "--data-dir", str(data))
    assert made.code == 0, made.err
    (folder / "token").write_text(made.out)
    here = Seat(
        folder=folder,
        variables={"FLEETPLANE_CONTEXTS": str(folder / "contexts.json")},
        server=server,
        is_owner=False,
    )
    login = ("login", f"https://localhost:{server.web.rpartition(':')[2]}", "--token-file", "token")
    shown = re.search(r"SHA256:[0-9A-F:]+", here(*login).err)
    assert shown is not None
    done = here(*login, "--name", CONTEXT, "--use", "--fingerprint", shown[0])
    assert done.code == 0, done.err
    return here
