"""`fleetplane agent instance`: this machine as an instance of a group."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fleetplane import __version__, logs
from fleetplane.agents.running import until_stopped
from fleetplane.domains.instances import ids
from fleetplane.domains.instances.agent.agent import InstanceAgent
from fleetplane.domains.instances.agent.files.folder import ReceiveFolder
from fleetplane.domains.instances.agent.identity import light
from fleetplane.domains.instances.agent.identity.folder import IdentityFolder
from fleetplane.domains.instances.agent.identity.keys import KeyFolder
from fleetplane.domains.instances.agent.identity.light import LightIdentityFolder, LightKeyFolder
from fleetplane.domains.instances.agent.identity.registration import InstanceRegistrar, InstanceSelf
from fleetplane.domains.instances.agent.identity.renewal import (
    TRUST_SECONDS,
    CertificateKeeper,
    CertificateRenewal,
    ServerRenewal,
)
from fleetplane.domains.instances.agent.machine import MachineSampler
from fleetplane.domains.instances.agent.reporter import InstanceReporter
from fleetplane.domains.instances.agent.session import InstanceNode, Pauses
from fleetplane.domains.instances.agent.spot import SpotSource, detect_spot
from fleetplane.domains.instances.agent.transport import InstanceTransport
from fleetplane.domains.instances.rules import files as file_rules
from fleetplane.kernel.clock import Backoff, SystemClock
from fleetplane.kernel.errors import SettingsError
from fleetplane.node.connection import SPREAD_SECONDS, Follow, no_check_in
from fleetplane.node.host.proc import address_towards
from fleetplane.node.lock import sole_user
from fleetplane.node.tasks import in_thread

if TYPE_CHECKING:
    from fleetplane.node.upgrade.upgrader import Upgrader

LOCK_FILE: Final = "agent.lock"
"""In the identity folder. The original agent opens the files it knows by name, and has no lock itself."""
LOCK_WAIT_SECONDS: Final = 10.0
"""For the agent before to end: providers and service managers start the next one quickly."""


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
    """Where to answer those who ask whether the agent runs and is connected; empty: nowhere."""
    trust_interval_seconds: float = TRUST_SECONDS
    """Seconds between two fetches of trusted authorities, give or take half."""
    log_format: str = "text"
    log_level: str = "info"


async def run_instance_agent(settings: InstanceAgentSettings, upgrader: Upgrader | None = None) -> None:
    """Enrol this machine and serve it until SIGTERM or SIGINT."""
    logs.configure(level=settings.log_level, log_format=settings.log_format)
    log = logs.logger(instance=settings.instance_id)
    ids.validate(settings.instance_id)
    for folder in (settings.identity_dir, settings.keys_dir, settings.recv_dir):
        _require_writable(folder)
    spot = detect_spot() if settings.spot_interval_seconds > 0 else None
    with ExitStack() as held:
        lock = sole_user(
            settings.identity_dir / LOCK_FILE, whose="another agent", wait_seconds=LOCK_WAIT_SECONDS
        )
        await in_thread(lambda: held.enter_context(lock))
        log.info("agent_started", version=__version__, spot=repr(spot) if spot else "none")
        check_in = upgrader.follow if upgrader is not None else no_check_in
        agent = await asyncio.to_thread(
            make_instance_agent, settings, log, spot=spot, is_light=True, check_in=check_in
        )
        await until_stopped(agent.run(), upgrader)
    log.info("agent_stopped")


def make_instance_agent(
    settings: InstanceAgentSettings,
    log: logs.Logger,
    *,
    spot: SpotSource | None = None,
    is_light: bool = False,
    renewal: CertificateRenewal | None = None,
    backoff: Backoff | None = None,
    pauses: Pauses | None = None,
    check_in: Follow = no_check_in,
) -> InstanceAgent:
    """The agent with all its parts. Blocking: it asks for the machine's own addresses.

    A light one looks at keys and certificates in short-lived processes.
    """
    clock = SystemClock()
    spread_seconds = SPREAD_SECONDS if backoff is None else 0.0
    backoff = backoff or Backoff()
    folders = _light_folders(settings) if is_light else _folders(settings)
    received = ReceiveFolder(
        settings.recv_dir,
        mode=settings.recv_mode,
        store_hash=folders.identity.store_config_hash,
        now_ms=lambda: clock.now_ns() // 1_000_000,
        check=folders.check,
    )
    reporter = InstanceReporter(
        version=__version__,
        instance_id=settings.instance_id,
        interval_seconds=settings.report_interval_seconds,
        machine=MachineSampler(
            interface=settings.metrics_interface, ebpf_counters=settings.ebpf_counters_path
        ),
        identity=folders.identity,
        received=received,
        clock=clock,
    )
    node = InstanceNode(
        instance_id=settings.instance_id,
        received=received,
        keys=folders.keys,
        reporter=reporter,
        keeper=CertificateKeeper(
            folder=folders.identity,
            instance_id=settings.instance_id,
            clock=clock,
            log=log,
            renewal=renewal or ServerRenewal(),
            trust_seconds=settings.trust_interval_seconds,
        ),
        clock=clock,
        log=log,
        backoff=backoff,
        spread_seconds=spread_seconds,
        pauses=pauses or Pauses(),
        check_in=check_in,
    )
    transport = InstanceTransport(
        registration_address=settings.registration_address,
        agent_address=settings.agent_address,
        identity=folders.identity,
        log=log,
    )
    return InstanceAgent(
        identity=folders.identity,
        registrar=InstanceRegistrar(
            folder=folders.identity,
            transport=transport,
            me=_self(settings),
            clock=clock,
            log=log,
            backoff=backoff,
        ),
        transport=transport,
        node=node,
        spot=spot,
        spot_interval_seconds=settings.spot_interval_seconds,
        health_address=settings.health_addr,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folders:
    identity: IdentityFolder
    keys: KeyFolder
    check: Callable[[Mapping[str, bytes]], Mapping[str, str]]


def _folders(settings: InstanceAgentSettings) -> _Folders:
    return _Folders(
        identity=IdentityFolder(settings.identity_dir, mode=settings.identity_mode),
        keys=KeyFolder(settings.keys_dir, mode=settings.keys_mode),
        check=file_rules.complaints,
    )


def _light_folders(settings: InstanceAgentSettings) -> _Folders:
    return _Folders(
        identity=LightIdentityFolder(
            settings.identity_dir, mode=settings.identity_mode, instance_id=settings.instance_id
        ),
        keys=LightKeyFolder(settings.keys_dir, mode=settings.keys_mode),
        check=light.complaints,
    )


def _self(settings: InstanceAgentSettings) -> InstanceSelf:
    towards = settings.registration_address
    return InstanceSelf(
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
