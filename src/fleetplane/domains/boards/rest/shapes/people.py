"""The shapes of users, of logins, and of the server itself."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType, field

from fleetplane.domains.boards.rest.shapes.base import BoardShape

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
