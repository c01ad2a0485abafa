"""The agent with all its parts, put together in the order they stand on each other."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from fleetplane.domains.proxies.agent.agent import Bulletin, ProxyAgent, ProxyAgentParts, ProxyAgentPolicy
from fleetplane.domains.proxies.agent.commands import CommandHandler, NginxObserving
from fleetplane.domains.proxies.agent.credential import CredentialFile
from fleetplane.domains.proxies.agent.enrolment import ProxyEnroller
from fleetplane.domains.proxies.agent.nginx.applier import LEAST_GAP_SECONDS, VersionApplier
from fleetplane.domains.proxies.agent.nginx.confinement import Confinement
from fleetplane.domains.proxies.agent.nginx.confirmation import STEADY_SECONDS
from fleetplane.domains.proxies.agent.nginx.control import Nginx
from fleetplane.domains.proxies.agent.nginx.releases import StagedVersions
from fleetplane.domains.proxies.agent.nginx.staging import StagingStep
from fleetplane.domains.proxies.agent.observing.observed import ObservedNginx
from fleetplane.domains.proxies.agent.observing.reports import ObservingReports
from fleetplane.domains.proxies.agent.observing.takeover import Takeover
from fleetplane.domains.proxies.agent.outbox import ProxyOutbox
from fleetplane.domains.proxies.agent.reports.log_shipping import AccessLog, ErrorLog, Shipper, ShippingPolicy
from fleetplane.domains.proxies.agent.reports.machine import UsageSampler
from fleetplane.domains.proxies.agent.reports.observer import Observer
from fleetplane.domains.proxies.agent.reports.prober import ProberPolicy, UpstreamProber
from fleetplane.domains.proxies.agent.reports.upstream_health import UpstreamChange
from fleetplane.domains.proxies.agent.server_address import ServerAddress
from fleetplane.domains.proxies.agent.session import METRICS_SECONDS, ProxyNode, SessionReports
from fleetplane.domains.proxies.agent.updates import Updates
from fleetplane.domains.proxies.nginx.site import Site
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.node.connection import Follow, no_check_in
from fleetplane.node.logs.tail import ROTATE_BYTES, FileTail


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Times and sizes, as they are in service unless somebody says otherwise."""

    agent: ProxyAgentPolicy = field(default_factory=ProxyAgentPolicy)
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
    server: ServerAddress,
    introduction: pb.RegistrationRequest,
    clock: Clock,
    log: structlog.typing.FilteringBoundLogger,
    tuning: Tuning | None = None,
    witness: Callable[[StagingStep], None] = lambda _: None,
    confinement: Confinement | None = None,
    is_light: bool = False,
    check_in: Follow = no_check_in,
    observed: ObservedNginx | None = None,
    step: Callable[[str], None] = lambda _: None,
) -> ProxyAgent:
    """`observed` is an NGINX that serves until the agent is told to take it over, and to start its own.

    `confinement` is where foreign configurations are tested; without one they are refused.

    A light agent looks at keys and certificates in short-lived processes.
    """
    tuning = tuning or Tuning()
    confinement = confinement or Confinement(walls=frozenset())
    paths, releases, outbox = site.paths, StagedVersions(site.paths), ProxyOutbox()
    releases.prepare()
    bulletin, wake = Bulletin(outbox, clock), asyncio.Event()
    nginx = Nginx(site, clock, steady_seconds=tuning.steady_seconds)
    applier = VersionApplier(
        nginx=nginx,
        releases=releases,
        clock=clock,
        log=log,
        managed=managed or observed is not None,
        least_gap_seconds=tuning.least_gap_seconds,
        witness=witness,
    )

    def server_changed(change: UpstreamChange) -> None:
        bulletin.server_changed(change)
        wake.set()

    prober = UpstreamProber(applier=applier, clock=clock, log=log, told=server_changed, policy=tuning.prober)
    epoch = secrets.token_hex(8)
    tails = tuple(
        FileTail(
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
        machine=UsageSampler(paths.state),
        clock=clock,
    )
    health, observing = observer.health, None
    if observed is not None:
        takeover = Takeover(
            applier=applier,
            observed=observed,
            path=paths.takeover,
            clock=clock,
            log=log,
            changed=wake.set,
            step=step,
        )
        observing = NginxObserving(nginx=observed, takeover=takeover)
        health = ObservingReports(
            takeover=takeover, observed=observed, own=observer.health, clock=clock
        ).health
    updates = Updates(bulletin.status)
    commander = CommandHandler(
        applier=applier,
        nginx=nginx,
        confinement=confinement,
        outbox=outbox,
        clock=clock,
        log=log,
        status=lambda: _status(applier, nginx, prober, confinement),
        report_health=wake.set,
        observing=observing,
    )
    credential = CredentialFile(paths.credential)
    return ProxyAgent(
        parts=ProxyAgentParts(
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
            takeover=observing.takeover if observing is not None else None,
        ),
        node=ProxyNode(
            introduction=introduction,
            offer=updates.offer,
            learn_lineage=applier.learn_lineage,
            commander=commander,
            outbox=outbox,
            reports=SessionReports(
                health=health,
                metrics=observer.measurements,
                wake=wake,
                metrics_seconds=tuning.metrics_seconds,
            ),
            shippers=shippers,
            clock=clock,
            log=log,
            check_in=check_in,
            say_again_seconds=tuning.say_again_seconds,
        ),
        credential=credential,
        token=token,
        connect=server.channel,
        # Without TLS there is nobody to present a certificate to.
        enroller=None
        if server.plaintext
        else ProxyEnroller(
            file=credential,
            connect=server.channel,
            hostname=introduction.hostname,
            clock=clock,
            log=log,
            is_light=is_light,
        ),
        clock=clock,
        log=log,
        policy=tuning.agent,
    )


def _status(
    applier: VersionApplier, nginx: Nginx, prober: UpstreamProber, confinement: Confinement
) -> Mapping[str, object]:
    """What a person who asks would like to see."""
    master, live = nginx.master(), applier.live
    return {
        "running": master is not None,
        "pid": master.pid if master is not None else None,
        "workers": len(nginx.workers()),
        "nginx_version": nginx.site.binary.words,
        "release": live.name if live is not None else None,
        "config_version": live.manifest.version if live is not None else None,
        "test_sandbox": confinement.words,
        "document_roots": [str(root) for root in nginx.site.document_roots],
        "worker_user": nginx.site.worker_user or "the agent's own",
        "stopped_by_command": applier.stopped,
        "error": applier.broken,
        "servers_left_out": {name: sorted(servers) for name, servers in prober.verdicts.down().items()},
    }
