"""`fleetplane agent proxy`: this machine's NGINX."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import structlog

from fleetplane import logs
from fleetplane.agents.running import until_stopped
from fleetplane.domains.instances.agent.machine import address_towards
from fleetplane.domains.proxies.agent.assembly import Tuning, assemble
from fleetplane.domains.proxies.agent.link import ServerAddress
from fleetplane.domains.proxies.agent.nginx import Nginx, find_binary
from fleetplane.domains.proxies.agent.site import Paths, Site
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyAgentSettings:
    server: str
    """`host:port` of the server's listener for NGINX agents."""
    state_dir: Path
    authority: Path | None = None
    """Whom to trust as the server; else whom the machine trusts."""
    plaintext: bool = False
    token: str = ""
    """Only needed once."""
    managed: bool = False
    """NGINX is the agent's own: started, supervised and adopted again after a restart of the agent."""
    stop_nginx_on_exit: bool = False
    nginx: Path = Path("/usr/sbin/nginx")
    listen_addresses: tuple[str, ...] = ()
    """Else all, of both families where the machine has them."""
    ports: Mapping[int, int] = field(default_factory=dict)
    """Ports that are served under another number."""
    acme_responder: str = ""
    workers: str = "auto"
    hostname: str = ""
    ip_address: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    deployment_mode: str = "standalone"
    tuning: Tuning = field(default_factory=Tuning)
    log_format: str = "text"
    log_level: str = "info"


MIME_TYPES = Path("/etc/nginx/mime.types")


async def run_proxy_agent(settings: ProxyAgentSettings) -> None:
    """Drive this machine's NGINX until SIGTERM or SIGINT. NGINX stays, unless it is to go too."""
    logs.configure(level=settings.log_level, log_format=settings.log_format)
    log: structlog.typing.FilteringBoundLogger = structlog.get_logger().bind(agent="proxy")
    clock, paths = SystemClock(), Paths(state=settings.state_dir.absolute())
    paths.state.mkdir(parents=True, exist_ok=True)
    binary = await find_binary(settings.nginx)
    site = Site(
        paths=paths,
        binary=binary,
        addresses=settings.listen_addresses or _all_addresses(),
        ports=settings.ports,
        acme_responder=settings.acme_responder,
        mime_types=_if_there(MIME_TYPES),
        workers=settings.workers,
    )
    server = ServerAddress(
        address=settings.server, authority=settings.authority, plaintext=settings.plaintext
    )
    introduction = agent_pb2.RegistrationRequest(
        hostname=settings.hostname or socket.gethostname(),
        ip_address=settings.ip_address
        or await asyncio.to_thread(address_towards, settings.server, socket.AF_INET),
        version=version("fleetplane"),
        capabilities=binary.capabilities(),
        labels=settings.labels,
        deployment_mode=settings.deployment_mode.upper(),
    )
    if hidden := _hidden_from_workers(paths.state):
        log.warning("workers_cannot_reach_state", folder=str(hidden))
    with _alone_in(paths):
        agent = assemble(
            site=site, managed=settings.managed, token=settings.token, connect=server.channel,
            introduction=introduction, clock=clock, log=log, tuning=settings.tuning,
        )  # fmt: skip
        log.info("agent_started", version=version("fleetplane"), nginx=binary.words, state=str(paths.state))
        await until_stopped(agent.run())
        if settings.managed and settings.stop_nginx_on_exit:
            await Nginx(site, clock).stop(graceful=True, within_seconds=5.0)
    log.info("agent_stopped")


def _if_there(path: Path) -> Path | None:
    return path if path.exists() else None


def _all_addresses() -> tuple[str, ...]:
    """Of both families; a machine without IPv6 would refuse to bind its address."""
    everywhere = "0.0.0.0"  # noqa: S104  # a proxy is there to be reached
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return (everywhere,)
    return (everywhere, "[::]")


def _hidden_from_workers(state: Path) -> Path | None:
    """The folder that keeps NGINX's workers, who are nobody under root, from their logs and scratch files."""
    if os.geteuid() != 0:
        return None
    return next((folder for folder in state.parents if not folder.stat().st_mode & 0o001), None)


@contextmanager
def _alone_in(paths: Paths) -> Iterator[None]:
    """Two agents on one state directory would undo each other's work."""
    with paths.lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SettingsError(f"another agent works in {paths.state}") from error
        yield
