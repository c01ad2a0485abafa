"""Who may do what with boards: roles, permissions, and the row of every method on every listener.

    boards.agent       a board's own agent: registers, reports, looks itself up
    boards.controller  another server: takes the state over, asks for provisioning
    boards.viewer      looks
    boards.operator    works with boards and their pins; includes the viewer
    boards.admin       everything; includes the operator

An agent may call a method that changes boards, but only for itself, which the service checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from google.protobuf.descriptor import ServiceDescriptor

from fleetplane.gen.boards import boards_pb2
from fleetplane.gen.pi_controller import pi_controller_pb2
from fleetplane.kernel import access as built_in
from fleetplane.kernel.access import Grant, Permission, Role
from fleetplane.rpc import Authentication, MethodRow, Needs, Rate, service_rows

LISTENER = "boards"
PLAIN_LISTENER = "boards-plain"

AGENT = Role("boards.agent")
PLAIN_AGENT = Role("boards.plain-agent")
"""An agent without any proof of who it is, on the listener for such."""
CONTROLLER = Role("boards.controller")
VIEWER = Role("boards.viewer")
OPERATOR = Role("boards.operator")
ADMIN = Role("boards.admin")
OPERATOR_ROLES = (VIEWER, OPERATOR, ADMIN)
CERTIFIED_ROLES = frozenset({AGENT, CONTROLLER, *OPERATOR_ROLES})
"""Roles that a certificate may carry."""

GREET = Permission("boards.greet")
"""Ask whether the server is there."""
REPORT = Permission("boards.report")
"""Say how one is: a board for itself, a controller for services."""
LOOK_UP = Permission("boards.look-up")
"""Find boards and clusters."""
ENTER = Permission("boards.enter")
"""Create or change boards; an agent only itself."""
READ = Permission("boards.read")
OPERATE = Permission("boards.operate")
PROVISION = Permission("boards.provision")
ADMINISTER = Permission("boards.administer")
SYNC = Permission("boards.sync")

_VIEWING = (GREET, LOOK_UP, READ)
_OPERATING = (*_VIEWING, ENTER, OPERATE, PROVISION)
_MAY: Mapping[Role, Iterable[Permission]] = {
    AGENT: (GREET, REPORT, LOOK_UP, ENTER),
    PLAIN_AGENT: (GREET, REPORT, LOOK_UP, ENTER),
    CONTROLLER: (*_VIEWING, SYNC, PROVISION, REPORT),
    VIEWER: _VIEWING,
    OPERATOR: _OPERATING,
    ADMIN: (*_OPERATING, ADMINISTER),
}
GRANTS: Mapping[Role, Iterable[Grant]] = {
    role: tuple(Grant(permission=permission) for permission in permissions)
    for role, permissions in _MAY.items()
} | built_in.built_in_grants(
    viewer=_VIEWING, operator=(ENTER, OPERATE, PROVISION), admin=(ADMINISTER,), owner=()
)

CONTROL_PLANE = boards_pb2.DESCRIPTOR.services_by_name["ControlPlane"]
PI_CONTROLLER = pi_controller_pb2.DESCRIPTOR.services_by_name["PiControllerService"]

REGISTRATION_RATE = Rate(per_second=5.0, burst=500, per="caller")
"""Per address: a rack that boots behind one address must get in, a guesser must not get far."""

_CONTROL_PLANE: Mapping[str, Permission] = {
    "SyncClusterState": SYNC,
    "RequestProvisioning": PROVISION,
    "ReportHealth": REPORT,
}
_PI_CONTROLLER: Mapping[str, Permission] = {
    "CreateCluster": OPERATE,
    "GetCluster": LOOK_UP,
    "ListClusters": LOOK_UP,
    "UpdateCluster": OPERATE,
    "DeleteCluster": ADMINISTER,
    "CreateNode": ENTER,
    "GetNode": LOOK_UP,
    "ListNodes": LOOK_UP,
    "UpdateNode": ENTER,
    "DeleteNode": ADMINISTER,
    "ProvisionNode": PROVISION,
    "DeprovisionNode": PROVISION,
    "CreateGPIODevice": OPERATE,
    "GetGPIODevice": READ,
    "ListGPIODevices": READ,
    "UpdateGPIODevice": OPERATE,
    "DeleteGPIODevice": ADMINISTER,
    "ReadGPIO": READ,
    "WriteGPIO": OPERATE,
    "StreamGPIOReadings": READ,
    "Health": GREET,
    "GetSystemInfo": READ,
    "InitializeCA": ADMINISTER,
    "GetCAInfo": READ,
    "GetCACertificate": READ,
    "IssueCertificate": ADMINISTER,
    "GetCertificate": READ,
    "ListCertificates": READ,
    "RenewCertificate": READ,  # one's own; the service asks for more where it is another's
    "RevokeCertificate": ADMINISTER,
    "ValidateCertificate": READ,
    "CreateCertificateRequest": OPERATE,
    "ProcessCertificateRequest": ADMINISTER,
    "ListCertificateRequests": OPERATE,
    "GetCertificateStats": READ,
    "CleanupExpiredCertificates": ADMINISTER,
    "StreamAgentMetrics": REPORT,
}
_READS = frozenset(
    {
        "SyncClusterState",
        "GetCluster",
        "ListClusters",
        "GetNode",
        "ListNodes",
        "GetGPIODevice",
        "ListGPIODevices",
        "GetCAInfo",
        "GetCACertificate",
        "GetCertificate",
        "ListCertificates",
        "ValidateCertificate",
        "ListCertificateRequests",
        "GetCertificateStats",
    }
)
"""What every server answers from its store."""
_ENDLESS = frozenset({"StreamGPIOReadings", "StreamAgentMetrics"})


def _rows(
    service: ServiceDescriptor,
    permissions: Mapping[str, Permission],
    *,
    listener: str,
    authentication: Authentication,
) -> Iterator[MethodRow]:
    yield from service_rows(
        service,
        permissions,
        listener=listener,
        authentication=authentication,
        endless=_ENDLESS & permissions.keys(),
        reads=_READS & permissions.keys(),
        needs=Needs.WRITES,
    )


METHODS = (
    MethodRow(
        path=f"/{CONTROL_PLANE.full_name}/RegisterNode",
        listener=LISTENER,
        # A board that registers has a join token inside its request, and no certificate yet.
        authentication=Authentication.ANONYMOUS,
        permission=None,
        rate=REGISTRATION_RATE,
        needs=Needs.WRITES,
    ),
    *_rows(CONTROL_PLANE, _CONTROL_PLANE, listener=LISTENER, authentication=Authentication.CERTIFICATE),
    *_rows(PI_CONTROLLER, _PI_CONTROLLER, listener=LISTENER, authentication=Authentication.CERTIFICATE),
    *_rows(PI_CONTROLLER, _PI_CONTROLLER, listener=PLAIN_LISTENER, authentication=Authentication.LOCAL),
)
