"""The shapes of users, logins, the server itself, programs run on boards, and provisioning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET, UnsetType, field

from fleetplane.domains.boards.ports import ProvisioningAction, ProvisioningState
from fleetplane.domains.boards.rest.common import BoardShape, Data, Rows

# Programs.


class ShownOutcome(BoardShape, frozen=True, kw_only=True):
    """What a program came to on one board; without the fields of its end if it never ran."""

    command_id: str | UnsetType = UNSET
    """Where the answer is about one board alone."""
    node_id: int
    state: str
    success: bool
    message: str
    exit_code: int | UnsetType = UNSET
    stdout: str | UnsetType = UNSET
    stderr: str | UnsetType = UNSET
    stdout_truncated: bool | UnsetType = UNSET
    stderr_truncated: bool | UnsetType = UNSET
    started_at: str | UnsetType | None = UNSET
    duration_seconds: float | UnsetType = UNSET
    timed_out: bool | UnsetType = UNSET
    signal: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class IssuedCommand(BoardShape, frozen=True, kw_only=True):
    command_id: str
    node_ids: Sequence[int]
    count: int


class ShownCommand(BoardShape, frozen=True, kw_only=True):
    id: str
    command: str
    args: Sequence[str]
    requested_by: str
    created_at: str
    finished_at: str | None
    targets: int
    open: int
    outcomes_by_state: Mapping[str, int]


class CommandDetail(ShownCommand, frozen=True, kw_only=True):
    outcomes: Sequence[ShownOutcome]


class CommandRows(Rows[ShownCommand], frozen=True, kw_only=True):
    """Commands, newest first."""


class CommandData(Data[ShownCommand], frozen=True, kw_only=True):
    """One command."""


class CommandDetailData(Data[CommandDetail], frozen=True, kw_only=True):
    """One command, with what it came to on each board."""


# Provisioning.


class ShownStep(BoardShape, frozen=True, kw_only=True):
    node_id: int
    name: str
    state: ProvisioningState
    message: str
    started_at: str | None
    finished_at: str | None


class OrderAnswer(BoardShape, frozen=True, kw_only=True):
    success: bool
    """That it was accepted, or is what was asked for; not that it has ended."""
    message: str
    operation_id: str | None
    request_id: str | None
    state: ProvisioningState
    reason: str
    steps: Sequence[ShownStep]


class ShownOperation(BoardShape, frozen=True, kw_only=True):
    id: str
    action: ProvisioningAction
    state: ProvisioningState
    finished: bool
    reason: str
    node_ids: Sequence[int]
    cluster_id: int | None
    request_id: str | None
    requested_by: str
    created_at: str
    finished_at: str | None
    steps: Sequence[ShownStep]


class OperationRows(Rows[ShownOperation], frozen=True, kw_only=True):
    """Operations."""


class OperationData(Data[ShownOperation], frozen=True, kw_only=True):
    """One operation."""


# What provisioning keeps sealed.


class CredentialName(BoardShape, frozen=True, kw_only=True):
    name: str


class CredentialNames(BoardShape, frozen=True, kw_only=True):
    credentials: Sequence[CredentialName]
    count: int


class KeptCredential(CredentialName, frozen=True, kw_only=True):
    message: str


class ClusterToken(BoardShape, frozen=True, kw_only=True):
    cluster_token: str


class Kubeconfig(BoardShape, frozen=True, kw_only=True):
    kubeconfig: str


# Users.


class ShownUser(BoardShape, frozen=True, kw_only=True):
    id: int
    username: str
    email: str
    role: str
    first_name: str
    last_name: str
    is_active: bool
    last_login: str | None
    created_at: str


class UserRows(BoardShape, frozen=True, kw_only=True):
    """Users."""

    data: Sequence[ShownUser] = field(name="users")
    count: int
    total: int
    limit: int
    offset: int


class MadeUser(BoardShape, frozen=True, kw_only=True):
    message: str
    user: ShownUser


class Profile(BoardShape, frozen=True, kw_only=True):
    """A user; or an operator of the server, who has no `id` and any number of `roles`."""

    id: int | None
    username: str
    email: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    first_name: str | UnsetType = UNSET
    last_name: str | UnsetType = UNSET
    roles: Sequence[str] | UnsetType = UNSET
    is_active: bool
    last_login: str | UnsetType | None = UNSET
    created_at: str | UnsetType = UNSET


class AccessToken(BoardShape, frozen=True, kw_only=True):
    access_token: str
    token_type: str
    expires_in: int


class OpenedLogin(AccessToken, frozen=True, kw_only=True):
    refresh_token: str
    user: ShownUser


# The server.


class ServerHealth(BoardShape, frozen=True, kw_only=True):
    status: str
    timestamp: str
    uptime: str


class ServedBy(BoardShape, frozen=True, kw_only=True):
    database: str


class ServerReadiness(BoardShape, frozen=True, kw_only=True):
    status: str
    timestamp: str
    services: ServedBy


class ServerMemory(BoardShape, frozen=True, kw_only=True):
    alloc: int
    total_alloc: int
    sys: int
    heap_alloc: int
    heap_sys: int
    heap_inuse: int
    heap_idle: int
    heap_objects: int


class ServerCollections(BoardShape, frozen=True, kw_only=True):
    num_gc: int
    pause_total: int
    last_gc: None


class ServerInfo(BoardShape, frozen=True, kw_only=True):
    go_version: str
    go_os: str
    go_arch: str
    cpu_count: int
    goroutines: int
    memory: ServerMemory
    gc: ServerCollections
    timestamp: str
    uptime: str


class ServerMetrics(BoardShape, frozen=True, kw_only=True):
    uptime_seconds: float
    goroutines_count: int
    memory_alloc: int
    memory_sys: int
    gc_count: int
    gc_pause_total_ns: int
    timestamp: int


class ServiceCheck(BoardShape, frozen=True, kw_only=True):
    name: str
    status: str
    message: str


class ShownService(BoardShape, frozen=True, kw_only=True):
    service: str
    reported_by: str
    checks: Sequence[ServiceCheck]
    timestamp: str


class ServiceList(BoardShape, frozen=True, kw_only=True):
    services: Sequence[ShownService]
    count: int
