"""From settings to listeners: which addresses, with which transport, for which application.

Plain text stays on the machine. What other machines can reach is TLS, or is refused unless
the operator says in so many words that it should not be.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fleetplane.domains.blueprint import Domain
from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.identity import Authority
from fleetplane.rpc import GrpcApp, ListenerSpec, TlsFiles
from fleetplane.sections.listeners import DEFAULT_PLACE, DEFAULT_SOCKET
from fleetplane.settings import Settings
from fleetplane.web.ops import OpsApp

UNSPECIFIED = frozenset({"", "0.0.0.0", "::"})  # noqa: S104  # recognised, not bound
"""Hosts that stand for every address and so for no name."""


OWN_NAMES = ("localhost", "127.0.0.1", "::1")
"""How this machine is always called by itself."""


WEB_IDLE_SECONDS = 120.0
"""How long a browser's or script's connection is held for its next request. Agents' have no such end:
a channel that is idle between calls is normal for them, and there are as many as there are agents."""


def web(settings: Settings, app: OpsApp, authority: Authority) -> ListenerSpec:
    """HTTP on loopback; TLS as soon as one of its addresses lies elsewhere."""
    addresses = settings.listeners.web.addresses
    remote = [address for address in addresses if not is_local(address)]
    tls = ephemeral_tls(authority, remote) if remote else None
    return ListenerSpec(
        name="web", addresses=addresses, app=app, tls=tls, http1=True, idle_seconds=WEB_IDLE_SECONDS
    )


def grpc(
    settings: Settings, apps: Mapping[str, GrpcApp], domains: Iterable[Domain], authority: Authority
) -> list[ListenerSpec]:
    """A listener for each gRPC application, each with the transport its callers need."""
    names = {name for domain in domains for name in domain.server_names}
    makers: Mapping[str, Callable[[GrpcApp], ListenerSpec]] = {
        "device-api": lambda app: device_api(settings, app),
        "admin": lambda app: admin(settings, app),
        "registration": lambda app: encrypted(
            "registration", settings.listeners.registration.addresses, app, authority, names, clients="none"
        ),
        "operator": lambda app: encrypted(
            "operator", settings.listeners.operator.addresses, app, authority, names, clients="required"
        ),
        "agent": lambda app: encrypted(
            "agent", settings.listeners.agent.addresses, app, authority, names, clients="required"
        ),
        "proxy-agents": lambda app: proxy_agents(settings, app, authority, names),
        "boards": lambda app: encrypted(
            "boards", settings.listeners.boards.addresses, app, authority, names, clients="optional"
        ),
        "boards-plain": lambda app: boards_plain(settings, app),
        "edge": lambda app: edge(settings, app, authority, names),
    }
    return [makers[name](app) for name, app in apps.items()]


def encrypted(
    name: str,
    addresses: Sequence[str],
    app: GrpcApp,
    authority: Authority,
    names: Iterable[str],
    *,
    clients: Literal["none", "optional", "required"],
) -> ListenerSpec:
    """TLS with our own certificate; callers show one of ours if `clients` says so."""
    tls = ephemeral_tls(authority, addresses, names)
    if clients != "none":
        trust = MemoryFile(authority.trust_pem)
        tls = replace(tls, client_ca=trust.path, client_certificate=clients, held=(*tls.held, trust))
    return ListenerSpec(name=name, addresses=tuple(addresses), app=app, tls=tls)


def proxy_agents(
    settings: Settings, app: GrpcApp, authority: Authority, names: Iterable[str]
) -> ListenerSpec:
    """TLS, because private keys travel here; agents show a token, not a certificate."""
    wanted = settings.listeners.proxy_agents
    spec = encrypted("proxy-agents", wanted.addresses, app, authority, names, clients="none")
    return spec if wanted.tls else replace(spec, tls=None)


def boards_plain(settings: Settings, app: GrpcApp) -> ListenerSpec:
    """Plain text, for older agents that know nothing else; beyond this machine only if told twice."""
    wanted = settings.listeners.boards_plain
    if not wanted.allow_remote:
        _require_local(
            "listeners.boards-plain.addresses", wanted.addresses,
            hint="use loopback, or set listeners.boards-plain.allow_remote = true",
        )  # fmt: skip
    return ListenerSpec(name="boards-plain", addresses=wanted.addresses, app=app)


def edge(settings: Settings, app: GrpcApp, authority: Authority, names: Iterable[str]) -> ListenerSpec:
    """TLS of our own, or HTTP/2 in clear text behind an ingress; daemons show sealed messages."""
    wanted = settings.listeners.edge
    if wanted.tls:
        spec = encrypted("edge", wanted.addresses, app, authority, names, clients="none")
        return replace(spec, connections=wanted.connections)
    if not wanted.allow_remote_plaintext:
        _require_local(
            "listeners.edge.addresses", wanted.addresses,
            hint="set listeners.edge.tls = true, or listeners.edge.allow_remote_plaintext = true",
        )  # fmt: skip
    return ListenerSpec(name="edge", addresses=wanted.addresses, app=app, connections=wanted.connections)


def admin(settings: Settings, app: GrpcApp) -> ListenerSpec:
    """For whoever owns the data directory: a socket in it that nobody else can open."""
    path = (Path(settings.data_dir) / "admin.sock").resolve()
    return ListenerSpec(name="admin", addresses=(f"unix://{path}",), app=app, unix_mode=0o600)


def device_api(settings: Settings, app: GrpcApp) -> ListenerSpec:
    """Plain text for this node only: reaching the socket is the credential."""
    device = settings.listeners.device_api
    if not device.allow_remote_plaintext:
        _require_local(
            "listeners.device-api.addresses", device.addresses,
            hint="use loopback or a Unix socket, or set listeners.device-api.allow_remote_plaintext = true",
        )  # fmt: skip
    return ListenerSpec(
        name="device-api",
        addresses=tuple(_default_place(address, Path(settings.data_dir)) for address in device.addresses),
        app=app,
        unix_mode=int(device.socket_mode, 8),
    )


def _require_local(key: str, addresses: Iterable[str], *, hint: str) -> None:
    for address in addresses:
        if not is_local(address):
            raise SettingsError(f"{key}: other machines could reach {address}, in plain text", hint=hint)


def _default_place(address: str, data_dir: Path) -> str:
    if address != DEFAULT_PLACE:
        return address
    path = DEFAULT_SOCKET if os.geteuid() == 0 else (data_dir / "device.sock").resolve()
    return f"unix://{path}"


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address."""
    if address.startswith("unix:"):
        return True
    host = _host(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def ephemeral_tls(authority: Authority, addresses: Iterable[str], names: Iterable[str] = ()) -> TlsFiles:
    """A certificate for this run. Its key lives in memory only: nothing to leak at rest."""
    known = {_host(address) for address in addresses} | {*names, *OWN_NAMES, socket.gethostname()}
    issued = authority.issue_server(sorted(known - UNSPECIFIED))
    assert issued.key_pem is not None
    certificate, key = MemoryFile(issued.certificate_pem), MemoryFile(issued.key_pem)
    return TlsFiles(certificate=certificate.path, key=key.path, held=(certificate, key))


class MemoryFile:
    """A file that only this process can open, for as long as somebody holds on to it."""

    def __init__(self, content: bytes) -> None:
        self._descriptor = os.memfd_create("fleetplane", os.MFD_CLOEXEC)
        os.write(self._descriptor, content)
        self.path = Path(f"/proc/self/fd/{self._descriptor}")

    def __repr__(self) -> str:
        return f"<MemoryFile {self.path}>"

    def __del__(self) -> None:
        os.close(self._descriptor)
