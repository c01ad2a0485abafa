"""The daemon with all its parts, from a state folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import grpc.aio
import msgspec
import structlog

from fleetplane.domains.edge.agent import endpoint as link
from fleetplane.domains.edge.agent import status as machine
from fleetplane.domains.edge.agent.commands.commands import CommandSurroundings, CommandWork
from fleetplane.domains.edge.agent.commands.journal import SETTLED_SECONDS, CommandJournal, ResultOutbox
from fleetplane.domains.edge.agent.commands.judge import Judge
from fleetplane.domains.edge.agent.config.document import ServerProof
from fleetplane.domains.edge.agent.config.layers import DaemonConfiguration
from fleetplane.domains.edge.agent.daemon import Daemon, Pace
from fleetplane.domains.edge.agent.identity import keyring as identity
from fleetplane.domains.edge.agent.identity.keyring import Keyring
from fleetplane.domains.edge.agent.identity.rotation import Rotator
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder, public_bytes
from fleetplane.domains.edge.agent.session import DaemonNode, Leaving
from fleetplane.domains.edge.agent.status import fingerprint
from fleetplane.domains.edge.agent.tools.contract import ProgramLimits, ProgramPrivileges, Tool
from fleetplane.domains.edge.agent.tools.registry import RotateKey
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.node.connection import Follow, no_check_in

HANDED_ON: Final = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_RUNTIME_DIR"}
)
"""Of the daemon's environment, with everything that begins LC_. All else stays here: it may hold secrets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How the server is reached, where that is not as its address implies."""

    authority: Path | None = None
    plaintext: bool | None = None

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        return link.channel(link.target(endpoint, plaintext=self.plaintext), authority=self.authority)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonParts:
    folder: StateFolder
    tools: Mapping[str, Tool]
    environment: Mapping[str, str]
    """The daemon's own."""
    clock: Clock
    log: structlog.typing.FilteringBoundLogger
    user_config: Path | None = None
    tolerate_unsigned: bool = False
    reach: Reach = field(default_factory=Reach)
    pace: Pace = field(default_factory=Pace)
    settled_seconds: float = SETTLED_SECONDS
    check_in: Follow = no_check_in
    protected: tuple[Path, ...] = ()
    """Folders that tools must not touch, beside the state folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    daemon: Daemon
    leaving: Leaving
    node: DaemonNode
    journal: CommandJournal


def assemble(parts: DaemonParts) -> Assembled:
    """Blocking: reads the folder. Raises what makes it unusable."""
    folder, clock, log = parts.folder, parts.clock, parts.log
    configuration = DaemonConfiguration(folder, user_config=parts.user_config, log=log)
    configuration.load()
    folder.use(configuration.current)
    for path in folder.tighten_all():
        log.warning("permissions_tightened", path=str(path))
    keyring = Keyring(identity.load(folder, configuration.current), folder.signature())
    server_key = folder.load_server_key()
    if not server_key:
        log.warning(
            "server_not_pinned", hint="commands are believed without proof; enrol anew to pin its key"
        )
    journal = CommandJournal(folder.journal)
    journal.open(now=clock.now_ns() / 1e9)
    outbox = ResultOutbox(journal, clock, settled_seconds=parts.settled_seconds)
    outbox.load()
    tolerant = partial(_tolerant, parts, configuration)

    def connect() -> grpc.aio.Channel:
        return parts.reach.channel(configuration.current.endpoint)

    rotator = Rotator(
        folder=folder,
        config=lambda: configuration.current,
        connect=connect,
        clock=clock,
        log=log,
        keyring=keyring,
    )
    own = RotateKey(partial(_rotated, rotator))
    parts = replace(parts, tools={**parts.tools, own.name: own})
    work = CommandWork(
        judge=lambda: _judge(parts, configuration, keyring, server_key, tolerant()),
        surroundings=lambda: _surroundings(parts, configuration),
        journal=journal,
        outlet=outbox,
        clock=clock,
        log=log,
    )
    node = DaemonNode(
        folder=folder,
        configuration=configuration,
        keyring=keyring,
        server_key=server_key,
        tolerate_unsigned=tolerant,
        work=work,
        outbox=outbox,
        leaving=(leaving := Leaving()),
        capabilities=lambda: _capabilities(parts, configuration, work),
        last_command=lambda: journal.last,
        clock=clock,
        log=log,
        check_in=parts.check_in,
    )
    daemon = Daemon(node, connect=connect, rotator=rotator, pace=parts.pace)
    return Assembled(daemon=daemon, leaving=leaving, node=node, journal=journal)


async def _rotated(rotator: Rotator, keep_old_seconds: float) -> str:
    done = await rotator.rotate(keep_old_seconds=keep_old_seconds)
    return fingerprint(public_bytes(done.identity.key))


def _tolerant(parts: DaemonParts, configuration: DaemonConfiguration) -> bool:
    return parts.tolerate_unsigned or configuration.current.edge.server_proof is ServerProof.TOLERATED


def _capabilities(
    parts: DaemonParts, configuration: DaemonConfiguration, work: CommandWork
) -> pb.EdgeCapabilities:
    return machine.capabilities(
        configuration.current.edge.capabilities,
        tools=tuple(parts.tools),
        path=parts.environment.get("PATH", os.defpath),
        config_version=configuration.version,
        draining=work.draining,
    )


def _judge(
    parts: DaemonParts,
    configuration: DaemonConfiguration,
    keyring: Keyring,
    server_key: bytes,
    tolerant: bool,
) -> Judge:
    layers = (configuration.owner, configuration.current)
    said = (layer.edge.capabilities.mount_points for layer in layers)
    return Judge(
        config=configuration.current,
        owner=configuration.owner,
        tools=parts.tools,
        tenant=keyring.current.tenant,
        server_key=server_key,
        tolerate_unsigned=tolerant,
        mount_points=tuple(dict.fromkeys(("/",) if one is None else one for one in said)),
        protected=(*_protected(parts.folder), *(path.resolve() for path in parts.protected)),
    )


def _protected(folder: StateFolder) -> tuple[Path, ...]:
    """Where the keys lie, and the daemon's own memory, which holds them too."""
    files = (path.resolve() for path in (folder.root, folder.key, folder.token))
    threads = (Path("/proc", thread.name) for thread in Path("/proc/self/task").glob("*"))
    return (*files, *threads)


def _surroundings(parts: DaemonParts, configuration: DaemonConfiguration) -> CommandSurroundings:
    edge = configuration.current.edge
    handed_on = {
        name: value
        for name, value in parts.environment.items()
        if name in HANDED_ON or name.startswith("LC_")
    }
    return CommandSurroundings(
        environment={**handed_on, **edge.environment},
        output_limit_bytes=edge.output_limit_bytes,
        concurrent=edge.max_concurrent_commands,
        limits=ProgramLimits(**msgspec.structs.asdict(edge.limits)),
        privileges=ProgramPrivileges(**msgspec.structs.asdict(edge.programs)),
    )
