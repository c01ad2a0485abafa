"""`fleetplane demo`: a server with something of every fleet to see in it, ended together.

Four simulated GPUs, a group of two instances that are real agents on this computer, two real NGINX that
serve one virtual host, an edge daemon that runs commands on this computer, and a simulated board. What they
log goes to `run.log` in the data directory; with `-v` to the terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import click

from fleetplane import environment
from fleetplane.cli.demo.children import Children
from fleetplane.cli.output import say
from fleetplane.client.local import DATA_DIR, VARIABLE

READY_SECONDS = 60.0
LOOK_SECONDS = 0.1
TAIL_LINES = 5
EXAMPLE = Path(__file__).with_name("local.jsonc")
"""The group of instances that it begins with."""


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where everything is kept, from one time to the next.  "
    "[env var: FLEETPLANE_DATA_DIR; default: ./fleetplane-data]",
)
@click.option("-v", "--verbose", is_flag=True, help="Show what everything logs, instead of in run.log.")
def demo(data_dir: Path | None, verbose: bool) -> None:
    """Start a server with something of every fleet to see in it, and end everything together.

    Four simulated GPUs, two instances, two NGINX (if it is installed), an edge daemon and a simulated board,
    all on this computer. Ctrl-C ends them; the next time the same ones come back.
    """
    os.umask(0o077)  # the data directory is for its owner alone
    given = data_dir or Path(environment.current().get(VARIABLE, "") or DATA_DIR)
    given.mkdir(parents=True, exist_ok=True)
    with _log(given, verbose) as log:
        raise click.exceptions.Exit(asyncio.run(_run(given, log, verbose=verbose)))


@contextlib.contextmanager
def _log(data: Path, verbose: bool) -> Iterator[IO[bytes]]:
    """Where children write: a file of its own each time, or the terminal."""
    if verbose:
        yield sys.stderr.buffer
        return
    file = data / "run.log"
    if file.exists():
        file.replace(file.with_name("run.log.1"))
    with file.open("wb") as opened:
        yield opened


async def _run(data: Path, log: IO[bytes], *, verbose: bool) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    children = Children(log, environment.current())
    show = Demonstration(data, children, verbose=verbose)
    working = asyncio.ensure_future(show.play())
    waiting = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.is_set():
            say("Stopping; instances end with the server.")
            return 0
        return working.result()
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
        await children.stop()
        show.close()


class Demonstration:
    """What is started, in order, and what is told about it."""

    def __init__(self, data: Path, children: Children, *, verbose: bool) -> None:
        self._data = data
        self._children = children
        self._verbose = verbose
        self._ready = data / "ready.json"
        self._backend: asyncio.Server | None = None
        self._ports: Sequence[int] = ()

    def close(self) -> None:
        """Leave nothing behind that would say that a server is ready."""
        self._ready.unlink(missing_ok=True)
        if self._backend is not None:
            self._backend.close()

    async def play(self) -> int:
        """Until the server ends; its exit code."""
        data = self._data
        config = data / "objects" / "shard" / "local" / "config.jsonc"
        if not config.exists():
            config.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(EXAMPLE, config)
        password = data / "admin-password"
        if not password.exists():
            password.write_text(secrets.token_urlsafe(18) + "\n")
        _step("starting the server")
        self._ready.unlink(missing_ok=True)
        server = await self._children.start(
            [
                *("server", "--data-dir", str(data), "--ready-file", str(self._ready)),
                *("--set", "instances.advertise=listeners"),
                *("--set", f"proxies.admin_password_file={password}"),
            ]
        )
        listeners = await self._listeners(server)
        if listeners is None:
            return await self._failed(server)
        _step("the server is ready; starting agents: GPUs, NGINX, an edge daemon, a board")
        await self._agents(listeners, password.read_text().strip())
        self._tell(listeners, password, await self._link(listeners))
        return await server.wait()

    async def _listeners(self, server: asyncio.subprocess.Process) -> Mapping[str, Sequence[str]] | None:
        """What the server listens at; None if it ended, or was not ready in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_SECONDS):
                while server.returncode is None:
                    if self._ready.exists() and (text := self._ready.read_text()):
                        found: dict[str, Any] = json.loads(text)["listeners"]
                        return found
                    await asyncio.sleep(LOOK_SECONDS)
        return None

    async def _failed(self, server: asyncio.subprocess.Process) -> int:
        log = self._data / "run.log"
        if server.returncode is None:
            _step(f"the server did not become ready in {READY_SECONDS:g} s; see {log}")
            return 1
        if not self._verbose:
            for line in log.read_text(errors="replace").splitlines()[-TAIL_LINES:]:
                say(line)
        return server.returncode

    async def _agents(self, listeners: Mapping[str, Sequence[str]], password: str) -> None:
        # The Unix socket if there is one: TCP is for reading.
        address = min(listeners["device-api"], key=lambda one: not one.startswith("unix:"))
        await self._children.start(
            ["agent", "gpu", "--simulate", "4", "--address", address.removeprefix("http://")]
        )
        await self._proxies(listeners, password)
        await self._edge_daemon()
        await self._board(listeners["boards"][0].removeprefix("https://"))

    async def _proxies(self, listeners: Mapping[str, Sequence[str]], password: str) -> None:
        import httpx

        from fleetplane.cli.demo import proxies

        if not proxies.has_nginx():
            _step("install NGINX to see two proxies here too")
            return
        folder = self._data / "proxies"
        self._backend = await asyncio.start_server(proxies.answer, "127.0.0.1", 0)
        backend = f"127.0.0.1:{self._backend.sockets[0].getsockname()[1]}"
        try:
            starting, ports = await asyncio.to_thread(proxies.commands, listeners, password, folder, backend)
        except (OSError, httpx.HTTPError) as error:
            _step(f"no proxies: they could not be set up: {error}")
            return
        for words in starting:
            await self._children.start(words)
        self._ports = ports

    async def _edge_daemon(self) -> None:
        """Enrolled anew at each start, as the same node: the server may listen elsewhere than before."""
        place = ("--data-dir", str(self._data))
        folder = self._data / "edge"
        state = {
            "FLEETPLANE_EDGE_AGENT_STATE_DIR": str(folder),
            "FLEETPLANE_EDGE_AGENT_USER_CONFIG": str(folder / "user.yaml"),
        }
        token = await self._children.ask(["edge", "token", "--node", "here", "--replace", *place])
        token = token or await self._children.ask(["edge", "token", "--name", "here", *place])
        enrol = ["agent", "edge", "enroll", "--force", "-"]
        if not token or await self._children.ask(enrol, given=f"{token}\n", **state) is None:
            _step("no edge daemon: it could not be enrolled")
            return
        await self._children.start(["agent", "edge", "run", "--log-level", "warning"], **state)

    async def _board(self, server: str) -> None:
        """So is the board: same folder, same key, same board."""
        state = {
            "FLEETPLANE_BOARD_AGENT_STATE_DIR": str(self._data / "board"),
            "FLEETPLANE_BOARD_AGENT_NAME": "demo",
        }
        token = await self._children.ask(
            ["boards", "join-token", "create", "--name", "demo", "--data-dir", str(self._data)]
        )
        join = ["agent", "board", "join", "--replace", "--simulate", "--server", server, "-"]
        if not token or await self._children.ask(join, given=f"{token}\n", **state) is None:
            _step("no board: it could not join")
            return
        serve = ("--address", "127.0.0.1", "--port", "0", "--log-level", "warning")
        await self._children.start(["agent", "board", "run", "--simulate", *serve], **state)

    async def _link(self, listeners: Mapping[str, Sequence[str]]) -> str:
        found = await self._children.ask(["open", "--data-dir", str(self._data)])
        return found or f"{listeners['web'][0]}/ui/"

    def _tell(self, listeners: Mapping[str, Sequence[str]], password: Path, link: str) -> None:
        where = "" if self._data.absolute() == DATA_DIR.absolute() else f" --data-dir {self._data}"
        click.echo(
            guidance(
                program(), where, web=listeners["web"][0], link=link, password=password, ports=self._ports
            )
        )
        if not self._verbose:
            click.echo(f"What they log: {self._data / 'run.log'} (-v shows it here).")
        click.echo("Ctrl-C ends everything, the instances included.")


def guidance(command: str, where: str, *, web: str, link: str, password: Path, ports: Sequence[int]) -> str:
    """What to look at, and what to try, as it can be copied. Pure."""
    served = [f"  curl -H 'Host: demo.localhost' http://127.0.0.1:{port}/" for port in ports]
    tries = (
        f"kinds{where}",
        f"get gpus,instances,boards,edge-nodes{where}",
        f"top --once{where}",
        f"watch gpus,instances{where}",
        f"instances scale workers 3 --wait{where}",
        f"run --on edge-nodes{where} -- uname -a",
        f"boards gpio add demo:17 --direction output{where}",
        f"boards gpio write demo:17 high{where}",
        f"audit verify{where}",
    )
    return "\n".join(
        [
            "",
            "Fleetplane runs. In a browser, signed in, once and within an hour:",
            f"  {link}",
            f"  {web}/ui/   every fleet; another link that signs in: {command} open{where}",
            f"  {web}/docs  the API of proxies, as admin@fleetplane.local, with the password in {password}",
            "In another terminal:",
            *(f"  {command} {one}" for one in tries),
            *served,
        ]
    )


def program() -> str:
    """How this program is called from here: by its name if that finds it, else by its path."""
    own = Path(sys.executable).with_name("fleetplane")
    found = shutil.which("fleetplane")
    if found is not None and Path(found).resolve() == own.resolve():
        return "fleetplane"
    here = Path.cwd()
    return str(own.relative_to(here)) if own.is_relative_to(here) else str(own)


def _step(words: str) -> None:
    say(f"demo: {words}")
