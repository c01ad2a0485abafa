"""The operators domain: there whenever another domain takes the tokens it makes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Kernel, Service
from fleetplane.domains.operators.service import OperatorsService
from fleetplane.gen.fleetplane.admin.v1 import operators_pb2
from fleetplane.kernel.access import Grant, Permission, Role
from fleetplane.rpc import Authentication, Authenticator, MethodRow
from fleetplane.web.ops import Mount

LISTENER = "admin"
MANAGE = Permission("operators.manage")

_SERVICE = operators_pb2.DESCRIPTOR.services_by_name["OperatorsAdmin"]

BLUEPRINT = Blueprint(
    name="operators",
    kinds=(),
    methods=tuple(
        MethodRow(
            path=f"/{_SERVICE.full_name}/{method.name}",
            listener=LISTENER,
            authentication=Authentication.LOCAL,
            permission=MANAGE,
        )
        for method in _SERVICE.methods
    ),
    grants={Role("local"): (Grant(permission=MANAGE),)},
)


class OperatorsDomain:
    def __init__(self, kernel: Kernel, *, roles: Collection[Role]) -> None:
        """`roles` are those that other domains give a meaning to."""
        self._operators = kernel.operators
        self._service = OperatorsService(kernel.operators, roles=roles)
        self.services: Sequence[Service] = (
            Service(listener=LISTENER, descriptor=_SERVICE, servicer=self._service),
        )
        self.authenticators: Mapping[str, Mapping[Authentication, Authenticator]] = {}
        self.server_names: Sequence[str] = ()
        self.collectors: Sequence[Collector] = ()
        self.routes: Sequence[Mount] = ()
        self.notices: Sequence[str] = ()

    async def prepare(self) -> None:
        await self._operators.offer_sessions()

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        self._service.web_addresses = tuple(addresses.get("web", ()))

    async def run(self) -> None:
        await asyncio.Event().wait()

    def drain(self) -> None:
        pass
