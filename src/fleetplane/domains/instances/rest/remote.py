"""REST: what operators and administrators do, by the same functions as over gRPC.

    POST /v1/instances/calls/{service}/{method}     {"request": …}, a message of the protocol as JSON

For those who have a token and no client certificate, such as the command line with a context. Each method
that can be called so stands in the table below with the permission that it asks for, and where; what is not
there, such as handing out private keys, is for the owner of the server's socket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
from google.protobuf import json_format
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from fleetplane.domains.instances.access import AS_ADMIN, AS_OPERATOR, VIEW, acting_for
from fleetplane.domains.instances.kinds import tenant_scope
from fleetplane.gen.fleetplane.admin.v1 import authority_pb2, instances_pb2
from fleetplane.gen.nstance.v1 import operator_pb2
from fleetplane.kernel.access import EVERYWHERE, Permission, Principal
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.web.rest.gate import OperatorCaller, RoleGate
from fleetplane.web.rest.routes import Answer, Call, Route, RouteGroup

_ROUTES = RouteGroup("Calls")

RemoteCall = Call[OperatorCaller]
OF_TENANT, OF_REQUEST, OF_SCOPE, OF_ALL = "tenant", "request", "scope", "all"
"""Where the permission is asked: at the tenant that the caller acts for, at the one that the request names,
at the scope that it names, or everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableMethod:
    """One method that can be called."""

    request: type[Message]
    permission: Permission
    where: str


def _operator(request: type[Message], permission: Permission = AS_OPERATOR) -> CallableMethod:
    return CallableMethod(request=request, permission=permission, where=OF_TENANT)


def _all(request: type[Message], permission: Permission = AS_ADMIN) -> CallableMethod:
    return CallableMethod(request=request, permission=permission, where=OF_ALL)


OFFERED: Mapping[tuple[str, str], CallableMethod] = {
    ("operator", "ListGroups"): _operator(Empty, VIEW),
    ("operator", "GetInstanceStatus"): _operator(operator_pb2.GetInstanceStatusRequest, VIEW),
    ("operator", "GetTenantStatus"): _operator(operator_pb2.GetTenantStatusRequest, VIEW),
    ("operator", "GetConfigStatus"): _operator(Empty, VIEW),
    ("operator", "UpsertGroup"): _operator(operator_pb2.UpsertGroupRequest),
    ("operator", "CreateInstance"): _operator(operator_pb2.CreateInstanceRequest),
    ("operator", "DeleteInstance"): _operator(operator_pb2.DeleteInstanceRequest),
    ("operator", "SleepTenant"): _operator(operator_pb2.SleepTenantRequest),
    ("operator", "WakeTenant"): _operator(operator_pb2.WakeTenantRequest),
    ("admin", "ListInstances"): CallableMethod(
        request=instances_pb2.ListInstancesRequest, permission=VIEW, where=OF_REQUEST
    ),
    ("admin", "DrainInstance"): CallableMethod(
        request=instances_pb2.DrainInstanceRequest, permission=AS_OPERATOR, where=OF_REQUEST
    ),
    ("admin", "ChangeGroup"): CallableMethod(
        request=instances_pb2.ChangeGroupRequest, permission=AS_OPERATOR, where=OF_REQUEST
    ),
    ("admin", "Freeze"): CallableMethod(
        request=instances_pb2.FreezeRequest, permission=AS_OPERATOR, where=OF_SCOPE
    ),
    ("admin", "Lift"): CallableMethod(
        request=instances_pb2.LiftRequest, permission=AS_OPERATOR, where=OF_SCOPE
    ),
    ("admin", "ListFreezes"): _all(instances_pb2.ListFreezesRequest, VIEW),
    ("admin", "Explain"): _all(instances_pb2.ExplainRequest, VIEW),
    ("admin", "RevokeClient"): CallableMethod(
        request=instances_pb2.RevokeClientRequest, permission=AS_ADMIN, where=OF_REQUEST
    ),
    ("admin", "ReinstateClient"): CallableMethod(
        request=instances_pb2.ReinstateClientRequest, permission=AS_ADMIN, where=OF_REQUEST
    ),
    ("admin", "CreateOperatorNonce"): CallableMethod(
        request=instances_pb2.CreateOperatorNonceRequest, permission=AS_ADMIN, where=OF_REQUEST
    ),
    ("admin", "CreateOperatorIdentity"): CallableMethod(
        request=instances_pb2.CreateOperatorIdentityRequest, permission=AS_ADMIN, where=OF_REQUEST
    ),
    ("admin", "RefreshConfiguration"): _all(instances_pb2.RefreshConfigurationRequest),
    ("admin", "PutSecret"): _all(instances_pb2.PutSecretRequest),
    ("authority", "GetAuthorities"): _all(authority_pb2.GetAuthoritiesRequest),
    ("authority", "AnnounceAuthority"): _all(authority_pb2.AnnounceAuthorityRequest),
    ("authority", "SwitchAuthority"): _all(authority_pb2.SwitchAuthorityRequest),
    ("authority", "RetireAuthority"): _all(authority_pb2.RetireAuthorityRequest),
    ("authority", "RotateNonceKey"): _all(authority_pb2.RotateNonceKeyRequest),
}


class CallBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    request: dict[str, Any] = msgspec.field(default_factory=dict)


class CallAnswer(msgspec.Struct, frozen=True, kw_only=True):
    response: dict[str, Any]


class RemoteCalls:
    """The routes, and who of the running domain answers them."""

    def __init__(self, services: Mapping[str, Any]) -> None:
        self._services = services
        self._gate: RoleGate[OperatorCaller] | None = None

    def __repr__(self) -> str:
        return f"<RemoteCalls {' '.join(self._services)}>"

    def routes(self, gate: RoleGate[OperatorCaller]) -> Sequence[Route]:
        """One for each method."""
        self._gate = gate
        return [
            _ROUTES.post(
                f"/calls/{service}/{method}",
                _named(f"call_{method}", self._handler(service, method, offered)),
                offered.permission,
                summary=f"{method}, as over gRPC",
                body=CallBody,
                answer=CallAnswer,
            )
            for (service, method), offered in OFFERED.items()
        ]

    def _handler(self, service: str, method: str, offered: CallableMethod) -> Callable[[RemoteCall], Any]:
        servicer = self._services[service]

        async def handle(call: RemoteCall) -> Answer[CallAnswer]:
            request = _parsed(offered.request(), call.body.request)
            principal = self._permitted(call, offered, request)
            # What these handlers take of a call over gRPC is who calls.
            response = await getattr(servicer, method)(request, SimpleNamespace(principal=principal))
            told = json_format.MessageToDict(response, preserving_proto_field_name=True)
            return Answer(content=CallAnswer(response=told))

        return handle

    def _permitted(self, call: RemoteCall, offered: CallableMethod, request: Message) -> Principal:
        """Who acts, once the permission holds where the request acts; raises `PermissionDenied`."""
        assert self._gate is not None
        caller = call.caller
        if offered.where == OF_TENANT:
            tenant = acting_for(caller, call.headers)
            self._gate.check(caller, offered.permission, tenant_scope(tenant))
            return Principal(name=f"operator/{tenant}/{caller.name}", roles=caller.principal.roles)
        self._gate.check(caller, offered.permission, _scope(offered.where, caller, request))
        return Principal(name=caller.name, roles=caller.principal.roles)


def _scope(where: str, caller: OperatorCaller, request: Any) -> str:
    """Where a request acts, as scopes are stored. One that names no tenant is the caller's own."""
    if where == OF_REQUEST:
        if not request.tenant and caller.tenant:
            request.tenant = caller.tenant
        return tenant_scope(request.tenant) if request.tenant else EVERYWHERE
    return str(request.scope) if where == OF_SCOPE else EVERYWHERE


def _parsed(request: Message, given: dict[str, Any]) -> Message:
    try:
        return json_format.ParseDict(given, request)
    except json_format.ParseError as error:
        raise InvalidArgument(f"is not such a message: {error}", field="request") from error


def _named(name: str, handler: Callable[[RemoteCall], Any]) -> Callable[[RemoteCall], Any]:
    """With the name that its operation has in the document."""
    handler.__qualname__ = name
    return handler
