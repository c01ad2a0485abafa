"""The node's own ports: everything over TLS with client certificates, and, if asked for, the original
service in plain text on this machine."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from fleetplane.domains.boards.agent.buses.buses import Buses
from fleetplane.domains.boards.agent.config import ListenSection
from fleetplane.domains.boards.agent.grpc.access import (
    LISTENER,
    NODE_AGENT,
    PI_AGENT,
    PLAIN_LISTENER,
    NodeDoor,
    access_table,
    plain,
    rows,
)
from fleetplane.domains.boards.agent.grpc.node_agent import NodeService
from fleetplane.domains.boards.agent.grpc.pi_agent import PiAgentService
from fleetplane.domains.boards.agent.membership import BoardIdentityFolder
from fleetplane.domains.boards.agent.state import BoardAgentState
from fleetplane.kernel.access import Principal
from fleetplane.kernel.errors import SettingsError
from fleetplane.rpc import (
    Authentication,
    Authenticator,
    CallStatistics,
    FixedPrincipal,
    GrpcApp,
    Listener,
    ListenerSpec,
    MethodTable,
    RpcLimits,
    TlsFiles,
    open_listener,
)
from fleetplane.rpc.introspection import HealthBoard, add_reflection

GRACE_SECONDS: Final = 3.0
"""For running calls, when the agent stops; a command takes two seconds to end."""
CONNECTIONS: Final = 256
REQUEST_LIMIT_BYTES: Final = 1024 * 1024
ACTIVE_CALLS: Final = 256
ANONYMOUS: Final = Principal(name="anonymous", roles=frozenset())


def app_for(
    listener: str, node: BoardAgentState, buses: Buses, *, door: Authenticator, health: HealthBoard
) -> GrpcApp:
    authenticators: Mapping[Authentication, Authenticator] = {
        Authentication.ANONYMOUS: FixedPrincipal(ANONYMOUS),
        Authentication.CERTIFICATE: door,
        Authentication.LOCAL: plain,
    }
    app = GrpcApp(
        listener=listener,
        table=MethodTable(rows(listener)),
        access=access_table(),
        authenticators=authenticators,
        clock=node.clock,
        statistics=CallStatistics(),
        limits=RpcLimits(max_request_bytes=REQUEST_LIMIT_BYTES, active_calls=ACTIVE_CALLS),
    )
    if listener == LISTENER:
        app.add_service(NODE_AGENT, NodeService(node))
    app.add_service(PI_AGENT, PiAgentService(node, buses))
    health.add_to(app)
    add_reflection(app)
    app.seal()
    return app


def tls_files(folder: BoardIdentityFolder) -> TlsFiles:
    return TlsFiles(
        certificate=folder.certificate_file,
        key=folder.key_file,
        client_ca=folder.authority_file,
        client_certificate="required",
    )


@dataclass(slots=True, kw_only=True)
class Ports:
    """What is open."""

    tls: Listener | None
    plain: Listener | None
    folder: BoardIdentityFolder
    tls_app: GrpcApp | None = None
    door: NodeDoor | None = None

    @property
    def addresses(self) -> dict[str, list[str]]:
        return {one.name: one.addresses for one in (self.tls, self.plain) if one is not None}

    @property
    def agent_port(self) -> int:
        """Where a server reaches us; 0 if it cannot."""
        return int(self.tls.addresses[0].rpartition(":")[2]) if self.tls is not None else 0

    async def renew(self) -> None:
        """Present the certificate that is on disk now, and trust whom that says."""
        if self.tls is not None:
            await self.tls.renew(tls_files(self.folder))

    def turn_away_the_revoked(self) -> int:
        """End the running calls of those who would not be let in any more; how many there were."""
        if self.tls_app is None or self.door is None:
            return 0
        return self.tls_app.end_calls_where(self.door.turns_away)


@asynccontextmanager
async def open_ports(
    wanted: ListenSection,
    node: BoardAgentState,
    buses: Buses,
    folder: BoardIdentityFolder,
    *,
    joined: bool,
    door: NodeDoor,
) -> AsyncIterator[Ports]:
    health = HealthBoard()
    specs: list[ListenerSpec] = []
    apps: list[GrpcApp] = []
    if joined:
        app = app_for(LISTENER, node, buses, door=door, health=health)
        addresses = tuple(_with_port(address, wanted.port) for address in wanted.addresses)
        specs.append(
            ListenerSpec(
                name=LISTENER, addresses=addresses, app=app, tls=tls_files(folder), connections=CONNECTIONS
            )
        )
        apps.append(app)
    if wanted.plaintext:
        require_local(wanted)
        app = app_for(PLAIN_LISTENER, node, buses, door=door, health=health)
        specs.append(
            ListenerSpec(name=PLAIN_LISTENER, addresses=(wanted.plaintext,), app=app, connections=CONNECTIONS)
        )
        apps.append(app)
    async with _opened(specs) as listeners:
        by_name = {one.name: one for one in listeners}
        await health.serving()
        try:
            yield Ports(
                tls=by_name.get(LISTENER),
                plain=by_name.get(PLAIN_LISTENER),
                folder=folder,
                door=door,
                tls_app=apps[0] if joined else None,
            )
        finally:
            for one in listeners:
                one.stop_accepting()
            await health.draining()
            for app in apps:
                await app.drain(GRACE_SECONDS)


@asynccontextmanager
async def _opened(specs: list[ListenerSpec]) -> AsyncIterator[list[Listener]]:
    if not specs:
        yield []
        return
    async with (
        open_listener(specs[0], grace_seconds=GRACE_SECONDS) as first,
        _opened(specs[1:]) as others,
    ):
        yield [first, *others]


def require_local(wanted: ListenSection) -> None:
    """Refuse a plain-text listener beyond this machine, unless the node's owner allows it explicitly."""
    host = wanted.plaintext.rpartition(":")[0].strip("[]")
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and not wanted.allow_remote_plaintext:
        raise SettingsError(
            f"listen.plaintext: anyone on other machines could use {wanted.plaintext}",
            field="listen.plaintext",
            hint="use 127.0.0.1, or set listen.allow_remote_plaintext = true",
        )


def _with_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address and not address.startswith("[") else f"{address}:{port}"
