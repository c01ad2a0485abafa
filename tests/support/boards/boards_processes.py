"""A boards server and board agents as processes of their own, handled as people handle them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.boards.boards_rig import BoardKey
from support.shared.h2_grpc import connect
from support.shared.server_process import ServerProcess, running_server

from fleetplane.domains.boards.joining.credentials import host_of
from fleetplane.gen.boards import boards_pb2 as pb

BIN = Path(sys.executable).parent
DEADLINE_SECONDS = 60.0
STOP_SECONDS = 60.0


def until(condition: Callable[[], Any], what: str, *, seconds: float = DEADLINE_SECONDS) -> Any:
    """What the condition comes to, once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}"
        time.sleep(0.05)
    return found


def fleetplane(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(BIN / "fleetplane"), *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    number: int
    key: bytes = field(repr=False)
    certificate: bytes
    trust: bytes

    def channel(self, address: str) -> grpc.Channel:
        own = grpc.ssl_channel_credentials(self.trust, self.key, self.certificate)
        return grpc.secure_channel(address, own)


@dataclass(slots=True, kw_only=True)
class Place:
    """A server that runs boards, and nothing else."""

    server: ServerProcess
    data: Path
    folder: Path
    token: str = field(repr=False)
    """An administrator's."""

    @property
    def address(self) -> str:
        return self.server.address("boards", "https").removeprefix("https://")

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """One request to `/api/v1`; an empty token sends none."""
        token = self.token if token is None else token
        sent = {"content-type": "application/json", **(headers or {})}
        if token:
            sent["authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.server.web}/api/v1{path}", data=data, method=method, headers=sent
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:
                return Reply(status=answer.status, headers=dict(answer.headers), raw=answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(status=error.code, headers=dict(error.headers), raw=error.read())

    def did(self, method: str, path: str, body: Any = None) -> Any:
        """What an administrator is answered; fails the test if that is a refusal."""
        reply = self.ask(method, path, body)
        assert reply.status < 300, (method, path, reply.status, reply.raw)
        return reply.json if reply.raw else None

    def role(self, role: str) -> str:
        """A token of somebody with that role."""
        made = fleetplane("tokens", "create", role, "--role", role, "--data-dir", str(self.data))
        return made.stdout.strip()

    def node(self, number: int) -> Any:
        return self.did("GET", f"/nodes/{number}")["data"]

    def join_token(self, **wanted: Any) -> str:
        token: str = self.did("POST", "/join-tokens", wanted)["token"]
        return token

    # Boards, and others with certificates.

    def register(self, request: pb.NodeRegistration) -> pb.RegistrationResponse:
        """As anyone may call it; whom we talk to is of no matter here."""
        return asyncio.run(self._register(request))

    async def _register(self, request: pb.NodeRegistration) -> pb.RegistrationResponse:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        async with connect(self.address, context) as channel:
            raw = await channel.unary("/ControlPlane/RegisterNode", request.SerializeToString())
        return pb.RegistrationResponse.FromString(raw)

    def certified(self, name: str, *, purpose: str = "controller") -> Certified:
        """Another server, or a board that is nothing but a certificate."""
        key = BoardKey()
        token = self.join_token(name=name, purpose=purpose)
        said = pb.NodeRegistration(name=name, join_token=token, csr_pem=key.csr)
        answer = self.register(said)
        assert answer.success, answer
        return Certified(
            number=answer.node_id,
            key=key.pem,
            certificate=answer.certificate_pem.encode(),
            trust=answer.ca_certificate_pem.encode(),
        )

    @contextmanager
    def board(
        self, name: str, *, config: str = "", arguments: tuple[str, ...] = ()
    ) -> Iterator[BoardProcess]:
        """A simulated board that has joined, and is ready."""
        state = self.folder / f"board-{name}"
        fleetplane(
            "agent",
            "board",
            "join",
            self.join_token(name=name),
            "--server",
            self.address,
            "--state-dir",
            str(state),
            "--name",
            name,
            "--simulate",
        )
        number = json.loads((state / "membership.json").read_text())["node_id"]
        made = BoardProcess(place=self, name=name, number=number, state=state, arguments=arguments)
        if config:
            made.config.write_text(config)
        made.start()
        try:
            made.ready()
            yield made
        finally:
            made.stop(signal.SIGKILL)


@dataclass(slots=True, kw_only=True)
class BoardProcess:
    place: Place
    name: str
    number: int
    state: Path
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def config(self) -> Path:
        return self.state.with_suffix(".toml")

    @property
    def log(self) -> Path:
        return self.state.with_suffix(".log")

    def start(self) -> None:
        config = ("--config", str(self.config)) if self.config.exists() else ()
        command = [
            str(BIN / "fleetplane"),
            "agent",
            "board",
            "run",
            "--state-dir",
            str(self.state),
            "--name",
            self.name,
            "--simulate",
            "--address",
            "127.0.0.1",
            "--port",
            "0",
            *config,
            *self.arguments,
        ]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=dict(os.environ))

    def ready(self) -> None:
        """The server knows where it listens now."""

        def is_ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            shown, port = self.place.node(self.number), self.listens().rpartition(":")[2]
            return shown["status"] == "ready" and str(shown["agent"]["port"]) == port

        until(is_ready, f"{self.name} is ready: {self.log.read_text()[-2000:]}")

    def listens(self, listener: str = "node") -> str:
        """Where, as it says itself; nothing while it does not."""
        try:
            said = json.loads((self.state / "running.json").read_text())
        except FileNotFoundError:
            return ""
        return str(said["listeners"].get(listener, [""])[0]).rpartition("//")[2]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(STOP_SECONDS)

    def audited(self) -> list[dict[str, Any]]:
        """What it wrote down itself."""
        return [json.loads(line) for line in (self.state / "audit.jsonl").read_text().splitlines()]

    def channel(self, caller: Certified | None) -> grpc.Channel:
        """Straight to it, past the server."""
        named = (("grpc.ssl_target_name_override", host_of(self.number)),)
        trust = (self.state / "ca.crt").read_bytes()
        own = (caller.key, caller.certificate) if caller is not None else (None, None)
        return grpc.secure_channel(self.listens(), grpc.ssl_channel_credentials(trust, *own), options=named)


@contextmanager
def boards_place(folder: Path, *arguments: str) -> Iterator[Place]:
    data = folder / "data"
    with running_server(data, "--only", "boards", *arguments) as server:
        made = fleetplane("tokens", "create", "boss", "--role", "boards.admin", "--data-dir", str(data))
        yield Place(server=server, data=data, folder=folder, token=made.stdout.strip())


def config_of(folder: Path) -> str:
    """A board whose owner allows a few programs and one log file, and wants pins safe when alone."""
    (folder / "app.log").touch()
    return f"""
[report]
loss_after_seconds = 1
[gpio]
driver = "simulated"
safe_state = "low"
[[gpio.pins]]
pin = 26
safe_state = "low"
safe_on_loss = true
[logs.files]
app = "{folder}/app.log"
[commands]
run_as = "{"nobody" if os.geteuid() == 0 else ""}"
[[commands.profiles]]
name = "few"
rules = [
    {{ program = "/bin/echo", forms = [[".*"]] }},
    {{ program = "/bin/sleep", forms = [["[0-9.]+"]] }},
    {{ program = "/usr/bin/head", forms = [["-c", "[0-9]+", "/dev/zero"]] }},
]
"""


@contextmanager
def refused(*codes: grpc.StatusCode) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert caught.value.code() in codes, caught.value
