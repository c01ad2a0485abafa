"""`fleetplane agent proxy`: the agent of this machine's NGINX, composed in order of dependency."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fleetplane import __version__, logs
from fleetplane.agents.running import until_stopped
from fleetplane.domains.proxies.agent.agent import Bulletin, ProxyAgent, ProxyAgentParts, ProxyAgentPolicy
from fleetplane.domains.proxies.agent.commands import NO_SANDBOX, CommandHandler, NginxObserving
from fleetplane.domains.proxies.agent.enrolment import CredentialFile, ProxyEnroller, ServerAddress
from fleetplane.domains.proxies.agent.log_shipping import AccessLog, ErrorLog, Shipper, ShippingPolicy
from fleetplane.domains.proxies.agent.nginx import confinement as workers
from fleetplane.domains.proxies.agent.nginx.applier import LEAST_GAP_SECONDS, VersionApplier
from fleetplane.domains.proxies.agent.nginx.confinement import Confinement
from fleetplane.domains.proxies.agent.nginx.confirmation import STEADY_SECONDS
from fleetplane.domains.proxies.agent.nginx.control import Nginx, find_binary
from fleetplane.domains.proxies.agent.nginx.releases import StagedVersions
from fleetplane.domains.proxies.agent.nginx.staging import StagingStep
from fleetplane.domains.proxies.agent.observer import Observer, UsageSampler
from fleetplane.domains.proxies.agent.observing.configuration import ReadingPolicy
from fleetplane.domains.proxies.agent.observing.observed import ObservedNginx, built
from fleetplane.domains.proxies.agent.observing.origin import NginxOrigin
from fleetplane.domains.proxies.agent.observing.reports import ObservingReports
from fleetplane.domains.proxies.agent.observing.takeover import Takeover
from fleetplane.domains.proxies.agent.outbox import ProxyOutbox, Updates
from fleetplane.domains.proxies.agent.prober import ProberPolicy, UpstreamChange, UpstreamProber
from fleetplane.domains.proxies.agent.session import METRICS_SECONDS, ProxyNode, SessionReports
from fleetplane.domains.proxies.nginx.paths import DEFAULT_DOCUMENT_ROOTS
from fleetplane.domains.proxies.nginx.site import OBSERVES, Binary, Paths, Site
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.errors import SettingsError
from fleetplane.node.connection import Follow, no_check_in
from fleetplane.node.host.proc import address_towards
from fleetplane.node.lock import Occupied, sole_user
from fleetplane.node.logs.tail import ROTATE_BYTES, FileTail

if TYPE_CHECKING:
    import structlog

    from fleetplane.node.upgrade.upgrader import Upgrader


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyAgentSettings:
    server: str
    """`host:port` of the server's listener for NGINX agents."""
    state_dir: Path
    authority: Path | None = None
    """CA certificates to verify the server against; else the system's."""
    plaintext: bool = False
    token: str = ""
    """Only needed once."""
    managed: bool = False
    """NGINX is the agent's own: started, supervised and adopted again after a restart of the agent."""
    stop_nginx_on_exit: bool = False
    observe: bool = False
    """Start beside an NGINX that runs already, and look on until told to take it over."""
    observed_config: Path | None = None
    """Its configuration; else where the program was built to look."""
    observed_folders: tuple[Path, ...] = ()
    """Whose files and logs may be shown, beside those of the configuration and of the system."""
    observed_keys: bool = False
    """Whether certificates may be sent with their private keys, when an administrator asks for it."""
    nginx: Path = Path("/usr/sbin/nginx")
    listen_addresses: tuple[str, ...] = ()
    """Else all, of both families where the machine has them."""
    ports: Mapping[int, int] = field(default_factory=dict)
    """Ports that are served under another number."""
    acme_responder: str = ""
    repair_drift: bool = False
    """Write configuration files anew that somebody changed by hand."""
    workers: str = "auto"
    document_roots: tuple[Path, ...] = ()
    """The only folders that files are served from; else the web folders of common distributions."""
    worker_user: str = ""
    """The user of NGINX's workers where the agent is root; by default a usual user of web servers."""
    work_dir: Path | None = None
    """Logs and scratch files, for workers of another user; else beside the state directory."""
    hostname: str = ""
    ip_address: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    deployment_mode: str = "standalone"
    tuning: Tuning = field(default_factory=Tuning)
    log_format: str = "text"
    log_level: str = "info"


MIME_TYPES = Path("/etc/nginx/mime.types")
CA_BUNDLES = (
    Path("/etc/ssl/certs/ca-certificates.crt"),
    Path("/etc/pki/tls/certs/ca-bundle.crt"),
    Path("/etc/ssl/cert.pem"),
)
"""Where distributions list the authorities that they trust."""


async def run_proxy_agent(settings: ProxyAgentSettings, upgrader: Upgrader | None = None) -> None:
    """Drive this machine's NGINX until SIGTERM or SIGINT. NGINX stays, unless it is to go too."""
    logs.configure(level=settings.log_level, log_format=settings.log_format)
    log = logs.logger(agent="proxy")
    state = settings.state_dir.absolute()
    worker_user = workers.worker_user(settings.worker_user)
    clock = SystemClock()
    paths = Paths(state=state, work=workers.work_folder(state, settings.work_dir, managed=settings.managed))
    paths.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    binary = await find_binary(settings.nginx)
    site = Site(
        paths=paths,
        binary=binary,
        addresses=settings.listen_addresses or _all_addresses(),
        ports=settings.ports,
        acme_responder=settings.acme_responder,
        mime_types=_if_there(MIME_TYPES),
        ca_bundle=next((one for path in CA_BUNDLES if (one := _if_there(path)) is not None), None),
        workers=settings.workers,
        document_roots=settings.document_roots or tuple(map(Path, DEFAULT_DOCUMENT_ROOTS)),
        worker_user=worker_user,
    )
    site.check_document_roots()
    confinement = await Confinement.probe(avoid=workers.user_ids(worker_user))
    if not confinement.holds:
        log.warning("foreign_configurations_are_refused", reason=NO_SANDBOX)
    server = ServerAddress(
        address=settings.server, authority=settings.authority, plaintext=settings.plaintext
    )
    introduction = agent_pb2.RegistrationRequest(
        hostname=settings.hostname or socket.gethostname(),
        ip_address=settings.ip_address
        or await asyncio.to_thread(address_towards, settings.server, socket.AF_INET),
        version=__version__,
        capabilities=(
            *binary.capabilities(),
            *((OBSERVES,) if settings.observe else ()),
            f"test-sandbox-{confinement.words}",
        ),
        labels=settings.labels,
        deployment_mode=settings.deployment_mode.upper(),
    )
    if hidden := _hidden_from_workers(paths):
        log.warning("workers_cannot_reach_logs", folder=str(hidden))
    with _alone_in(paths):
        if settings.observe and not paths.takeover.exists() and Nginx(site, clock).master() is not None:
            raise SettingsError(
                f"--observe: {paths.state} has an NGINX of its own, which runs",
                hint="choose another state directory for an agent that observes",
            )
        agent = assemble(
            site=site,
            managed=settings.managed,
            token=settings.token,
            server=server,
            introduction=introduction,
            clock=clock,
            log=log,
            tuning=_tuning(settings),
            confinement=confinement,
            is_light=True,
            check_in=upgrader.follow if upgrader is not None else no_check_in,
            observed=await _observed(settings, binary, clock) if settings.observe else None,
        )
        log.info("agent_started", version=__version__, nginx=binary.words, state=str(paths.state))
        await until_stopped(agent.run(), upgrader)
        is_upgraded = upgrader is not None and upgrader.ready.is_set()
        if settings.managed and settings.stop_nginx_on_exit and not is_upgraded:
            await Nginx(site, clock).stop(graceful=True, within_seconds=5.0)
    log.info("agent_stopped")


async def _observed(settings: ProxyAgentSettings, binary: Binary, clock: Clock) -> ObservedNginx:
    built_in = await built(binary.path)
    systemctl = shutil.which("systemctl")
    place = NginxOrigin(
        program=binary.path,
        config=settings.observed_config or built_in.config,
        default_config=built_in.config,
        systemctl=Path(systemctl) if systemctl is not None else None,
    )
    if not place.config.is_file():
        raise SettingsError(
            f"--observed-config: {place.config} is not a file",
            hint="name the nginx.conf of the running NGINX",
        )
    policy = ReadingPolicy(folders=settings.observed_folders)
    return ObservedNginx(
        place=place,
        built_in=built_in,
        binary=binary,
        policy=policy,
        clock=clock,
        sends_keys=settings.observed_keys,
    )


def _tuning(settings: ProxyAgentSettings) -> Tuning:
    policy = replace(settings.tuning.agent, repair_drift=settings.repair_drift)
    return replace(settings.tuning, agent=policy)


def _if_there(path: Path) -> Path | None:
    return path if path.exists() else None


def _all_addresses() -> tuple[str, ...]:
    """The wildcard addresses of both families, or of IPv4 only on a machine without IPv6."""
    everywhere = "0.0.0.0"  # noqa: S104  # a proxy is there to be reached
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return (everywhere,)
    return (everywhere, "[::]")


def _hidden_from_workers(paths: Paths) -> Path | None:
    """The folder that keeps NGINX's workers from their logs and scratch files."""
    if paths.work is None:
        return None
    return next((folder for folder in paths.work.parents if not folder.stat().st_mode & 0o001), None)


@contextmanager
def _alone_in(paths: Paths) -> Iterator[None]:
    """Two agents on one state directory would undo each other's work."""
    with ExitStack() as held:
        try:
            held.enter_context(sole_user(paths.lock, whose="another agent"))
        except Occupied as error:
            raise SettingsError(error.message) from error
        yield
