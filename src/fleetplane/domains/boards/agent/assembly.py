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

from fleetplane.domains.boards.agent import registration as link
from fleetplane.domains.boards.agent.audit import BoardAuditLog
from fleetplane.domains.boards.agent.buses import ports as bus_ports
from fleetplane.domains.boards.agent.buses.buses import Buses
from fleetplane.domains.boards.agent.buses.ports import SimulatedI2c, SimulatedSpi
from fleetplane.domains.boards.agent.commands.commands import BoardCommands
from fleetplane.domains.boards.agent.config import BoardAgentConfig, GpioDriverName
from fleetplane.domains.boards.agent.desired.keeper import DesiredKeeper
from fleetplane.domains.boards.agent.desired.packages import Packages
from fleetplane.domains.boards.agent.gpio import drivers as opening
from fleetplane.domains.boards.agent.gpio.chip import Chip, ChipFactory, ChipMissing
from fleetplane.domains.boards.agent.gpio.sysfs_pwm import SysfsPwm
from fleetplane.domains.boards.agent.grpc.access import NodeDoor, RevokedCallers
from fleetplane.domains.boards.agent.grpc.listeners import Ports, open_ports
from fleetplane.domains.boards.agent.logs.journal import SystemJournal
from fleetplane.domains.boards.agent.logs.logs import LogRing, Logs
from fleetplane.domains.boards.agent.membership import BoardIdentityFolder, Membership
from fleetplane.domains.boards.agent.metrics import board as board_sources
from fleetplane.domains.boards.agent.metrics.sampler import MetricsSampler
from fleetplane.domains.boards.agent.metrics.values import Board
from fleetplane.domains.boards.agent.pins.pins import Pins
from fleetplane.domains.boards.agent.registration import BoardSelf, describe, without_hardware
from fleetplane.domains.boards.agent.reporter import BoardReporter
from fleetplane.domains.boards.agent.state import BoardAgentState
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError
from fleetplane.node.connection import Follow, no_check_in
from fleetplane.node.host.proc import address_towards
from fleetplane.node.host.psutil_host import HostFacts, MemoryUse, NetworkInterface, PsutilHost

SIMULATED_I2C: Final = (0x48, 0x50)
"""A thermometer's and a memory's usual addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardAgentParts:
    """What the agent is made of; in service everything but the first few as it is."""

    folder: BoardIdentityFolder
    config: BoardAgentConfig
    version: str
    clock: Clock
    log: structlog.typing.FilteringBoundLogger
    ring: LogRing
    open_chip: ChipFactory | None = None
    """Instead of the configured driver's."""
    host: HostFacts = field(default_factory=PsutilHost)
    opened: Callable[[Ports], None] = lambda _: None
    check_in: Follow = no_check_in


async def run_node(parts: BoardAgentParts) -> None:
    """Serve this node until cancelled."""
    membership = await asyncio.to_thread(parts.folder.load_membership)
    if membership is None and not parts.config.listen.plaintext:
        raise FailedPrecondition(
            f"there is no identity in {parts.folder.root}",
            hint="join a server first, or open the plain-text listener for this machine alone",
        )
    with BoardAuditLog(parts.folder.audit, parts.clock, parts.log) as audit:
        async with open_node(parts, audit, membership) as (node, buses):
            revoked = RevokedCallers(parts.folder, parts.log)
            await asyncio.to_thread(revoked.load)
            door = NodeDoor(parts.clock, refused=parts.config.access.refuse, revoked=revoked)
            ports_context = open_ports(
                parts.config.listen, node, buses, parts.folder, joined=membership is not None, door=door
            )
            keeper = keeper_for(parts, node)
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(node.pins.run(), name="boards/leases"),
                    tasks.create_task(node.sampler.run(), name="boards/metrics"),
                ]
                if membership is not None:
                    background.append(tasks.create_task(keeper.run(), name="boards/programs"))
                try:
                    async with ports_context as ports:
                        await _serve(parts, node, ports, membership, revoked, keeper)
                finally:
                    for task in background:
                        task.cancel()


async def _serve(
    parts: BoardAgentParts,
    node: BoardAgentState,
    ports: Ports,
    membership: Membership | None,
    revoked: RevokedCallers,
    keeper: DesiredKeeper,
) -> None:
    with _announced(parts.folder, ports):
        parts.opened(ports)
        parts.log.info("node.serving", addresses=ports.addresses, gpio=node.pins.chip_label or "none")
        if membership is None:
            await asyncio.Event().wait()
            return
        await reporter_for(parts, node, ports, membership, revoked, keeper).run()


def keeper_for(parts: BoardAgentParts, node: BoardAgentState) -> DesiredKeeper:
    """What runs and drives what the server wants here."""
    return DesiredKeeper(
        folder=parts.folder,
        pins=node.pins,
        policy=parts.config.programs.policy(),
        packages=Packages(
            parts.config.packages.policy(), folder=parts.folder, audit=node.audit, log=parts.log
        ),
        pin_policy=parts.config.gpio.policy(),
        clock=parts.clock,
        audit=node.audit,
        clean=parts.config.redaction().clean,
        log=parts.log,
    )


def reporter_for(
    parts: BoardAgentParts,
    node: BoardAgentState,
    ports: Ports,
    membership: Membership,
    revoked: RevokedCallers,
    keeper: DesiredKeeper,
) -> BoardReporter:
    async def identity_changed() -> None:
        await ports.renew()
        node.certificate_life = certificate_life(parts.folder)

    async def revocations_came(packed: bytes) -> bool:
        taken = await asyncio.to_thread(revoked.take, packed)
        if taken and (ended := ports.turn_away_the_revoked()):
            parts.log.warning("revocations.calls_ended", calls=ended)
        return taken

    return BoardReporter(
        node=node,
        folder=parts.folder,
        membership=membership,
        describe=lambda: introduce(parts, node, membership, port=ports.agent_port),
        identity_changed=identity_changed,
        revocations_came=revocations_came,
        revocation_list=lambda: revoked.number,
        keeper=keeper,
        log=parts.log,
        loss_after_seconds=parts.config.report.loss_after_seconds,
        check_in=parts.check_in,
    )


@asynccontextmanager
async def open_node(
    parts: BoardAgentParts, audit: BoardAuditLog, membership: Membership | None
) -> AsyncIterator[tuple[BoardAgentState, Buses]]:
    config, clock, simulated = parts.config, parts.clock, is_simulated(parts.config)
    pins = Pins(
        parts.open_chip or chip_factory(config.gpio.driver),
        config.gpio.policy(),
        clock,
        audit=audit.pin,
        hardware_pwm=None if simulated or config.gpio.driver is GpioDriverName.NONE else SysfsPwm(),
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
        journal=SystemJournal(program=config.logs.journalctl),
        ring=parts.ring,
        files=config.logs.paths(),
        clock=clock,
        redaction=redaction,
        hostname=socket.gethostname(),
    )
    commands = BoardCommands(config.commands.policy(), clock, audit=audit, redaction=redaction)
    async with pins, buses:
        yield (
            BoardAgentState(
                version=parts.version,
                clock=clock,
                pins=pins,
                sampler=MetricsSampler(parts.host, clock),
                logs=logs,
                commands=commands,
                audit=audit,
                gpio_wanted=pins.available
                or config.gpio.driver in (GpioDriverName.GPIOD, GpioDriverName.SIMULATED),
                certificate_life=certificate_life(parts.folder),
                node_id=membership.node_id if membership is not None else 0,
            ),
            buses,
        )


def chip_factory(driver: GpioDriverName) -> ChipFactory:
    match driver:
        case GpioDriverName.AUTO | GpioDriverName.GPIOD:
            return opening.chip_factory(opening.GpioDriver.GPIOD)
        case GpioDriverName.SIMULATED:
            return opening.chip_factory(opening.GpioDriver.SIMULATED)
        case GpioDriverName.NONE:
            return _no_chip


def _no_chip() -> Chip:
    raise ChipMissing("GPIO is turned off on this node", hint="gpio.driver is none")


def is_simulated(config: BoardAgentConfig) -> bool:
    return config.gpio.driver is GpioDriverName.SIMULATED


def certificate_life(folder: BoardIdentityFolder) -> tuple[float, float] | None:
    """When the certificate that is on disk begins and ends."""
    try:
        life = folder.credentials().life
    except FleetplaneError:
        return None
    return life.start, life.end


async def introduce(
    parts: BoardAgentParts, node: BoardAgentState, membership: Membership, *, port: int
) -> BoardSelf:
    """What this member says of itself now, under the name it has as such, whatever the machine is called."""
    snapshot = await node.sampler.first()
    me = await asyncio.to_thread(
        introduced, parts, snapshot.board, snapshot.interfaces, snapshot.memory, membership.server
    )
    me = replace(me, name=parts.config.node.name or membership.name or me.name)
    return replace(me, agent_port=port, agent_version=parts.version, capabilities=tuple(node.capabilities))


def introduced(
    parts: BoardAgentParts,
    board: Board,
    interfaces: tuple[NetworkInterface, ...],
    memory: MemoryUse | None,
    server: str,
) -> BoardSelf:
    """What there is to say before the agent runs. Blocking on name look-up."""
    me = describe(
        board,
        interfaces,
        name=parts.config.node.name,
        memory_bytes=memory.total_bytes if memory else 0,
        towards=address_towards(link.canonical(server)),
    )
    if is_simulated(parts.config):
        me = without_hardware(me, serial_number=simulated_serial(parts.folder, parts.clock))
        return replace(me, labels=parts.config.node.labels)
    return replace(me, labels=parts.config.node.labels, ssh_host_keys=board_sources.ssh_host_keys())


def introduced_now(parts: BoardAgentParts, server: str) -> BoardSelf:
    """The introduction of this board with facts measured now, for joining."""
    host = parts.host
    return introduced(parts, board_sources.board(), host.interfaces(), host.memory(), server)


def simulated_serial(folder: BoardIdentityFolder, clock: Clock) -> str:
    """A simulated serial number: stable for a folder, different between folders."""
    place = folder.root / "simulated-serial"
    with contextlib.suppress(FileNotFoundError):
        return place.read_text().strip()
    serial = f"simulated-{clock.token_bytes(8).hex()}"
    folder.write(place, serial.encode() + b"\n")
    return serial


@contextlib.contextmanager
def _announced(folder: BoardIdentityFolder, ports: Ports) -> Iterator[None]:
    """Where the agent is, for as long as it is there."""
    content = json.dumps({"pid": os.getpid(), "listeners": ports.addresses}).encode() + b"\n"
    folder.write(folder.running, content)
    try:
        yield
    finally:
        folder.running.unlink(missing_ok=True)
