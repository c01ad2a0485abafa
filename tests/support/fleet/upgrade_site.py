"""A server and agents in a network of their own, without a way to anywhere else; and the server's owner."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.shared.cli_runner import COMMAND
from support.shared.server_process import ServerProcess, running_server

from fleetplane import client
from fleetplane.cli.clients.rest_client import RestClient, connect
from fleetplane.cli.exits import Exit
from fleetplane.client.places import Place

SECONDS = 180.0
"""Five agents start and install at once, on a machine that has other things to do."""
ALONE = ("unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$0" "$@"')
"""A network with loopback and nothing else."""
AT_ONCE = {"waves": ["rest"], "soak_seconds": 0.0, "confirm_seconds": 3600.0}


def until(condition: Callable[[], Any], what: str) -> Any:
    """What the condition comes to, once that is true."""
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in {SECONDS:g} s: {what}"
        time.sleep(0.5)
    return found


@dataclass(slots=True, kw_only=True)
class LaunchedAgent:
    """An agent under the launcher."""

    process: subprocess.Popen[bytes] | None
    """None for one that the server has started."""
    releases: Path
    log: Path

    def end(self) -> None:
        """End it, if it is not the server's."""
        if self.process is not None:
            end(self.process)

    def current(self) -> str:
        """The version in force; empty for the installed one."""
        try:
            return (self.releases / "current").readlink().name.rpartition("-")[0]
        except OSError:
            return ""


@dataclass(slots=True, kw_only=True)
class UpgradeSite:
    server: ServerProcess
    data: Path
    folder: Path
    key: str
    stack: ExitStack = field(repr=False)
    rest: RestClient
    """One connection for all calls: on a busy machine opening one can take longer than a client waits."""

    def inside(self, *words: str) -> Sequence[str]:
        """A command in the server's network."""
        return ("nsenter", f"--net=/proc/{self.server.pid}/ns/net", "--", *words)

    def run(self, *words: str) -> str:
        """A verb of the command line, in the server's network; what it prints.

        Again if there was no connection: a verb waits a fifth of a second for one, a busy machine longer.
        """
        deadline = time.monotonic() + SECONDS
        while True:
            done = subprocess.run(
                [*self.inside(*COMMAND), *words], capture_output=True, text=True, timeout=SECONDS, check=False
            )
            if done.returncode != Exit.UNAVAILABLE or time.monotonic() > deadline:
                break
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def owner(self, *words: str) -> str:
        """The same as the server's owner."""
        return self.run(*words, "--data-dir", str(self.data))

    def launch(
        self, name: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> LaunchedAgent:
        """An agent that the server can upgrade; ended with the site."""
        releases, log = self.folder / f"releases-{name}", self.folder / f"{name}.log"
        options = ["--releases", str(releases), "--release-key", self.key]
        with log.open("ab") as stderr:
            process = subprocess.Popen(
                [*self.inside(*COMMAND), "agent", "launch", *options, *arguments],
                stderr=stderr,
                env={**os.environ, **(environment or {})},
            )
        self.stack.callback(end, process)
        return LaunchedAgent(process=process, releases=releases, log=log)

    # What the server knows.

    def said(self, domain: str) -> Mapping[str, Mapping[str, Any]]:
        """What each agent of a domain said, by its name."""
        with client.connect_sync(data_dir=self.data) as fleet:
            found = fleet.resource("agent-versions").list().items
        return {one.name: one.status for one in found if one.spec["domain"] == domain}

    def runs(self, domain: str, version: str) -> bool:
        """Whether the one agent of a domain said that it runs a version."""
        return [one["version"] for one in self.said(domain).values()] == [version]

    def roll_out(self, domain: str, version: str, **policy: Any) -> str:
        """Start a rollout to all agents of a domain at once; its id."""
        body = {"subject": "agents.version", "scope": domain, "to": version, "policy": {**AT_ONCE, **policy}}
        return str(self.rest.call("POST", "/v1/fleet/rollouts", body=body)["id"])

    def rollout(self, identity: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.rest.call("GET", f"/v1/fleet/rollouts/{identity}")
        return found

    def ended(self, identity: str, phase: str) -> Mapping[str, Any]:
        """A rollout once it is in a phase."""

        def found() -> Mapping[str, Any] | None:
            seen = self.rollout(identity)
            return seen if seen["phase"] == phase else None

        made: Mapping[str, Any] = until(found, f"rollout is {phase}, but {self.rollout(identity)}")
        return made


def end(process: subprocess.Popen[bytes]) -> None:
    """End an agent as a service manager does."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(60.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def upgrade_site(folder: Path, *arguments: str, admin_password: str) -> Iterator[UpgradeSite]:
    """A server that is asked for its releases often."""
    data = folder / "data"
    often = ("--set", "releases.check_in_seconds=1", "--set", "releases.hello_seconds=900")
    started = running_server(data, *often, *arguments, prefix=ALONE, admin_password=admin_password)
    with started as server, ExitStack() as stack:
        rest = stack.enter_context(connect(Place(data_dir=data, timeout=SECONDS)))
        site = UpgradeSite(server=server, data=data, folder=folder, key="", stack=stack, rest=rest)
        site.key = site.owner("releases", "key")
        try:
            yield site
        finally:
            server.stop()  # its provider ends the instances with it; a killed one would leave them
