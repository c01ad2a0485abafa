"""Authentication and authorization of callers of this node, and the list of revoked certificates.

    boards.viewer       looks: metrics, health, pins, logs
    boards.operator     and drives pins and buses, and runs what profiles allow
    boards.admin        and runs what no profile names, if the node's owner allows that
    boards.controller   a server: everything but that; acting for somebody, only what that one may do
    boards.plain        callers on the listener without TLS: look and drive, and nothing else

A certificate identifies the caller. It must be of the authority that this node joined, and for one of these
roles; other boards and agents of other kinds have certificates of the same authority and are refused.

The signed list of revoked certificates is kept on disk, so that it holds after a restart without the server.
A list that is not signed by the authority that this node joined, or is older than the current one, is
ignored. If the list on disk cannot be verified, only the server is let in until it has sent another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import structlog
from cryptography import x509
from cryptography.x509.oid import NameOID

from fleetplane.domains.boards import fences
from fleetplane.domains.boards.access import ADMIN, CONTROLLER, OPERATOR, VIEWER
from fleetplane.domains.boards.agent.membership import BoardIdentityFolder
from fleetplane.domains.boards.agent.pins.rules import LEASE_SECONDS
from fleetplane.domains.boards.fences import Fence
from fleetplane.gen.boards import boards_pb2
from fleetplane.gen.pi_agent import pi_agent_pb2
from fleetplane.kernel.access import AccessTable, Grant, Permission, Principal, Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    FleetplaneError,
    IntegrityError,
    InvalidArgument,
    PermissionDenied,
    Unauthenticated,
)
from fleetplane.kernel.revocation_list import SIZE_LIMIT_BYTES, RevocationList, opened
from fleetplane.rpc import Authentication, CallContext, Connection, MethodRow, service_rows
from fleetplane.rpc.introspection import introspection_methods


@dataclass(slots=True)
class RevokedCallers:
    folder: BoardIdentityFolder
    log: structlog.typing.FilteringBoundLogger
    number: int = 0
    """Of the list that holds; 0 for none."""
    _serials: frozenset[str] = field(default=frozenset(), repr=False)
    _principals: frozenset[str] = field(default=frozenset(), repr=False)
    _closed: bool = False
    """Only the server is admitted, because the list of revocations is unknown."""

    def check(self, *, principal: str, serial: str, is_server: bool) -> None:
        """Raise `Unauthenticated` for a caller who was revoked; `serial` in hexadecimal."""
        if serial in self._serials or principal in self._principals:
            raise Unauthenticated(
                f"{principal} was revoked", hint="ask for another certificate", details={"cause": "revoked"}
            )
        if self._closed and not is_server:
            raise Unauthenticated(
                "this node does not know who was revoked, and lets in its server only",
                hint="go through the server",
                details={"cause": "revocations unknown"},
            )

    def load(self) -> None:
        """Take up what is on disk. Blocking."""
        try:
            with self.folder.revocations.open("rb") as file:
                packed = file.read(SIZE_LIMIT_BYTES + 1)
        except FileNotFoundError:
            return  # none was received yet
        except OSError as error:
            self._distrust(str(error))
            return
        try:
            self._use(opened(packed, self._authorities()))
        except FleetplaneError as error:
            self._distrust(error.message)

    def take(self, packed: bytes) -> bool:
        """Take up a list that the server sent; whether it holds now. Blocking."""
        try:
            found = opened(packed, self._authorities())
            if found.number < self.number:
                raise IntegrityError(f"list {found.number} is older than {self.number}, which holds")
        except FleetplaneError as error:
            self.log.error("revocations.refused", error=error.message, number=self.number)
            return False
        self.folder.write(self.folder.revocations, packed)
        self._use(found)
        self.log.info("revocations.taken", number=self.number, entries=len(self._serials | self._principals))
        return True

    def _use(self, found: RevocationList) -> None:
        self._serials, self._principals = frozenset(found.serials), frozenset(found.principals)
        self._closed = not found.complete
        self.number = found.number  # last: the loop reports it as the list that holds, from another thread

    def _distrust(self, reason: str) -> None:
        self._closed = True
        self.log.error("revocations.unreadable", file=str(self.folder.revocations), error=reason)

    def _authorities(self) -> list[x509.Certificate]:
        return x509.load_pem_x509_certificates(self.folder.credentials().authority_pem)


LISTENER: Final = "node"
PLAIN_LISTENER: Final = "node-plain"
PLAIN: Final = Role("boards.plain")

LOOK: Final = Permission("node.look")
DRIVE: Final = Permission("node.drive")
"""Pins and buses."""
RUN: Final = Permission("node.run")
READ_LOGS: Final = Permission("node.logs")

_MAY: Final[Mapping[Role, Iterable[Permission]]] = {
    VIEWER: (LOOK, READ_LOGS),
    OPERATOR: (LOOK, READ_LOGS, DRIVE, RUN),
    ADMIN: (LOOK, READ_LOGS, DRIVE, RUN),
    CONTROLLER: (LOOK, READ_LOGS, DRIVE, RUN),
    PLAIN: (LOOK, DRIVE),
}
ACCESS: Final = {
    role: tuple(Grant(permission=one) for one in permissions) for role, permissions in _MAY.items()
}

NODE_AGENT: Final = boards_pb2.DESCRIPTOR.services_by_name["NodeAgent"]
PI_AGENT: Final = pi_agent_pb2.DESCRIPTOR.services_by_name["PiAgentService"]
_NODE_AGENT: Final[Mapping[str, Permission]] = {
    "GetSystemMetrics": LOOK,
    "ControlGPIO": LOOK,  # reading; the service asks for more where a pin would change
    "ExecuteCommand": RUN,
    "StreamLogs": READ_LOGS,
    "HealthCheck": LOOK,
}
_PI_AGENT: Final[Mapping[str, Permission]] = {
    "ConfigureGPIOPin": DRIVE,
    "ReadGPIOPin": LOOK,
    "WriteGPIOPin": DRIVE,
    "SetGPIOPWM": DRIVE,
    "ListConfiguredPins": LOOK,
    "AgentHealth": LOOK,
    "GetSystemInfo": LOOK,
    "GetSystemMetrics": LOOK,
    "StreamSystemMetrics": LOOK,
    "SPIExchange": DRIVE,
    "SPIWrite": DRIVE,
    "SPIRead": DRIVE,
    "I2CWrite": DRIVE,
    "I2CRead": DRIVE,
    "I2CWriteRegister": DRIVE,
    "I2CReadRegister": DRIVE,
}
STREAMS_LIMIT: Final = 16
"""Of logs and of metrics, each: a log stream has a child process and a queue of megabytes."""
_ENDLESS: Final = frozenset({"StreamLogs", "StreamSystemMetrics"})

RELAYED: Final = Role("boards.relayed")
"""Accompanies a role that a server asserts for its operator. Grants nothing by itself."""
ON_BEHALF_OF: Final = "fleetplane-actor"
"""The metadata field in which a server names the user it acts for. Audited as a claim, not as proof."""
ROLE_OF_ACTOR: Final = "fleetplane-role"
LEASE_SECONDS_FIELD: Final = "fleetplane-lease-seconds"
"""For how long a call's lease is to last, if not for as long as usual."""
FENCE_FIELD: Final = "fleetplane-order"
"""The place of a server's order about a pin among those of all servers."""
ACTOR_LIMIT: Final = 256
URI_ROLE: Final = "fleetplane://role/"
URI_CONTROLLER: Final = "fleetplane://boards/controller/"
CERTIFICATES_REMEMBERED: Final = 256


def access_table() -> AccessTable:
    return AccessTable(ACCESS)


def rows(listener: str) -> Iterator[MethodRow]:
    """Everything over TLS; in plain text only what the original programs speak."""
    services = [(NODE_AGENT, _NODE_AGENT), (PI_AGENT, _PI_AGENT)]
    encrypted = listener == LISTENER
    for service, permissions in services if encrypted else services[1:]:
        yield from service_rows(
            service,
            permissions,
            listener=listener,
            authentication=Authentication.CERTIFICATE if encrypted else Authentication.LOCAL,
            endless=_ENDLESS,
            endless_concurrency=STREAMS_LIMIT,
        )
    yield from introspection_methods(listener)


def plain(connection: Connection) -> Principal:
    return Principal(name=f"plain/{connection.address}", roles=frozenset({PLAIN}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    principal: Principal
    serial: str
    not_after: float


class NodeDoor:
    """The authenticator of the listener with TLS. Whose authority it was, the handshake has settled."""

    def __init__(
        self, clock: Clock, *, refused: Iterable[str] = (), revoked: RevokedCallers | None = None
    ) -> None:
        """`refused`: principals and serial numbers (hexadecimal) that this node's owner keeps out."""
        self._clock = clock
        self._revoked = revoked
        self._refused = frozenset(one.lower() for one in refused)

    def __repr__(self) -> str:
        return f"<NodeDoor refused={len(self._refused)}>"

    def __call__(self, connection: Connection) -> Principal:
        if not connection.certificates:
            raise Unauthenticated("no client certificate was presented", details={"cause": "no certificate"})
        shown = _read(connection.certificates[0])
        if shown.not_after <= self._clock.now_ns() / 1e9:
            raise Unauthenticated("the certificate has expired", details={"cause": "expired"})
        if self._refused & {shown.principal.name.lower(), shown.serial}:
            raise Unauthenticated("this node does not accept that certificate", details={"cause": "refused"})
        if self._revoked is not None:
            self._revoked.check(
                principal=shown.principal.name,
                serial=shown.serial,
                is_server=CONTROLLER in shown.principal.roles,
            )
        if CONTROLLER in shown.principal.roles:
            said = connection.metadata(ROLE_OF_ACTOR)
            return _acting(shown.principal, said) if isinstance(said, str) and said else shown.principal
        return shown.principal

    def turns_away(self, connection: Connection) -> bool:
        """Whether a connection that was let in before would not be any more."""
        try:
            self(connection)
        except FleetplaneError:
            return True
        return False


@lru_cache(maxsize=CERTIFICATES_REMEMBERED)
def _read(pem: str) -> _Shown:
    try:
        leaf = x509.load_pem_x509_certificate(pem.encode())
        uris = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
            x509.UniformResourceIdentifier
        )
    except (ValueError, x509.ExtensionNotFound):
        uris = []
    roles = {uri.removeprefix(URI_ROLE) for uri in uris if uri.startswith(URI_ROLE)}
    known = roles & {VIEWER, OPERATOR, ADMIN, CONTROLLER}
    if len(known) != 1:
        raise PermissionDenied(
            "the certificate is not one of a server or an operator", details={"cause": "role"}
        )
    (role,) = known
    if role == CONTROLLER:
        names = [uri.removeprefix(URI_CONTROLLER) for uri in uris if uri.startswith(URI_CONTROLLER)]
        kind = "board-controller"
    else:
        names = [str(name.value) for name in leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        kind = "operator"
    if len(names) != 1 or not names[0]:
        raise Unauthenticated("the certificate names no single holder")
    return _Shown(
        principal=Principal(name=f"{kind}/{names[0]}", roles=frozenset({Role(role)})),
        serial=f"{leaf.serial_number:x}",
        not_after=leaf.not_valid_after_utc.timestamp(),
    )


@lru_cache(maxsize=CERTIFICATES_REMEMBERED)
def _acting(controller: Principal, role: str) -> Principal:
    """A server that says what its operator may do can do no more than that."""
    if role == CONTROLLER:
        return controller
    if role not in (VIEWER, OPERATOR, ADMIN):
        raise PermissionDenied(f"{role[:64]!r} is no role here", details={"cause": "role"})
    return Principal(name=controller.name, roles=frozenset({Role(role), RELAYED}))


def is_controller(principal: Principal) -> bool:
    return bool(principal.roles & {CONTROLLER, RELAYED})


def lease_seconds(context: CallContext) -> float:
    said = context.connection.metadata(LEASE_SECONDS_FIELD)
    if said is None:
        return LEASE_SECONDS
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise InvalidArgument(f"{LEASE_SECONDS_FIELD} is no number of seconds", field="lease_id")
    return seconds


def fence(context: CallContext) -> Fence | None:
    """The place of an order among those of several servers; ignored from any other caller."""
    said = context.connection.metadata(FENCE_FIELD)
    if said is None or not is_controller(context.principal):
        return None
    return fences.parsed(str(said), field=FENCE_FIELD)


def on_behalf_of(context: CallContext) -> str:
    """The user that a server acts on behalf of; ignored from any other caller."""
    said = context.connection.metadata(ON_BEHALF_OF)
    if not is_controller(context.principal) or not isinstance(said, str) or not said.isprintable():
        return ""
    return said[:ACTOR_LIMIT]
