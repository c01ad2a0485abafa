"""Clients that behave as the protocol's first implementation does, its oddities included.

`OriginalAgent` has an Ed25519 identity, speaks TLS 1.3 only, waits one interval before its first
report, never opens the key stream twice, and its process ends at an error on either of the
streams that come down. (It ends at once. The wait of up to nine seconds before the end of a
process whose registration failed is left to whoever starts it again.) `OriginalOperator` calls
any operator method by name. Neither shares code with our own agent: they are what our server is
measured against.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal, Self

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from google.protobuf import message_factory
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from support.shared.h2_grpc import GrpcFailed, H2Channel, connect, tls_context

from fleetplane.gen.fleetplane.instances.v1 import early_pb2
from fleetplane.gen.nstance.v1 import agent_pb2, operator_pb2, registration_pb2

Generation = Literal["first", "second"]

FILES_PAUSE_SECONDS = 2.0
REPORTS_PAUSE_SECONDS = 5.0
REPORTS_QUEUE = 10


class ProcessExit(Exception):
    """The agent's process would end here with code 1."""


def _write(path: Path, content: bytes, mode: int) -> None:
    """As a whole, by rename."""
    staged = path.with_name(path.name + ".new")
    staged.write_bytes(content)
    staged.chmod(mode)
    staged.replace(path)


class OriginalAgent:
    def __init__(
        self,
        identity_dir: Path,
        registration_addr: str,
        agent_addr: str,
        ca: Path | None = None,
        *,
        instance_id: str,
        generation: Generation = "second",
        report_interval: float = 60.0,
        keys_dir: Path | None = None,
        recv_dir: Path | None = None,
        hostname: str = "original",
        ipv4: str = "10.0.0.1",
        ipv6: str = "",
        files_pause: float = FILES_PAUSE_SECONDS,
        reports_pause: float = REPORTS_PAUSE_SECONDS,
    ) -> None:
        """The pauses are the original's; tests may shorten them."""
        self.identity_dir = identity_dir
        self.keys_dir = keys_dir or identity_dir.parent / "keys"
        self.recv_dir = recv_dir or identity_dir.parent / "recv"
        for folder in (self.identity_dir, self.keys_dir, self.recv_dir):
            folder.mkdir(parents=True, exist_ok=True)
        if ca is not None and not (identity_dir / "ca.crt").exists():
            _write(identity_dir / "ca.crt", ca.read_bytes(), 0o600)
        self.instance_id = instance_id
        self.generation = generation
        self.report_interval = report_interval
        self.termination_notice: agent_pb2.TerminationNotice | None = None
        """Set by a test: what the cloud's metadata would say. It travels in the next report."""
        self.patches: list[tuple[dict[str, bytes], str]] = []
        """Every patch that arrived whole: its files and its hash, applied or refused."""
        self.refused: dict[str, str] = {}
        self.key_requests: list[list[str]] = []
        self.reports_sent = 0
        self.reports_dropped = 0
        self.exit_reason: str | None = None
        self.opened: dict[str, int] = {"files": 0, "keys": 0, "reports": 0}
        self.tls_version = ""
        self._registration_addr = registration_addr
        self._agent_addr = agent_addr
        self._hostname, self._ipv4, self._ipv6 = hostname, ipv4, ipv6
        self._pauses = (files_pause, reports_pause)
        self._started = time.time()
        self._count = 0

    # What a test looks at

    @property
    def received_files(self) -> dict[str, bytes]:
        """As they lie in the receive folder."""
        return {
            entry.name: entry.read_bytes()
            for entry in self.recv_dir.iterdir()
            if entry.is_file() and not entry.name.startswith(".") and entry.name != "write-files.last"
        }

    @property
    def config_hash(self) -> str:
        return (self.identity_dir / "config.hash").read_text()

    @property
    def certificate(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate((self.identity_dir / "identity.crt").read_bytes())

    # Start-up

    async def register(self) -> registration_pb2.RegisterClientResponse | None:
        """Load the identity; with a nonce file, trade it for a certificate."""
        self._load_identity()
        nonce_file = self.identity_dir / "nonce.jwt"
        if not nonce_file.exists():
            return None
        request = registration_pb2.RegisterClientRequest(
            registration_nonce_jwt=nonce_file.read_text(),
            public_key_pem=(self.identity_dir / "identity.pub").read_bytes(),
            private_ipv4=self._ipv4,
            private_ipv6=self._ipv6,
            hostname=self._hostname,
        )
        context = tls_context(self.identity_dir / "ca.crt")
        async with connect(self._registration_addr, context) as channel:
            raw = await channel.unary(
                "/nstance.v1.RegistrationService/RegisterAgent", request.SerializeToString()
            )
        answer = registration_pb2.RegisterClientResponse.FromString(raw)
        _write(self.identity_dir / "identity.crt", answer.client_certificate_pem, 0o600)
        nonce_file.unlink()
        return answer

    def _load_identity(self) -> None:
        nonce_file = self.identity_dir / "nonce.jwt"
        if nonce_file.exists():
            payload = nonce_file.read_text().strip().split(".")[1]
            claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
            now = time.time()
            if now >= claims.get("exp", now + 1) or now < max(claims.get("nbf", 0), claims.get("iat", 0)):
                raise ProcessExit("the nonce is not valid now")
            if claims.get("config_hash"):
                _write(self.identity_dir / "config.hash", claims["config_hash"].encode(), 0o600)
        if not (self.identity_dir / "identity.key").exists():
            _write_pair(self.identity_dir, "identity", 0o600)

    # The process

    async def run(self) -> None:
        """Live until an error ends the process, which is raised and kept as `exit_reason`."""
        try:
            await self.register()
            await self._serve()
        except GrpcFailed as error:
            self.exit_reason = str(error)
            raise ProcessExit(self.exit_reason) from error
        except ProcessExit as error:
            self.exit_reason = str(error)
            raise
        except BaseExceptionGroup as group:
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            self.exit_reason = str(first)
            raise ProcessExit(self.exit_reason) from group

    async def _serve(self) -> None:
        async with connect(self._agent_addr, self._context()) as channel, asyncio.TaskGroup() as tasks:
            self.tls_version = channel.tls_version
            tasks.create_task(self._receive_files(channel))
            tasks.create_task(self._receive_keys(channel))
            if self.report_interval > 0:
                tasks.create_task(self._report(channel))

    def _context(self) -> Any:
        return tls_context(
            self.identity_dir / "ca.crt",
            certificate=self.identity_dir / "identity.crt",
            key=self.identity_dir / "identity.key",
        )

    # Files

    async def _receive_files(self, channel: H2Channel) -> None:
        while True:
            stream = await channel.down("/nstance.v1.AgentService/ReceiveFiles", b"")
            self.opened["files"] += 1
            patch: dict[str, bytes] = {}
            async for raw in stream:
                message = agent_pb2.FileTransfer.FromString(raw)
                if message.config_hash:
                    if message.filename or message.content or message.HasField("last_modified"):
                        raise ProcessExit("a commit carries a file")
                    self._take(patch, message.config_hash)
                    patch = {}
                elif not message.filename:
                    raise ProcessExit("a file without a name")
                elif message.filename in patch:
                    raise ProcessExit(f"{message.filename} came twice in one patch")
                else:
                    patch[message.filename] = message.content
            if patch:
                raise ProcessExit("the stream ended in the middle of a patch")
            await asyncio.sleep(self._pauses[0])

    def _take(self, patch: dict[str, bytes], config_hash: str) -> None:
        self.patches.append((patch, config_hash))
        errors = {name: words for name, content in patch.items() if (words := _complaint(name, content))}
        self.refused |= errors
        folder = self.recv_dir / "errors"
        for name, words in errors.items():
            folder.mkdir(exist_ok=True)
            (folder / Path(name).name).write_text(words)
        if errors:
            return
        for name, content in patch.items():
            _write(self.recv_dir / name, content, 0o640)
            (folder / name).unlink(missing_ok=True)
        _write(self.identity_dir / "config.hash", config_hash.encode(), 0o600)
        _write(self.recv_dir / "write-files.last", str(int(time.time() * 1000)).encode(), 0o640)

    # Keys

    async def _receive_keys(self, channel: H2Channel) -> None:
        """Once. A clean end is final until the process starts again."""
        stream = await channel.down("/nstance.v1.AgentService/ReceiveKeyRequests", b"")
        self.opened["keys"] += 1
        async for raw in stream:
            names = list(agent_pb2.KeyGenerationRequest.FromString(raw).key_names)
            self.key_requests.append(names)
            with contextlib.suppress(GrpcFailed, ValueError):  # the original logs it and goes on
                await self._submit(channel, names)

    async def _submit(self, channel: H2Channel, names: list[str]) -> None:
        keys = []
        for name in names:
            if name != Path(name).name or name in ("", ".", ".."):
                raise ValueError(f"{name!r} is no base name")
            if not (self.keys_dir / f"{name}.key").exists():
                _write_pair(self.keys_dir, name, 0o640)
            public = serialization.load_pem_public_key((self.keys_dir / f"{name}.pub").read_bytes())
            der = public.public_bytes(
                serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            keys.append(
                agent_pb2.PublicKeySubmission(filename=name, public_key_pem=base64.standard_b64encode(der))
            )
        request = agent_pb2.PublicKeysRequest(instance_id=self.instance_id, keys=keys)
        await channel.unary("/nstance.v1.AgentService/SubmitPublicKeys", request.SerializeToString())

    # Health

    async def _report(self, channel: H2Channel) -> None:
        """A maker and a sender with a queue of ten between them; only the sender minds the stream."""
        queue: asyncio.Queue[bytes] = asyncio.Queue(REPORTS_QUEUE)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._make_reports(queue))
            tasks.create_task(self._send_reports(channel, queue))

    async def _make_reports(self, queue: asyncio.Queue[bytes]) -> None:
        while True:
            await asyncio.sleep(self.report_interval)
            try:
                report = self.build_report()
            except FileNotFoundError:
                continue  # no config.hash: the original cannot build a report, and says so in its log
            if queue.full():
                self.reports_dropped += 1
            else:
                queue.put_nowait(report)

    async def _send_reports(self, channel: H2Channel, queue: asyncio.Queue[bytes]) -> None:
        while True:
            with contextlib.suppress(GrpcFailed):
                stream = channel.open("/nstance.v1.AgentService/SubmitHealthReport")
                self.opened["reports"] += 1
                while not stream.ended.is_set():
                    report = await _next(queue, stream.ended)
                    if report is not None:
                        await stream.send(report)
                        self.reports_sent += 1
                stream.check()
            await asyncio.sleep(self._pauses[1])

    def build_report(self) -> bytes:
        """One report in the chosen generation's layout."""
        self._count += 1
        uptime = f"{int(time.time() - self._started) + 60}s"
        common: dict[str, Any] = {
            "instance_id": self.instance_id,
            "count": self._count,
            "uptime": uptime,
            "files": self._file_statuses(),
            "termination_notice": self.termination_notice,
            "config_hash": self.config_hash,
        }
        if self.generation == "first":
            metrics = early_pb2.EarlyMetrics(
                cpu_usage=12.5,
                cpu_core_usage=[10.0, 15.0],
                memory_usage=40.0,
                network_bytes_sent=1000.0,
                network_bytes_received=2000.0,
                disk_used=55.0,
                disk_inodes_used=10.0,
            )
            early = early_pb2.EarlyHealthReport(
                version="v1.0.0", one_minute=metrics, five_minutes=metrics, fifteen_minutes=metrics, **common
            )
            for field in (early.timestamp, early.window_end):
                field.GetCurrentTime()
            for field in (early.started, early.window_start):
                field.FromSeconds(int(self._started))
            return early.SerializeToString()
        report = agent_pb2.HealthReportRequest(version="v2.0.0", **common)
        report.timestamp.GetCurrentTime()
        report.metrics.cpu_usage = 12.5
        report.metrics.cpu_core_usage.extend([10.0, 15.0])
        report.metrics.memory_usage = 40.0
        return report.SerializeToString()

    def _file_statuses(self) -> dict[str, agent_pb2.FileStatus]:
        statuses: dict[str, agent_pb2.FileStatus] = {}
        for name in self.received_files:
            status = agent_pb2.FileStatus()
            status.last_modified.FromNanoseconds((self.recv_dir / name).stat().st_mtime_ns)
            statuses[name] = status
        errors = self.recv_dir / "errors"
        for entry in errors.iterdir() if errors.is_dir() else ():
            statuses[entry.name] = agent_pb2.FileStatus(error=entry.read_text())
        return statuses


async def _next(queue: asyncio.Queue[bytes], ended: asyncio.Event) -> bytes | None:
    """The next report, or None when the stream ended before there was one."""
    getting, ending = asyncio.ensure_future(queue.get()), asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait({getting, ending}, return_when=asyncio.FIRST_COMPLETED)
        return getting.result() if getting.done() else None
    finally:
        getting.cancel()
        ending.cancel()


def _write_pair(folder: Path, name: str, mode: int) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    _write(folder / f"{name}.pub", public, mode)
    _write(folder / f"{name}.key", private, mode)


def _complaint(name: str, content: bytes) -> str | None:
    if name != Path(name).name or name.startswith(".") or name == "write-files.last":
        return "invalid filename"
    blocks = {".crt": b"CERTIFICATE", ".pub": b"PUBLIC KEY", ".key": b"PRIVATE KEY"}
    suffix = Path(name).suffix
    if suffix == ".env":
        lines = (line.strip() for line in content.decode().splitlines())
        bad = [x for x in lines if x and not x.startswith("#") and not re.match(r"^[A-Z0-9_]+=", x)]
        return f"invalid line {bad[0]!r}" if bad else None
    if suffix == ".json":
        try:
            json.loads(content)
        except ValueError as error:
            return str(error)
        return None
    if suffix in blocks:
        return None if b"-----BEGIN " + blocks[suffix] + b"-----" in content else f"no {suffix} in PEM"
    return f"unsupported file type {suffix!r}"


class OriginalOperator:
    """An operator with an Ed25519 identity in a folder: ca.crt, identity.key, identity.crt.

    async with OriginalOperator(folder, address) as operator:
        groups = await operator.call("ListGroups", Empty())
        async for event in operator.watch("WatchGroups"): ...
    """

    def __init__(self, identity_dir: Path, operator_addr: str) -> None:
        self.identity_dir = identity_dir
        self._address = operator_addr
        self._stack = contextlib.AsyncExitStack()
        self._channel: H2Channel | None = None

    @classmethod
    async def register(
        cls, identity_dir: Path, registration_addr: str, nonce: str
    ) -> registration_pb2.RegisterClientResponse:
        """Trade an operator's nonce for a certificate in the folder; its key is made if it has none."""
        if not (identity_dir / "identity.key").exists():
            _write_pair(identity_dir, "identity", 0o600)
        request = registration_pb2.RegisterClientRequest(
            registration_nonce_jwt=nonce, public_key_pem=(identity_dir / "identity.pub").read_bytes()
        )
        async with connect(registration_addr, tls_context(identity_dir / "ca.crt")) as channel:
            raw = await channel.unary(
                "/nstance.v1.RegistrationService/RegisterOperator", request.SerializeToString()
            )
        answer = registration_pb2.RegisterClientResponse.FromString(raw)
        _write(identity_dir / "identity.crt", answer.client_certificate_pem, 0o600)
        return answer

    async def __aenter__(self) -> Self:
        context = tls_context(
            self.identity_dir / "ca.crt",
            certificate=self.identity_dir / "identity.crt",
            key=self.identity_dir / "identity.key",
        )
        self._channel = await self._stack.enter_async_context(connect(self._address, context))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def call(self, method: str, request: Message | None = None) -> Any:
        """Any unary method by its name; the answer in its own type, a bad status as GrpcFailed."""
        assert self._channel is not None
        path, answer = _operator_method(method)
        raw = await self._channel.unary(path, (request or Empty()).SerializeToString())
        return answer.FromString(raw)

    async def watch(self, method: str) -> AsyncIterator[Any]:
        """Any server stream by its name, until it ends; leaving early cancels it."""
        assert self._channel is not None
        path, answer = _operator_method(method)
        stream = await self._channel.down(path, b"")
        try:
            async for raw in stream:
                yield answer.FromString(raw)
        finally:
            stream.cancel()


def _operator_method(name: str) -> tuple[str, type[Message]]:
    service = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"]
    method = service.methods_by_name[name]
    return f"/{service.full_name}/{name}", message_factory.GetMessageClass(method.output_type)
