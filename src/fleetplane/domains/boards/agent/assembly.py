"""The node's agent with all its parts, in the order they come to life, and the other way at the end.

Hardware first, so that pins are safe again last; then ports; then the server is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from fleetplane.domains.boards.agent import board_sources, bus_ports, link
from fleetplane.domains.boards.agent.audit_trail import AuditTrail
from fleetplane.domains.boards.agent.buses import Buses
from fleetplane.domains.boards.agent.commands import Commands
from fleetplane.domains.boards.agent.gpio import opening
from fleetplane.domains.boards.agent.gpio.faults import ChipMissing
from fleetplane.domains.boards.agent.gpio.port import Chip, ChipFactory
from fleetplane.domains.boards.agent.gpio.sysfs_pwm import SysfsPwm
from fleetplane.domains.boards.agent.host_sources import Host, PsutilHost
from fleetplane.domains.boards.agent.identity_folder import IdentityFolder, Membership
from fleetplane.domains.boards.agent.listeners import Ports, open_ports
from fleetplane.domains.boards.agent.log_journal import Journal
from fleetplane.domains.boards.agent.log_ring import LogRing
from fleetplane.domains.boards.agent.logs import Logs
from fleetplane.domains.boards.agent.metrics import Board, Interface, Memory
from fleetplane.domains.boards.agent.metrics_sampler import MetricsSampler
from fleetplane.domains.boards.agent.node_access import NodeDoor
from fleetplane.domains.boards.agent.node_config import Driver, NodeConfig
from fleetplane.domains.boards.agent.node_state import NodeState
from fleetplane.domains.boards.agent.pins import Pins
from fleetplane.domains.boards.agent.registration import Self, describe, without_hardware
from fleetplane.domains.boards.agent.reporter import Reporter
from fleetplane.domains.boards.agent.simulated_buses import SimulatedI2c, SimulatedSpi
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.durable import write_durably
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError

SIMULATED_I2C: Final = (0x48, 0x50)
"""A thermometer's and a memory's usual addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the agent is made of; in service everything but the first few as it is."""

    folder: IdentityFolder
    config: NodeConfig
    version: str
    clock: Clock
    log: structlog.typing.FilteringBoundLogger
    ring: LogRing
    open_chip: ChipFactory | None = None
    """Instead of the configured driver's."""
    host: Host = field(default_factory=PsutilHost)
    opened: Callable[[Ports], None] = lambda _: None


async def run_node(parts: Parts) -> None:
    """Serve this node until cancelled."""
    membership = await asyncio.to_thread(parts.folder.load_membership)
    if membership is None and not parts.config.listen.plaintext:
        raise FailedPrecondition(
            f"there is no identity in {parts.folder.root}",
            hint="join a server first, or open the plain-text listener for this machine alone",
        )
    with AuditTrail(parts.folder.audit, parts.clock, parts.log) as audit:
        async with open_node(parts, audit, membership) as (node, buses):
            door = NodeDoor(parts.clock, refused=parts.config.access.refuse)
            ports_context = open_ports(
                parts.config.listen, node, buses, parts.folder, joined=membership is not None, door=door
            )
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(node.pins.run(), name="boards/leases"),
                    tasks.create_task(node.sampler.run(), name="boards/metrics"),
                ]
                try:
                    async with ports_context as ports:
                        await _serve(parts, node, ports, membership)
                finally:
                    for task in background:
                        task.cancel()


async def _serve(parts: Parts, node: NodeState, ports: Ports, membership: Membership | None) -> None:
    with _announced(parts.folder, ports):
        parts.opened(ports)
        parts.log.info("node.serving", addresses=ports.addresses, gpio=node.pins.chip_label or "none")
        if membership is None:
            await asyncio.Event().wait()
            return
        await reporter_for(parts, node, ports, membership).run()


def reporter_for(parts: Parts, node: NodeState, ports: Ports, membership: Membership) -> Reporter:
    async def identity_changed() -> None:
        await ports.renew()
        node.certificate_life = certificate_life(parts.folder)

    return Reporter(
        node=node,
        folder=parts.folder,
        membership=membership,
        describe=lambda: introduce(parts, node, membership.server, port=ports.agent_port),
        identity_changed=identity_changed,
        log=parts.log,
        loss_after_seconds=parts.config.report.loss_after_seconds,
    )


@asynccontextmanager
async def open_node(
    parts: Parts, audit: AuditTrail, membership: Membership | None
) -> AsyncIterator[tuple[NodeState, Buses]]:
    config, clock, simulated = parts.config, parts.clock, is_simulated(parts.config)
    pins = Pins(
        parts.open_chip or chip_factory(config.gpio.driver),
        config.gpio.policy(),
        clock,
        audit=audit.pin,
        hardware_pwm=None if simulated or config.gpio.driver is Driver.NONE else SysfsPwm(),
    )
    buses = Buses(
        open_spi=SimulatedSpi().open if simulated else bus_ports.open_spi,
        open_i2c=SimulatedI2c(*SIMULATED_I2C).open if simulated else bus_ports.open_i2c,
        policy=config.buses.policy(),
        clock=clock,
        audit=audit.bus,
    )
    redaction = config.redaction()
    logs = Logs(
        journal=Journal(program=config.logs.journalctl),
        ring=parts.ring,
        files=config.logs.paths(),
        clock=clock,
        redaction=redaction,
        hostname=socket.gethostname(),
    )
    commands = Commands(config.commands.policy(), clock, audit=audit, redaction=redaction)
    async with pins, buses:
        yield (
            NodeState(
                version=parts.version,
                clock=clock,
                pins=pins,
                sampler=MetricsSampler(parts.host, clock),
                logs=logs,
                commands=commands,
                audit=audit,
                gpio_wanted=pins.available or config.gpio.driver in (Driver.GPIOD, Driver.SIMULATED),
                certificate_life=certificate_life(parts.folder),
                node_id=membership.node_id if membership is not None else 0,
            ),
            buses,
        )


def chip_factory(driver: Driver) -> ChipFactory:
    match driver:
        case Driver.AUTO | Driver.GPIOD:
            return opening.chip_factory(opening.Driver.GPIOD)
        case Driver.SIMULATED:
            return opening.chip_factory(opening.Driver.SIMULATED)
        case Driver.NONE:
            return _no_chip


def _no_chip() -> Chip:
    raise ChipMissing("this node's owner keeps its pins to himself", hint="gpio.driver is none")


def is_simulated(config: NodeConfig) -> bool:
    return config.gpio.driver is Driver.SIMULATED


def certificate_life(folder: IdentityFolder) -> tuple[float, float] | None:
    """When the certificate that is on disk begins and ends."""
    try:
        life = folder.credentials().life
    except FleetplaneError:
        return None
    return life.begins, life.ends


async def introduce(parts: Parts, node: NodeState, server: str, *, port: int) -> Self:
    """What this node says of itself now."""
    snapshot = await node.sampler.first()
    me = await asyncio.to_thread(
        introduced, parts, snapshot.board, snapshot.interfaces, snapshot.memory, server
    )
    return replace(me, agent_port=port, agent_version=parts.version, capabilities=tuple(node.capabilities))


def introduced(
    parts: Parts, board: Board, interfaces: tuple[Interface, ...], memory: Memory | None, server: str
) -> Self:
    """What there is to say before the agent runs. Blocking on name look-up."""
    me = describe(
        board,
        interfaces,
        name=parts.config.node.name,
        memory_bytes=memory.total_bytes if memory else 0,
        towards=address_towards(server),
    )
    if is_simulated(parts.config):
        me = without_hardware(me, serial_number=simulated_serial(parts.folder, parts.clock))
    return replace(me, labels=parts.config.node.labels)


def introduced_now(parts: Parts, server: str) -> Self:
    """The same, measured on the spot: for joining."""
    host = parts.host
    return introduced(parts, board_sources.board(), host.interfaces(), host.memory(), server)


def address_towards(server: str) -> str:
    """The address this machine would speak to the server from; asks the routing table and sends nothing."""
    host, port = link.endpoint(server)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])
            return str(probe.getsockname()[0])
    except (OSError, IndexError):
        return ""


def simulated_serial(folder: IdentityFolder, clock: Clock) -> str:
    """Of its own for each folder, and the same whenever it is asked for."""
    place = folder.root / "simulated-serial"
    with contextlib.suppress(FileNotFoundError):
        return place.read_text().strip()
    serial = f"simulated-{clock.token_bytes(8).hex()}"
    write_durably(place, serial.encode() + b"\n", mode=0o600)
    return serial


@contextlib.contextmanager
def _announced(folder: IdentityFolder, ports: Ports) -> Iterator[None]:
    """Where the agent is, for as long as it is there."""
    content = json.dumps({"pid": os.getpid(), "listeners": ports.addresses}).encode() + b"\n"
    write_durably(folder.running, content, mode=0o600)
    try:
        yield
    finally:
        folder.running.unlink(missing_ok=True)
