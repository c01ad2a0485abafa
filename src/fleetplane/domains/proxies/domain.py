"""The proxies domain: its kinds, methods, services, routes and controllers, in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Kernel, Service
from fleetplane.domains.proxies.access import grants
from fleetplane.domains.proxies.kinds import KINDS
from fleetplane.domains.proxies.ports import NobodyThere
from fleetplane.domains.proxies.rest_side import RestOptions, RestSide
from fleetplane.domains.proxies.vault import Vault
from fleetplane.domains.proxies.workspaces import Workspaces
from fleetplane.rpc import Authentication, Authenticator
from fleetplane.web.ops import Mount

BLUEPRINT = Blueprint(name="proxies", kinds=KINDS, methods=(), grants=grants())


class ProxyDomain:
    """See `create`; the constructor takes what has been built."""

    def __init__(self, rest: RestSide) -> None:
        self._rest = rest
        self.services: Sequence[Service] = ()
        self.authenticators: Mapping[str, Mapping[Authentication, Authenticator]] = {}
        self.server_names: Sequence[str] = ()
        self.collectors: Sequence[Collector] = ()

    @classmethod
    async def create(cls, kernel: Kernel, options: RestOptions) -> ProxyDomain:
        vault = Vault(kernel.store, kernel.master)
        workspaces = Workspaces(kernel.store, vault)
        nobody = NobodyThere()
        rest = await RestSide.create(
            kernel, options, workspaces=workspaces, vault=vault,
            presence=nobody, commander=nobody, records=nobody,
        )  # fmt: skip
        return cls(rest)

    @property
    def routes(self) -> Sequence[Mount]:
        return self._rest.routes

    @property
    def notices(self) -> Sequence[str]:
        return self._rest.notices

    async def prepare(self) -> None:
        await self._rest.prepare()

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        pass

    async def run(self) -> None:
        await self._rest.run()

    def drain(self) -> None:
        pass
