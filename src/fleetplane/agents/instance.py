"""`fleetplane agent instance`: this machine as an instance of a group."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import structlog

from fleetplane import logs
from fleetplane.agents.running import until_stopped
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
from fleetplane.kernel.backoff import Backoff
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import SettingsError


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
    await until_stopped(agent.run())
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
