"""From settings to listeners: which addresses, with which transport, for which application.

Plain text stays on the machine. What other machines can reach is TLS, or is refused unless
the operator says in so many words that it should not be.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fleetplane.domains import discovery
from fleetplane.domains.blueprint import Domain
from fleetplane.domains.declaration import Listener, Transport
from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.identity import Authority
from fleetplane.rpc import GrpcApp, ListenerSpec, TlsFiles
from fleetplane.rpc.listening.listeners import CONCURRENT_STREAMS, AsgiApp
from fleetplane.sections.base import DEFAULT_PLACE
from fleetplane.settings import Settings
from fleetplane.web.ops import OpsApp

UNSPECIFIED = frozenset({"", "0.0.0.0", "::"})  # noqa: S104  # recognised, not bound
"""Hosts that stand for every address and so for no name."""


ADMIN = "admin"
"""The owner's own socket: in the data directory, and nowhere else."""
OWN_NAMES = ("localhost", "127.0.0.1", "::1")
"""How this machine is always called by itself."""


WEB_IDLE_SECONDS = 120.0
"""How long a browser's or script's connection is held for its next request. Agents' have no such end:
a channel that is idle between calls is normal for them, and there are as many as there are agents."""


def web(settings: Settings, app: OpsApp, authority: Authority) -> ListenerSpec:
    """HTTP on loopback; TLS as soon as one of its addresses lies elsewhere."""
    addresses = settings.listeners.web.addresses
    remote = _remote(addresses)
    tls = ephemeral_tls(authority, remote) if remote else None
    return ListenerSpec(
        name="web", addresses=addresses, app=app, tls=tls, http1=True, idle_seconds=WEB_IDLE_SECONDS
    )


def is_web_remote(settings: Settings) -> bool:
    """Whether other machines can reach the web listener."""
    return bool(_remote(settings.listeners.web.addresses))


def _remote(addresses: Iterable[str]) -> list[str]:
    return [address for address in addresses if not is_local(address)]


def grpc(
    settings: Settings,
    apps: Mapping[str, GrpcApp],
    domains: Iterable[Domain],
    authority: Authority,
    *,
    owner: AsgiApp | None = None,
) -> list[ListenerSpec]:
    """A listener for each gRPC application, each with the transport that its domain declares.

    `owner` is what the owner's socket serves beside its gRPC application.
    """
    names = {name for domain in domains for name in domain.server_names}
    declared = {one.name: one for domain in discovery.installed().declarations for one in domain.listeners}
    return [
        admin(settings, owner or app)
        if name == ADMIN
        else opened(settings, declared[name], app, authority, names)
        for name, app in apps.items()
    ]


def opened(
    settings: Settings, listener: Listener, app: GrpcApp, authority: Authority, names: Iterable[str]
) -> ListenerSpec:
    """TLS with our own certificate, or plain text that stays on this machine unless the operator insists."""
    transport, wanted = listener.transport, settings.listener(listener.name)
    addresses = tuple(_placed(one, transport, settings.state_directory) for one in wanted.addresses)
    spec = ListenerSpec(name=listener.name, addresses=addresses, app=app, tls13_only=transport.tls13_only)
    if transport.unix_mode_setting:
        spec = replace(spec, unix_mode=int(getattr(wanted, transport.unix_mode_setting), 8))
    if transport.tls == "always" or (transport.tls == "setting" and wanted.is_encrypted):
        with_tokens = transport.tokens_setting and getattr(wanted, transport.tokens_setting)
        clients = "optional" if with_tokens else transport.client_certificates
        return encrypted(spec, authority, names, clients=clients)
    if not (transport.plaintext_setting and getattr(wanted, transport.plaintext_setting)):
        _require_local(listener, spec.addresses)
    return spec


def encrypted(
    spec: ListenerSpec,
    authority: Authority,
    names: Iterable[str] = (),
    *,
    clients: Literal["none", "optional", "required"] = "none",
) -> ListenerSpec:
    """The listener with TLS and our own certificate; callers show one of ours if `clients` says so."""
    tls = ephemeral_tls(authority, spec.addresses, names)
    if clients != "none":
        trust = MemoryFile(authority.trust_pem)
        tls = replace(tls, client_ca=trust.path, client_certificate=clients, held=(*tls.held, trust))
    return replace(spec, tls=tls)


def within_budget(settings: Settings, spec: ListenerSpec) -> ListenerSpec:
    """With the connections that the settings allow it, and one address of it."""
    if spec.name == ADMIN:
        return spec
    wanted = settings.listener(spec.name)
    return replace(
        spec,
        connections=wanted.connections,
        per_address=wanted.connections_per_address,
        streams=min(wanted.streams_per_connection, CONCURRENT_STREAMS),
    )


def admin(settings: Settings, app: AsgiApp) -> ListenerSpec:
    """The admin listener: a socket in the data directory that only its owner can open."""
    path = (Path(settings.data_dir) / "admin.sock").resolve()
    return ListenerSpec(name=ADMIN, addresses=(f"unix://{path}",), app=app, unix_mode=0o600, http1=True)


def _require_local(listener: Listener, addresses: Iterable[str]) -> None:
    key, transport = f"listeners.{listener.name}", listener.transport
    instead = f"set {key}.tls = true" if transport.tls == "setting" else "use loopback or a Unix socket"
    permit = f", or set {key}.{transport.plaintext_setting} = true" if transport.plaintext_setting else ""
    for address in _remote(addresses):
        raise SettingsError(
            f"{key}.addresses: other machines could reach {address}, in plain text", hint=instead + permit
        )


def _placed(address: str, transport: Transport, data_dir: Path) -> str:
    """Where the default socket is, for the address that stands for it."""
    if address != DEFAULT_PLACE or not transport.default_socket:
        return address
    default = Path(transport.default_socket)
    return f"unix://{default if os.geteuid() == 0 else (data_dir / default.name).resolve()}"


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
