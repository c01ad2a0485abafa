"""Many simulated boards as a process of their own: each with a key, a certificate, a port and a connection.

`python -m bench.boards_nodes PLAN` reads where the server is and a join token for each board. Boards
register one after the other over TLS, listen, and report their health and metrics over a connection with
their certificate. Orders come as lines of JSON on standard input, answers go to standard output:

    {"rate": 20}     lines of log a second, each board, from now on; with "of": 9 only the first nine boards
    {"count": true}  what was made, sent, dropped, waits; reports and the seconds that the last took
    {"anew": true}   forget all lines, and count from the beginning
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from bench.boards_node import Logs, Node, Serving, measured
from bench.servers import ROOT
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi

sys.path.insert(0, str(ROOT / "tests"))

from support.shared.h2_grpc import connect, tls_context

COMERS: Final = 16
"""Boards that are registering at any moment."""
TICK_SECONDS: Final = 0.25
"""How often lines are made; a journal is read in such gulps too."""
REGISTER, REPORT = "/ControlPlane/RegisterNode", "/ControlPlane/ReportHealth"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    folder: Path
    server: str
    tokens: Sequence[str]
    first: int
    """The number of the first board in names and addresses."""
    report_seconds: float


@dataclass(slots=True, kw_only=True)
class Board:
    index: int
    token: str
    folder: Path
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    number: int = 0
    node: Node = field(init=False)
    reports: int = 0
    port: int = 0
    serving: ssl.SSLContext = field(init=False)
    """Complete once it is registered: before, it must say its port, and nobody calls."""

    def __post_init__(self) -> None:
        self.node = Node(f"board-{self.index}")
        self.serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.serving.minimum_version = ssl.TLSVersion.TLSv1_3
        self.serving.set_alpn_protocols(["h2"])
        self.serving.verify_mode = ssl.CERT_REQUIRED
        self.serving.load_verify_locations(self.folder / "ca.crt")

    @property
    def address(self) -> str:
        """Many: the server limits registrations by address."""
        return f"127.0.{1 + self.index // 250}.{1 + self.index % 250}"

    @property
    def credentials(self) -> Path:
        return self.folder / f"{self.index}.pem"


class Fleet:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ca = plan.folder / "ca.crt"
        self._turns = asyncio.Semaphore(COMERS)
        self._rates = [0.0] * len(plan.tokens)
        self.boards = [
            Board(index=plan.first + offset, token=token, folder=plan.folder)
            for offset, token in enumerate(plan.tokens)
        ]
        self._slowest_report = 0.0

    # Coming.

    async def come(self) -> float:
        """Everyone registers; the seconds that took."""
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for board in self.boards:
                tasks.create_task(self._join(board))
        return time.perf_counter() - begun

    async def _join(self, board: Board) -> None:
        async with self._turns:
            listening = await asyncio.get_running_loop().create_server(
                lambda: Serving(board.node), board.address, 0, ssl=board.serving
            )
            board.port = listening.sockets[0].getsockname()[1]
            number = f"{board.index:04x}"
            request = pb.NodeRegistration(
                name=board.node.name,
                join_token=board.token,
                csr_pem=_csr(board.key),
                agent_port=board.port,
                ip_address=board.address,
                mac_address=f"02:00:00:00:{number[:2]}:{number[2:]}",
                serial_number=f"s{board.index}",
                architecture="arm64",
                model="Raspberry Pi 4 Model B",
                cpu_cores=4,
                memory=4 << 30,
            )
            async with connect(self._plan.server, tls_context(self._ca), source=board.address) as channel:
                raw = await channel.unary(REGISTER, request.SerializeToString())
        answer = pb.RegistrationResponse.FromString(raw)
        board.number = answer.node_id
        private = board.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        board.credentials.write_bytes(answer.certificate_pem.encode() + private)
        board.serving.load_cert_chain(board.credentials)

    # Living.

    async def live(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._log())
            for board in self.boards:
                tasks.create_task(self._report(board))

    async def _log(self) -> None:
        """Each board at its own moment of the tick."""
        last = [time.perf_counter()] * len(self.boards)
        while True:
            began = time.perf_counter()
            for index, board in enumerate(self.boards):
                now = time.perf_counter()
                board.node.tick(self._rates[index] * (now - last[index]))
                last[index] = now
                await asyncio.sleep(0)
            await asyncio.sleep(max(0.0, began + TICK_SECONDS - time.perf_counter()))

    async def _report(self, board: Board) -> None:
        context = tls_context(self._ca, certificate=board.credentials)
        interval = self._plan.report_seconds
        async with contextlib.AsyncExitStack() as stack:
            async with self._turns:
                connection = connect(self._plan.server, context, source=board.address)
                channel = await stack.enter_async_context(connection)
            next_at = time.perf_counter() + board.index % 100 / 100 * interval
            while True:
                await asyncio.sleep(max(0.0, next_at - time.perf_counter()))
                begun = time.perf_counter()
                await channel.unary(REPORT, _health(board))
                self._slowest_report = max(self._slowest_report, time.perf_counter() - begun)
                next_at += interval

    # Orders.

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if "rate" in order:
            changed = order.get("of", len(self.boards))
            self._rates[:changed] = [float(order["rate"])] * changed
        if "anew" in order:
            for board in self.boards:
                board.node.logs = Logs(board.node.name)
        logs = [board.node.logs for board in self.boards]
        slowest, self._slowest_report = self._slowest_report, 0.0
        return {
            "made": sum(one.made for one in logs),
            "sent": sum(one.sent for one in logs),
            "dropped": sum(one.dropped for one in logs),
            "waiting": sum(one.waiting for one in logs),
            "followed": sum(bool(board.node.streams) for board in self.boards),
            "reports": sum(board.reports for board in self.boards),
            "calls": sum(board.node.calls for board in self.boards),
            "slowest_report_seconds": slowest,
            "cpu_seconds": time.process_time(),
        }


def _health(board: Board) -> bytes:
    board.reports += 1
    report = pb.HealthReport(
        source="agent",
        status=pi.NODE_STATUS_READY,
        version="1.0",
        uptime="1d",
        sequence=board.reports,
        metrics=measured(),
    )
    report.timestamp.GetCurrentTime()
    for name in ("gpio", "metrics", "logs", "disk"):
        report.checks.add(name=name, status="OK")
    return report.SerializeToString()


def _csr(key: ec.EllipticCurvePrivateKey) -> str:
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


async def orders() -> AsyncIterator[dict[str, Any]]:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        yield json.loads(line)


async def main(plan: Plan) -> None:
    fleet = Fleet(plan)
    took = await fleet.come()
    tell({"took": took, "boards": [(board.number, board.address, board.port) for board in fleet.boards]})
    living = asyncio.create_task(fleet.live())
    try:
        async for order in orders():
            if living.done():
                living.result()
            tell(await fleet.obey(order))
    finally:
        living.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await living


def tell(said: dict[str, Any]) -> None:
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    read = json.loads(Path(sys.argv[1]).read_text())
    uvloop.run(main(Plan(**{**read, "folder": Path(read["folder"])})))
