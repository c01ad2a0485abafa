"""Registrations per second, and what two thousand reporting agents cost one server process.

Every agent is played to the byte: a key of its own, a TLS 1.3 connection of its own, one registration;
then another connection with its certificate, the streams for keys and files, and a report every
two seconds. They come from many loopback addresses, because the server limits registrations per address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from bench import servers
from bench.figures import Effort, Row, alone
from bench.servers import Server
from fleetplane.gen.nstance.v1 import agent_pb2, registration_pb2

sys.path.insert(0, str(servers.ROOT / "tests"))

AGENTS = 2_000
REPORT_SECONDS = 2.0
COMERS = 32
"""Agents that are registering at any moment."""
SETTLE_SECONDS = 6.0
MEASURED_SECONDS = 20.0
ADDRESSES = 250
MUST_REGISTER = 100.0
MUST_CORE = 0.5
REGISTER = "/nstance.v1.RegistrationService/RegisterAgent"
SERVICE = "/nstance.v1.AgentService"


@dataclass(slots=True)
class Agent:
    name: str
    nonce: str
    number: int
    folder: Path
    key: ed25519.Ed25519PrivateKey
    config_hash: str = ""
    files: tuple[str, ...] = ()
    sent: int = 0

    @property
    def source(self) -> str:
        return f"127.0.0.{2 + self.number % ADDRESSES}"


def _agents(nonces: dict[str, str], folder: Path) -> list[Agent]:
    return [
        Agent(name=name, nonce=nonce, number=number, folder=folder, key=ed25519.Ed25519PrivateKey.generate())
        for number, (name, nonce) in enumerate(sorted(nonces.items()))
    ]


@contextlib.asynccontextmanager
async def _connected(address: str, context: ssl.SSLContext, source: str) -> Any:
    from support.shared.h2_grpc import H2Channel

    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(
        host, int(port), ssl=context, server_hostname=host, local_addr=(source, 0)
    )
    channel = H2Channel(address, reader, writer)
    reading = asyncio.create_task(channel.read_forever())
    try:
        yield channel
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        writer.close()


async def _register(agents: Sequence[Agent], address: str, ca: Path) -> float:
    """Everyone once; returns the seconds it took."""
    from support.shared.h2_grpc import tls_context

    context = tls_context(ca)
    turns = asyncio.Semaphore(COMERS)

    async def one(agent: Agent) -> None:
        public = agent.key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        request = registration_pb2.RegisterClientRequest(
            registration_nonce_jwt=agent.nonce, public_key_pem=public, hostname=agent.name
        )
        async with turns, _connected(address, context, agent.source) as channel:
            raw = await channel.unary(REGISTER, request.SerializeToString())
        answer = registration_pb2.RegisterClientResponse.FromString(raw)
        private = agent.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (agent.folder / f"{agent.name}.pem").write_bytes(answer.client_certificate_pem + private)

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for agent in agents:
            tasks.create_task(one(agent))
    return time.perf_counter() - begun


async def _live(agent: Agent, address: str, ca: Path, opening: asyncio.Semaphore) -> None:
    """Until cancelled."""
    from support.shared.h2_grpc import tls_context

    async with contextlib.AsyncExitStack() as stack:
        async with opening:
            context = tls_context(ca, certificate=agent.folder / f"{agent.name}.pem")
            channel = await stack.enter_async_context(_connected(address, context, agent.source))
            files = await channel.down(f"{SERVICE}/ReceiveFiles", b"")
            await channel.down(f"{SERVICE}/ReceiveKeyRequests", b"")
            await _hold(agent, files)
        reports = channel.open(f"{SERVICE}/SubmitHealthReport")
        next_at = time.perf_counter() + agent.number % 200 / 200 * REPORT_SECONDS
        while not reports.ended.is_set():
            await asyncio.sleep(max(0.0, next_at - time.perf_counter()))
            await reports.send(_report(agent))
            next_at += REPORT_SECONDS
        reports.check()
        raise RuntimeError("the server ended a report stream")


async def _hold(agent: Agent, files: Any) -> None:
    """Take the first patch, so that there is nothing left to send."""
    names = []
    async for raw in files:
        message = agent_pb2.FileTransfer.FromString(raw)
        if message.config_hash:
            agent.config_hash = message.config_hash
            break
        names.append(message.filename)
    agent.files = tuple(names)


def _report(agent: Agent) -> bytes:
    agent.sent += 1
    report = agent_pb2.HealthReportRequest(
        version="v2.0.0",
        instance_id=agent.name,
        count=agent.sent,
        uptime="60s",
        config_hash=agent.config_hash,
    )
    report.timestamp.GetCurrentTime()
    report.metrics.cpu_usage = 12.5
    report.metrics.cpu_core_usage.extend([10.0, 15.0])
    report.metrics.memory_usage = 40.0
    for name in agent.files:
        report.files[name].last_modified.GetCurrentTime()
    return report.SerializeToString()


async def _reporting(
    agents: Sequence[Agent], address: str, ca: Path, server: Server, seconds: float
) -> tuple[float, float, float]:
    """The server's share of a core, ours, and reports per second, once everyone is there."""
    opening = asyncio.Semaphore(COMERS)
    async with asyncio.TaskGroup() as tasks:
        living = [tasks.create_task(_live(agent, address, ca, opening)) for agent in agents]
        while not all(agent.sent for agent in agents):  # noqa: ASYNC110  # two thousand would have to tell
            await asyncio.sleep(0.1)
        await asyncio.sleep(min(seconds, SETTLE_SECONDS))
        begun, used, own = time.perf_counter(), server.cpu_seconds(), time.process_time()
        before = sum(agent.sent for agent in agents)
        await asyncio.sleep(seconds)
        elapsed = time.perf_counter() - begun
        shares = ((server.cpu_seconds() - used) / elapsed, (time.process_time() - own) / elapsed)
        rate = (sum(agent.sent for agent in agents) - before) / elapsed
        for task in living:
            task.cancel()
    return *shares, rate


@contextlib.contextmanager
def _server(directory: Path, core: int, agents: int) -> Iterator[tuple[Server, dict[str, Any]]]:
    ready = directory / "instances.ready"
    command = [sys.executable, "-m", "bench.instances_server", str(ready), str(agents)]
    with servers._running("instances", command, ready, core, seconds=120.0) as server:
        yield server, json.loads(ready.read_text())


def measure(effort: Effort) -> Sequence[Row]:
    quick = effort.gpus is not None
    count = 20 if quick else AGENTS
    seconds = 2 * REPORT_SECONDS if quick else MEASURED_SECONDS
    with (
        servers.load_core() as core,
        servers.scratch() as directory,
        _server(directory, core, count) as (server, said),
    ):
        ca = directory / "ca.crt"
        ca.write_text(said["ca"])
        agents = _agents(said["nonces"], directory)
        used = server.cpu_seconds()
        own = time.process_time()
        took = asyncio.run(_register(agents, said["registration"], ca))
        busy, own = server.cpu_seconds() - used, time.process_time() - own
        share, load, rate = asyncio.run(_reporting(agents, said["agent"], ca, server, seconds))
        memory = server.resident_bytes()
    return [
        Row(
            figure=f"Registrations, {COMERS} at a time, a TLS connection each",
            ours=f"{count / took:,.0f}/s",
            reference="",
            ratio=None,
            must_reach=f"{MUST_REGISTER:g}/s",
            reached=count / took >= MUST_REGISTER,
            note=f"the server's core was busy {busy / took:.0%}, {busy / count * 1e3:.1f} ms each; "
            f"the client's {own / took:.0%}",
        ),
        Row(
            figure=f"{count:,} agents reporting every {REPORT_SECONDS:g} s, a connection each",
            ours=f"{share:.0%} of a core",
            reference="",
            ratio=None,
            must_reach=f"under {MUST_CORE:.0%}",
            reached=share < MUST_CORE,
            note=f"{rate:,.0f} reports/s, {share / rate * 1e6:.0f} µs each; {memory / 1e6:.0f} MB resident; "
            f"the client's core was busy {load:.0%} of the time",
        ),
    ]


if __name__ == "__main__":
    alone(measure, __doc__)
