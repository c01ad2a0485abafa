"""Composition root of the node side: what `fleetplane agent` runs, in the order it comes to life."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from fleetplane import logs
from fleetplane.domains.edge.agent.assembly import Parts, Reach
from fleetplane.domains.edge.agent.assembly import assemble as assemble_edge
from fleetplane.domains.edge.agent.state import StateFolder
from fleetplane.domains.edge.agent.tools import registry as edge_tools
from fleetplane.domains.gpus.agent.library import Library, NvmlLibrary
from fleetplane.domains.gpus.agent.link import DeviceLink
from fleetplane.domains.gpus.agent.provider import Provider, ProviderPolicy
from fleetplane.domains.gpus.agent.simulated import SimulatedLibrary
from fleetplane.domains.gpus.agent.xids import ignored_xids
from fleetplane.domains.instances import ids
from fleetplane.domains.instances.agent import link
from fleetplane.domains.instances.agent.identity_folder import IdentityFolder
from fleetplane.domains.instances.agent.instance_agent import InstanceAgent
from fleetplane.domains.instances.agent.key_folder import KeyFolder
from fleetplane.domains.instances.agent.machine import Machine, address_towards
from fleetplane.domains.instances.agent.receive_folder import ReceiveFolder
from fleetplane.domains.instances.agent.registration import Registrar, Self
from fleetplane.domains.instances.agent.renewal import (
    TRUST_SECONDS,
    CertificateKeeper,
    Renewal,
    ServerRenewal,
)
from fleetplane.domains.instances.agent.reporter import Reporter
from fleetplane.domains.instances.agent.session import Node, Pauses
from fleetplane.domains.instances.agent.spot import SpotSource, detect_spot
from fleetplane.domains.proxies.agent.assembly import Tuning, assemble
from fleetplane.domains.proxies.agent.link import ServerAddress
from fleetplane.domains.proxies.agent.nginx import Nginx, find_binary
from fleetplane.domains.proxies.agent.site import Paths, Site
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2
from fleetplane.kernel.backoff import Backoff
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import SettingsError
from fleetplane.settings import Settings

if TYPE_CHECKING:  # the board's agent brings a server for its own port along, which the others do without
    from fleetplane.domains.boards.agent.assembly import Parts as BoardParts
    from fleetplane.domains.boards.agent.identity_folder import Membership

SIMULATED_ENUMERATION_SECONDS = 60.0
"""Simulated GPUs are looked at anew so that a demonstration also shows them recover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAgentSettings:
    address: Callable[[], str]
    """Where the device API is; asked anew for every connection, since servers come and go."""
    provider_id: str = "nvml-provider"
    driver_root: Path | None = None
    ignored_xids: frozenset[int] = frozenset()
    """Ignored in addition to the application's own."""
    heartbeat_seconds: float = 10.0
    health_check: bool = True
    lower_case_names: bool = False
    enumerate_every_seconds: float | None = None
    simulate: int | None = None
    """This many simulated GPUs in place of the driver's."""
    seed: int = 0
    log_format: str = "text"
    log_level: str = "info"


async def run_gpu_agent(settings: GpuAgentSettings) -> None:
    """Watch this node's GPUs until SIGTERM or SIGINT; SIGHUP enumerates them anew."""
    logs.configure(level=settings.log_level, log_format=settings.log_format)
    log = structlog.get_logger().bind(provider=settings.provider_id)
    clock = SystemClock()
    provider = Provider(
        library=_library(settings),
        connect=lambda: DeviceLink(settings.address(), settings.provider_id),
        policy=_policy(settings),
        clock=clock,
        log=log,
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, provider.enumerate_again)
    await _until_stopped(provider.run())
    log.info("agent_stopped")


async def _until_stopped(work: Coroutine[None, None, None]) -> None:
    """Run until SIGTERM or SIGINT, or until the work fails."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(work)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, running.cancel)


def _library(settings: GpuAgentSettings) -> Library:
    if settings.simulate is not None:
        return SimulatedLibrary(settings.simulate, clock=time.monotonic, seed=settings.seed)
    import pynvml

    return NvmlLibrary(pynvml, driver_root=settings.driver_root)


def _policy(settings: GpuAgentSettings) -> ProviderPolicy:
    enumerate_every_seconds = settings.enumerate_every_seconds
    if enumerate_every_seconds is None and settings.simulate is not None:
        enumerate_every_seconds = SIMULATED_ENUMERATION_SECONDS
    return ProviderPolicy(
        heartbeat_seconds=settings.heartbeat_seconds,
        ignored_xids=ignored_xids(settings.ignored_xids),
        health_check=settings.health_check,
        lower_case_names=settings.lower_case_names,
        enumerate_every_seconds=enumerate_every_seconds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceAgentSettings:
    registration_address: str
    agent_address: str
    instance_id: str
    identity_dir: Path
    keys_dir: Path
    recv_dir: Path
    identity_mode: int = 0o600
    keys_mode: int = 0o640
    recv_mode: int = 0o640
    report_interval_seconds: float = 60.0
    """0: no reports."""
    spot_interval_seconds: float = 2.0
    """0: the cloud is not asked."""
    hostname: str = ""
    ipv4: str = ""
    ipv6: str = ""
    metrics_interface: str = ""
    ebpf_counters_path: str = ""
    health_addr: str = ""
    """Where to answer those who ask whether the agent is connected; empty: nowhere."""
    trust_interval_seconds: float = TRUST_SECONDS
    """Between two questions whom to trust, give or take half."""
    log_format: str = "text"
    log_level: str = "info"


async def run_instance_agent(settings: InstanceAgentSettings) -> None:
    """Enrol this machine and serve it until SIGTERM or SIGINT."""
    logs.configure(level=settings.log_level, log_format=settings.log_format)
    log: structlog.typing.FilteringBoundLogger = structlog.get_logger().bind(instance=settings.instance_id)
    ids.validate(settings.instance_id)
    for folder in (settings.identity_dir, settings.keys_dir, settings.recv_dir):
        _require_writable(folder)
    spot = detect_spot() if settings.spot_interval_seconds > 0 else None
    log.info("agent_started", version=version("fleetplane"), spot=repr(spot) if spot else "none")
    agent = await asyncio.to_thread(make_instance_agent, settings, log, spot=spot)
    await _until_stopped(agent.run())
    log.info("agent_stopped")


def make_instance_agent(
    settings: InstanceAgentSettings,
    log: structlog.typing.FilteringBoundLogger,
    *,
    spot: SpotSource | None = None,
    renewal: Renewal | None = None,
    backoff: Backoff | None = None,
    pauses: Pauses | None = None,
) -> InstanceAgent:
    """The agent with all its parts. Blocking: it asks for the machine's own addresses."""
    clock = SystemClock()
    backoff = backoff or Backoff()
    identity = IdentityFolder(settings.identity_dir, mode=settings.identity_mode)
    received = ReceiveFolder(
        settings.recv_dir,
        mode=settings.recv_mode,
        store_hash=identity.store_config_hash,
        now_ms=lambda: clock.now_ns() // 1_000_000,
    )
    reporter = Reporter(
        version=version("fleetplane"),
        instance_id=settings.instance_id,
        interval_seconds=settings.report_interval_seconds,
        machine=Machine(interface=settings.metrics_interface, ebpf_counters=settings.ebpf_counters_path),
        identity=identity,
        received=received,
        clock=clock,
    )
    node = Node(
        instance_id=settings.instance_id,
        received=received,
        keys=KeyFolder(settings.keys_dir, mode=settings.keys_mode),
        reporter=reporter,
        keeper=CertificateKeeper(
            folder=identity,
            instance_id=settings.instance_id,
            clock=clock,
            log=log,
            renewal=renewal or ServerRenewal(),
            trust_seconds=settings.trust_interval_seconds,
        ),
        clock=clock,
        log=log,
        backoff=backoff,
        pauses=pauses or Pauses(),
    )
    return InstanceAgent(
        identity=identity,
        registrar=Registrar(
            folder=identity,
            address=settings.registration_address,
            me=_self(settings),
            clock=clock,
            log=log,
            backoff=backoff,
        ),
        connect=lambda credentials: link.agent_channel(settings.agent_address, credentials),
        node=node,
        spot=spot,
        spot_interval_seconds=settings.spot_interval_seconds,
        health_address=settings.health_addr,
    )


def _self(settings: InstanceAgentSettings) -> Self:
    towards = settings.registration_address
    return Self(
        instance_id=settings.instance_id,
        hostname=settings.hostname or socket.gethostname(),
        private_ipv4=settings.ipv4 or address_towards(towards, socket.AF_INET),
        private_ipv6=settings.ipv6 or address_towards(towards, socket.AF_INET6),
    )


def _require_writable(folder: Path) -> None:
    if not folder.is_dir():
        raise SettingsError(f"{folder} is no folder", hint="make it before the agent starts")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(f"{folder} cannot be written to by this user")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyAgentSettings:
    server: str
    """`host:port` of the server's listener for NGINX agents."""
    state_dir: Path
    authority: Path | None = None
    """Whom to trust as the server; else whom the machine trusts."""
    plaintext: bool = False
    token: str = ""
    """Only needed once."""
    managed: bool = False
    """NGINX is the agent's own: started, supervised and adopted again after a restart of the agent."""
    stop_nginx_on_exit: bool = False
    nginx: Path = Path("/usr/sbin/nginx")
    listen_addresses: tuple[str, ...] = ()
    """Else all, of both families where the machine has them."""
    ports: Mapping[int, int] = field(default_factory=dict)
    """Ports that are served under another number."""
    acme_responder: str = ""
    workers: str = "auto"
    hostname: str = ""
    ip_address: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    deployment_mode: str = "standalone"
    tuning: Tuning = field(default_factory=Tuning)
    log_format: str = "text"
    log_level: str = "info"


MIME_TYPES = Path("/etc/nginx/mime.types")


async def run_proxy_agent(settings: ProxyAgentSettings) -> None:
    """Drive this machine's NGINX until SIGTERM or SIGINT. NGINX stays, unless it is to go too."""
    logs.configure(level=settings.log_level, log_format=settings.log_format)
    log: structlog.typing.FilteringBoundLogger = structlog.get_logger().bind(agent="proxy")
    clock, paths = SystemClock(), Paths(state=settings.state_dir.absolute())
    paths.state.mkdir(parents=True, exist_ok=True)
    binary = await find_binary(settings.nginx)
    site = Site(
        paths=paths,
        binary=binary,
        addresses=settings.listen_addresses or _all_addresses(),
        ports=settings.ports,
        acme_responder=settings.acme_responder,
        mime_types=_if_there(MIME_TYPES),
        workers=settings.workers,
    )
    server = ServerAddress(
        address=settings.server, authority=settings.authority, plaintext=settings.plaintext
    )
    introduction = agent_pb2.RegistrationRequest(
        hostname=settings.hostname or socket.gethostname(),
        ip_address=settings.ip_address
        or await asyncio.to_thread(address_towards, settings.server, socket.AF_INET),
        version=version("fleetplane"),
        capabilities=binary.capabilities(),
        labels=settings.labels,
        deployment_mode=settings.deployment_mode.upper(),
    )
    if hidden := _hidden_from_workers(paths.state):
        log.warning("workers_cannot_reach_state", folder=str(hidden))
    with _alone_in(paths):
        agent = assemble(
            site=site, managed=settings.managed, token=settings.token, connect=server.channel,
            introduction=introduction, clock=clock, log=log, tuning=settings.tuning,
        )  # fmt: skip
        log.info("agent_started", version=version("fleetplane"), nginx=binary.words, state=str(paths.state))
        await _until_stopped(agent.run())
        if settings.managed and settings.stop_nginx_on_exit:
            await Nginx(site, clock).stop(graceful=True, within_seconds=5.0)
    log.info("agent_stopped")


def _if_there(path: Path) -> Path | None:
    return path if path.exists() else None


def _all_addresses() -> tuple[str, ...]:
    """Of both families; a machine without IPv6 would refuse to bind its address."""
    everywhere = "0.0.0.0"  # noqa: S104  # a proxy is there to be reached
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return (everywhere,)
    return (everywhere, "[::]")


def _hidden_from_workers(state: Path) -> Path | None:
    """The folder that keeps NGINX's workers, who are nobody under root, from their logs and scratch files."""
    if os.geteuid() != 0:
        return None
    return next((folder for folder in state.parents if not folder.stat().st_mode & 0o001), None)


@contextmanager
def _alone_in(paths: Paths) -> Iterator[None]:
    """Two agents on one state directory would undo each other's work."""
    with paths.lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SettingsError(f"another agent works in {paths.state}") from error
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeAgentSettings:
    state_dir: Path
    user_config: Path | None = None
    """A configuration that other programs share; the state directory's goes before it."""
    reach: Reach = field(default_factory=Reach)
    tolerate_unsigned: bool = False
    """Obey a server that gives no proof though its key is known. A wrong proof is never obeyed."""
    grace_seconds: float = 10.0
    """For running commands, after SIGTERM."""
    log_format: str = "text"
    log_level: str = "info"


async def run_edge_agent(settings: EdgeAgentSettings) -> None:
    """Serve this machine until SIGTERM, SIGINT or the server's word; SIGHUP reads the configuration anew."""
    logs.configure(level=settings.log_level, log_format=settings.log_format)
    log: structlog.typing.FilteringBoundLogger = structlog.get_logger().bind(agent="edge")
    folder = StateFolder(settings.state_dir.absolute())
    with folder.alone():
        parts = Parts(
            folder=folder,
            tools=edge_tools.load(),
            environment=Settings().inherited,
            clock=SystemClock(),
            log=log,
            user_config=settings.user_config,
            tolerate_unsigned=settings.tolerate_unsigned,
            reach=settings.reach,
        )
        made = await asyncio.to_thread(assemble_edge, parts)
        leave = partial(made.leaving.ask, grace_seconds=settings.grace_seconds, reason="the daemon stops")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, leave)
        loop.add_signal_handler(signal.SIGHUP, made.daemon.reload)
        log.info("agent_started", version=version("fleetplane"), state=str(folder.root))
        try:
            await made.daemon.run()
        finally:
            made.journal.close()
    log.info("agent_stopped")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardAgentSettings:
    state_dir: Path
    config: Path | None = None
    simulate: bool = False
    """Pins and buses without hardware, and an identity of its own for each state directory."""
    name: str = ""
    addresses: tuple[str, ...] = ()
    port: int | None = None
    plaintext_listen: str = ""
    log_format: str = "text"
    log_level: str = "info"


async def run_board_agent(settings: BoardAgentSettings) -> None:
    """Serve this board until SIGTERM or SIGINT."""
    from fleetplane.domains.boards.agent.assembly import run_node

    logs.configure(level=settings.log_level, log_format=settings.log_format)
    parts = board_parts(settings)
    # Before the last of the processors, which makes a line of text of an event.
    *before, renderer = structlog.get_config()["processors"]
    structlog.configure(processors=[*before, parts.ring, renderer])
    parts.folder.make()
    with parts.folder.alone():
        parts.log.info("agent_started", version=parts.version, state=str(parts.folder.root))
        await _until_stopped(run_node(parts))
    parts.log.info("agent_stopped")


async def join_board(
    settings: BoardAgentSettings,
    token: str,
    server: str,
    *,
    server_name: str = "",
    replace_identity: bool = False,
    wait_seconds: float = 0.0,
    told: Callable[[str], None] = lambda _: None,
) -> Membership:
    """Make this board a member of a server's fleet; who it is is on disk when this returns."""
    from fleetplane.domains.boards.agent.assembly import introduced_now
    from fleetplane.domains.boards.agent.registration import Joiner

    parts = board_parts(settings)
    parts.folder.make()
    with parts.folder.alone():
        me = await asyncio.to_thread(introduced_now, parts, server)
        joiner = Joiner(parts.folder, parts.clock)
        return await joiner.join(
            token, server, replace(me, agent_version=parts.version), server_name=server_name,
            replace_identity=replace_identity, wait_seconds=wait_seconds, told=told,
        )  # fmt: skip


def board_parts(settings: BoardAgentSettings) -> BoardParts:
    from fleetplane.domains.boards.agent import node_config
    from fleetplane.domains.boards.agent.assembly import Parts
    from fleetplane.domains.boards.agent.identity_folder import IdentityFolder
    from fleetplane.domains.boards.agent.log_ring import LogRing

    clock = SystemClock()
    config = node_config.load(settings.config)
    changes = {"name": settings.name} if settings.name else {}
    listen = {
        "addresses": settings.addresses,
        "port": settings.port,
        "plaintext": settings.plaintext_listen,
    }
    config = msgspec.structs.replace(
        config,
        node=msgspec.structs.replace(config.node, **changes),
        listen=msgspec.structs.replace(
            config.listen, **{key: value for key, value in listen.items() if value not in ((), None, "")}
        ),
        gpio=msgspec.structs.replace(config.gpio, driver=node_config.Driver.SIMULATED)
        if settings.simulate
        else config.gpio,
    ).check()
    return Parts(
        folder=IdentityFolder(settings.state_dir.absolute()),
        config=config,
        version=version("fleetplane"),
        clock=clock,
        log=structlog.get_logger().bind(agent="board"),
        ring=LogRing(clock, run=clock.token_bytes(4).hex(), hostname=socket.gethostname()),
    )
