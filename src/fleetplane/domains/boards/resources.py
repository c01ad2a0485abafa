"""Boards, clusters, pins, users and runs as objects of the resource API. Pure.

Everything of boards lies in one tenant; a board of a cluster lies in the cluster's scope.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fleetplane.domains.boards import access
from fleetplane.domains.boards.calls.channels import CallOrigin
from fleetplane.domains.boards.commands.encoding import BoardProgram
from fleetplane.domains.boards.commands.runs import BOARD_RUN, ProgramCall
from fleetplane.domains.boards.kinds import (
    BOARD,
    CLUSTER,
    SCOPE,
    Board,
    BoardState,
    BoardStatus,
    Cluster,
    ClusterStatus,
    board_scope,
)
from fleetplane.domains.boards.logs import relay as telemetry
from fleetplane.domains.boards.pins.kinds import (
    GPIO_DEVICE,
    Device,
    DeviceType,
    Direction,
    GpioConfig,
    GpioStatus,
    Pull,
)
from fleetplane.domains.boards.rest.common import projected
from fleetplane.domains.boards.rules import shown_state
from fleetplane.domains.boards.users import PERSON, Person
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.acting import freeze_actions
from fleetplane.fleet.resources.common import AccountSpecView, AccountStatusView, account_resource
from fleetplane.fleet.resources.declaration import (
    READING,
    ActionCall,
    Begun,
    Column,
    ObjectState,
    PublicResource,
    Related,
    ResourceAction,
    ResourceShape,
    ResourceVerb,
    ResourceView,
    Secret,
    ViewReader,
)
from fleetplane.fleet.resources.mirrors import Mirror
from fleetplane.fleet.runs import targets
from fleetplane.fleet.runs.channel import RunOrder
from fleetplane.fleet.runs.policy import RunPolicy
from fleetplane.fleet.runs.resources import Printed, begin, run_resource
from fleetplane.fleet.runs.targets import RunTarget
from fleetplane.kernel.commands import CommandTarget
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.values import durations
from fleetplane.kernel.values.times import spelled_or_null

TENANT = scopes.tenant_path(scopes.DEFAULT_TENANT)
MIRROR = Mirror("Board")


def at_tenant(_stored: AnyResource, _reading: ViewReader) -> str:
    """What belongs to no cluster lies at the tenant."""
    return TENANT


def cluster_place(cluster_id: int | None, reading: ViewReader) -> str:
    """The scope of a cluster's boards; the tenant's for those of none."""
    found = reading.get(CLUSTER, SCOPE, str(cluster_id)) if cluster_id is not None else None
    return TENANT if found is None else scopes.below(TENANT, "clusters", found.spec.name)


# Boards.


class BoardSpecView(ResourceShape, frozen=True):
    role: str
    cluster: str | None
    """The name of its cluster."""
    address: str
    """As reported by the board or entered by a person."""
    mac_address: str
    serial_number: str


class BoardStatusView(ResourceShape, frozen=True):
    number: int
    """By which the documented API knows it."""
    state: str
    """As the documented API has it; `unheard` after a restart of the server until the board is heard."""
    since: str | None
    """When that state began; for `unheard` the one before it."""
    last_seen_at: str | None
    registered_at: str | None
    architecture: str
    model: str
    cpu_cores: int
    memory_bytes: int
    os_version: str
    kernel_version: str
    agent_version: str
    capabilities: Sequence[str]
    certificate_expires_at: str | None


def board_view(board: Board, reading: ViewReader) -> ResourceView[BoardSpecView, BoardStatusView]:
    """What is shown of a board: no keys."""
    spec, status = board.spec, board.status or BoardStatus(state=BoardState.DISCOVERED)
    found = reading.get(CLUSTER, SCOPE, str(spec.cluster_id)) if spec.cluster_id is not None else None
    return ResourceView(
        spec=BoardSpecView(
            role=spec.role,
            cluster=None if found is None else found.spec.name,
            address=spec.ip_address,
            mac_address=spec.mac_address,
            serial_number=spec.serial_number,
        ),
        status=projected(
            BoardStatusView,
            status,
            spec,
            number=int(board.name),
            state=shown_state(status),
            since=spelled_or_null(status.state_changed_at_ns or None),
        ),
    )


def live_board(domain: Any, board: Board) -> Board:
    """The record with the board's last sign of life, which is stored with changes of state only."""
    seen_ns = domain.core.presence.last_seen_ns(board)
    if board.status is None or seen_ns is None:
        return board
    return msgspec.structs.replace(
        board, status=msgspec.structs.replace(board.status, last_seen_at_ns=seen_ns)
    )


class ProgramBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    command: str
    args: list[str] = msgspec.field(default_factory=list)
    deadline: str = "60s"


async def _run(call: ActionCall) -> Begun | None:
    body: ProgramBody = call.body
    order = RunOrder(
        scope=SCOPE,
        target=RunTarget(names=(call.stored.name,)),
        call=ProgramCall(
            order=BoardProgram(command=body.command, args=tuple(body.args)), role=access.OPERATOR
        ),
        policy=RunPolicy(deadline_seconds=durations.parse(body.deadline)),
        actor=call.actor,
    )
    return await begin(call, call.domain.nodes.runs, order, scope=TENANT)


BOARDS = PublicResource(
    name="board",
    plural="boards",
    short=("b",),
    summary="A single-board computer with pins",
    kind=BOARD,
    spec=BoardSpecView,
    status=BoardStatusView,
    view=board_view,
    live=live_board,
    state=lambda board: ObjectState(board.status.state if board.status else BoardState.DISCOVERED),
    place=lambda board, reading: cluster_place(board.spec.cluster_id, reading),
    moves=True,
    permission=access.READ,
    named=lambda board, _reading: board.spec.name,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="STATE", value=".status.state"),
        Column(title="ROLE", value=".spec.role"),
        Column(title="CLUSTER", value=".spec.cluster"),
        Column(title="ADDRESS", value=".spec.address"),
        Column(title="SINCE", value=".status.since", type="age"),
        Column(title="NUMBER", value=".status.number", type="number", wide=True),
        Column(title="MODEL", value=".status.model", wide=True),
        Column(title="AGENT", value=".status.agentVersion", wide=True),
    ),
    verbs=READING | {ResourceVerb.EXPLAIN, ResourceVerb.LOGS, ResourceVerb.FIGURES, ResourceVerb.HISTORY},
    actions=(
        ResourceAction(
            name="run",
            summary="Run a program on it",
            permission=access.OPERATE,
            run=_run,
            body=ProgramBody,
            takes_time=True,
            anywhere=True,
        ),
        *freeze_actions("boards", lambda board: board_scope(int(board.name))),
    ),
    relates=(Related(resource="cluster", path=".spec.cluster"),),
    explain="board",
    logs=telemetry.logs,
    figures=telemetry.figures,
    history=telemetry.history,
    search=(".metadata.name", ".spec.address", ".spec.serialNumber", ".spec.macAddress"),
)


# Clusters.


class ClusterSpecView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    description: str = ""
    version: str = ""
    master_endpoint: str = ""


class ClusterStatusView(ResourceShape, frozen=True):
    number: int
    state: str


def cluster_view(cluster: Cluster, _reading: ViewReader) -> ResourceView[ClusterSpecView, ClusterStatusView]:
    """What is shown of a cluster."""
    spec, status = cluster.spec, cluster.status or ClusterStatus()
    return ResourceView(
        spec=ClusterSpecView(
            description=spec.description, version=spec.version, master_endpoint=spec.master_endpoint
        ),
        status=ClusterStatusView(number=int(cluster.name), state=status.state),
    )


CLUSTERS = PublicResource(
    name="cluster",
    plural="clusters",
    summary="Boards that form a cluster",
    kind=CLUSTER,
    spec=ClusterSpecView,
    status=ClusterStatusView,
    view=cluster_view,
    place=at_tenant,
    permission=access.READ,
    named=lambda cluster, _reading: cluster.spec.name,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="STATE", value=".status.state"),
        Column(title="VERSION", value=".spec.version"),
        Column(title="ENDPOINT", value=".spec.masterEndpoint", wide=True),
    ),
)


# Pins.


class PinSpecView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    board: str = ""
    """The name of its board, which its own name begins with."""
    pin: int | None = None
    """As the processor counts them (BCM); its own name ends with it."""
    display_name: str = ""
    """Its name, unless it is called something else."""
    description: str = ""
    direction: Direction = Direction.INPUT
    pull: Pull = Pull.NONE
    type: DeviceType = DeviceType.DIGITAL
    enabled: bool = True
    level: int | None = None
    """To be driven: 0 or 1, of a waveform its duty cycle in percent. Null leaves the pin alone."""
    config: MIRROR.shape(GpioConfig) = MIRROR.shown(GpioConfig())  # type: ignore[valid-type]  # made at run time


class PinStatusView(ResourceShape, frozen=True):
    number: int
    state: str
    value: float | None
    """As last read from the board, or written to it."""
    value_at: str | None
    applied: bool
    """Whether the board was brought to the present spec."""
    reason: str
    message: str
    held_by: str | None
    """Who alone may write now."""


def _board_of(device: Device, reading: ViewReader) -> Board | None:
    return reading.get(BOARD, SCOPE, str(device.spec.board))


def pin_view(device: Device, reading: ViewReader) -> ResourceView[PinSpecView, PinStatusView]:
    """What is shown of a pin: no id of a lease, with which one could write."""
    spec, status = device.spec, device.status or GpioStatus()
    board = _board_of(device, reading)
    return ResourceView(
        spec=projected(
            PinSpecView,
            spec,
            board=board.spec.name if board is not None else str(spec.board),
            display_name=spec.name,
            type=spec.device_type,
            config=MIRROR.shown(spec.config),
        ),
        status=projected(
            PinStatusView,
            status,
            number=int(device.name),
            applied=status.applied_generation >= device.generation,
            held_by=status.lease.holder if status.lease is not None else None,
        ),
    )


def pin_place(device: Device, reading: ViewReader) -> str:
    """Where its board lies."""
    board = _board_of(device, reading)
    return cluster_place(board.spec.cluster_id if board is not None else None, reading)


def pin_name(device: Device, reading: ViewReader) -> str:
    """`board.pin`, which is unique: two boards may have a pin of the same name."""
    board = _board_of(device, reading)
    return f"{board.spec.name if board is not None else device.spec.board}.{device.spec.pin}"


def _where(shown: Mapping[str, Any]) -> str:
    return f"{shown['spec']['board']}:{shown['spec']['pin']}"


class PinWriteBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    value: int


async def _write(call: ActionCall) -> Begun | None:
    await call.domain.nodes.driver.write(
        int(call.stored.name),
        call.body.value,
        holder=call.actor,
        asked=CallOrigin(actor=call.actor, role=access.OPERATOR),
    )
    return None


PINS = PublicResource(
    name="pin",
    plural="pins",
    summary="A pin of a board, with what it should be",
    kind=GPIO_DEVICE,
    spec=PinSpecView,
    status=PinStatusView,
    view=pin_view,
    place=pin_place,
    moves=True,
    permission=access.READ,
    named=pin_name,
    shows=lambda device: not device.spec.removing,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="DIRECTION", value=".spec.direction"),
        Column(title="TYPE", value=".spec.type"),
        Column(title="LEVEL", value=".spec.level", type="number"),
        Column(title="VALUE", value=".status.value", type="number"),
        Column(title="STATE", value=".status.state"),
        Column(title="REASON", value=".status.reason"),
        Column(title="WHERE", value=_where, wide=True),
        Column(title="HELD-BY", value=".status.heldBy", wide=True),
    ),
    verbs=READING | {ResourceVerb.EXPLAIN},
    actions=(
        ResourceAction(
            name="write",
            summary="Drive a level, or the duty cycle of a waveform in percent",
            permission=access.OPERATE,
            run=_write,
            body=PinWriteBody,
            anywhere=True,
        ),
    ),
    relates=(Related(resource="board", path=".spec.board"),),
    explain="pin",
    search=(".metadata.name", ".spec.board", ".spec.description"),
)


# People and runs.


def person_view(person: Person, _reading: ViewReader) -> ResourceView[AccountSpecView, AccountStatusView]:
    """What is shown of a user of boards."""
    spec = person.spec
    seen_ns = person.status.last_login_at_ns if person.status is not None else None
    return ResourceView(
        spec=AccountSpecView(
            domain="boards",
            email=spec.email,
            display_name=f"{spec.first_name} {spec.last_name}".strip(),
            roles=(f"boards.{spec.role}",),
            active=spec.is_active,
            password=Secret(set=True),
        ),
        status=AccountStatusView(last_login_at=spelled_or_null(seen_ns)),
    )


ACCOUNTS = account_resource(
    PERSON,
    view=person_view,
    named=lambda person, _reading: person.spec.username,
    shows=lambda person: not person.spec.is_adopted,
)


def _printed(domain: Any, target: CommandTarget) -> Printed:
    outcome = domain.nodes.commander.outcome(target)
    if outcome.answer is None:
        return Printed(message=outcome.detail)
    return Printed(
        stdout=outcome.answer.stdout.decode("utf-8", "replace"),
        stderr=outcome.answer.stderr.decode("utf-8", "replace"),
        message=outcome.detail,
    )


RUNS = run_resource(
    BOARD_RUN,
    domain="boards",
    place=at_tenant,
    read=access.READ,
    operate=access.OPERATE,
    command=lambda spec: spec.order.command,
    target=lambda spec: targets.shown(spec.target),
    runs=lambda domain: domain.nodes.runs,
    printed=_printed,
    anywhere=True,
)
RESOURCES = (BOARDS, CLUSTERS, PINS, ACCOUNTS, RUNS)
