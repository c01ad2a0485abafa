"""The agent with all its parts, put together in the order they stand on each other."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import grpc.aio
import structlog

from fleetplane.domains.proxies.agent.applier import LEAST_GAP_SECONDS, Applier, Step
from fleetplane.domains.proxies.agent.commands import Commander
from fleetplane.domains.proxies.agent.confirmation import STEADY_SECONDS
from fleetplane.domains.proxies.agent.credential import CredentialFile
from fleetplane.domains.proxies.agent.health import Change
from fleetplane.domains.proxies.agent.machine import Machine
from fleetplane.domains.proxies.agent.nginx import Nginx
from fleetplane.domains.proxies.agent.observer import Observer
from fleetplane.domains.proxies.agent.outbox import Outbox
from fleetplane.domains.proxies.agent.prober import Prober, ProberPolicy
from fleetplane.domains.proxies.agent.proxy_agent import AgentPolicy, Bulletin, Parts, ProxyAgent
from fleetplane.domains.proxies.agent.releases import Releases
from fleetplane.domains.proxies.agent.session import METRICS_SECONDS, Node, Reports
from fleetplane.domains.proxies.agent.shipping import AccessLog, ErrorLog, Shipper, ShippingPolicy
from fleetplane.domains.proxies.agent.site import Site
from fleetplane.domains.proxies.agent.tail import ROTATE_BYTES, Tail
from fleetplane.domains.proxies.agent.updates import Updates
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Times and sizes, as they are in service unless somebody says otherwise."""

    agent: AgentPolicy = field(default_factory=AgentPolicy)
    prober: ProberPolicy = field(default_factory=ProberPolicy)
    shipping: ShippingPolicy = field(default_factory=ShippingPolicy)
    steady_seconds: float = STEADY_SECONDS
    least_gap_seconds: float = LEAST_GAP_SECONDS
    metrics_seconds: float = METRICS_SECONDS
    rotate_bytes: int = ROTATE_BYTES
    say_again_seconds: float = 5.0


def assemble(
    *,
    site: Site,
    managed: bool,
    token: str,
    connect: Callable[[], grpc.aio.Channel],
    introduction: pb.RegistrationRequest,
    clock: Clock,
    log: structlog.typing.FilteringBoundLogger,
    tuning: Tuning | None = None,
    witness: Callable[[Step], None] = lambda _: None,
) -> ProxyAgent:
    tuning = tuning or Tuning()
    paths, releases, outbox = site.paths, Releases(site.paths), Outbox()
    releases.prepare()
    bulletin, wake = Bulletin(outbox, clock), asyncio.Event()
    nginx = Nginx(site, clock, steady_seconds=tuning.steady_seconds)
    applier = Applier(
        nginx=nginx,
        releases=releases,
        clock=clock,
        log=log,
        managed=managed,
        least_gap_seconds=tuning.least_gap_seconds,
        witness=witness,
    )

    def server_changed(change: Change) -> None:
        bulletin.server_changed(change)
        wake.set()

    prober = Prober(applier=applier, clock=clock, log=log, told=server_changed, policy=tuning.prober)
    epoch = secrets.token_hex(8)
    tails = tuple(
        Tail(
            log_file, paths.state / f"{log_file.stem}.position", epoch=epoch, rotate_bytes=tuning.rotate_bytes
        )
        for log_file in (paths.access_log, paths.error_log)
    )
    access_log, error_log = AccessLog(tails[0]), ErrorLog(tails[1])
    shippers = tuple(
        Shipper(one, clock=clock, logger=log, policy=tuning.shipping) for one in (access_log, error_log)
    )
    observer = Observer(
        applier=applier,
        nginx=nginx,
        prober=prober,
        access_log=access_log,
        shippers=shippers,
        outbox=outbox,
        machine=Machine(paths.state),
        clock=clock,
    )
    updates = Updates(bulletin.status)
    commander = Commander(
        applier=applier,
        nginx=nginx,
        outbox=outbox,
        clock=clock,
        log=log,
        status=lambda: _status(applier, nginx, prober),
        report_health=wake.set,
    )
    return ProxyAgent(
        parts=Parts(
            applier=applier,
            releases=releases,
            prober=prober,
            observer=observer,
            commander=commander,
            updates=updates,
            outbox=outbox,
            bulletin=bulletin,
            tails=tails,
            wake=wake,
        ),
        node=Node(
            introduction=introduction,
            offer=updates.offer,
            commander=commander,
            outbox=outbox,
            reports=Reports(
                health=observer.health,
                metrics=observer.measurements,
                wake=wake,
                metrics_seconds=tuning.metrics_seconds,
            ),
            shippers=shippers,
            clock=clock,
            log=log,
            say_again_seconds=tuning.say_again_seconds,
        ),
        credential=CredentialFile(paths.credential),
        token=token,
        connect=connect,
        clock=clock,
        log=log,
        policy=tuning.agent,
    )


def _status(applier: Applier, nginx: Nginx, prober: Prober) -> Mapping[str, object]:
    """What a person who asks would like to see."""
    master, live = nginx.master(), applier.live
    return {
        "running": master is not None,
        "pid": master.pid if master is not None else None,
        "workers": len(nginx.workers()),
        "nginx_version": nginx.site.binary.words,
        "release": live.name if live is not None else None,
        "config_version": live.manifest.version if live is not None else None,
        "stopped_by_command": applier.stopped,
        "error": applier.broken,
        "servers_left_out": {name: sorted(servers) for name, servers in prober.verdicts.down().items()},
    }
