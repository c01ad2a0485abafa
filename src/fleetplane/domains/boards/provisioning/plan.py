"""The boards of an operation, and the steps and commands for each, made before any of them runs.

Commands are made of words that are quoted one by one. A secret never stands in a command: it is
written to a file of the board through the connection's standard input, and named by its path.
Every step is idempotent: what exists already is left as it is. The installer is fetched into a
directory that only root can enter, compared with its checksum there, and run from there, in one command:
nobody on the board can put another in its place.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.kinds import BoardRole
from fleetplane.domains.boards.ports import ProvisioningAction, ProvisioningOrder, ProvisioningState
from fleetplane.domains.boards.provisioning import policy as k3s
from fleetplane.domains.boards.provisioning import preflight
from fleetplane.domains.boards.provisioning.operations import BOARDS_LIMIT, BoardOperation, OperationSpec
from fleetplane.domains.boards.provisioning.policy import (
    Installer,
    K3sOptions,
    ProvisioningPolicy,
    confirmed_address,
)
from fleetplane.domains.boards.provisioning.preflight import BoardPaths
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument

SHORT_SECONDS, LONG_SECONDS = 60.0, 1200.0
"""For a command that only looks or writes; for one that fetches packages or images."""
API_PORT = 6443


class Doing(StrEnum):
    """What a step needs beside its commands."""

    RUN = "run"
    PREFLIGHT = "preflight"
    CGROUP = "cgroup"
    """The boot loader's line is read, changed and written back."""
    REBOOT = "reboot"
    READY = "ready"
    """Asked again and again until it holds."""
    COLLECT = "collect"
    """What it prints is a secret."""


class CommandedStep(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    phase: ProvisioningState
    doing: Doing = Doing.RUN
    commands: tuple[str, ...] = ()
    stdin: str = ""
    """Which secret goes to the first command's standard input; never shown."""
    seconds: float = SHORT_SECONDS
    tolerant: bool = False
    """Whether it may fail, because there may be nothing to do."""


class BoardHost(msgspec.Struct, frozen=True, kw_only=True):
    """A board as it is reached."""

    address: str
    user: str

    def privileged(self, command: str) -> str:
        """For a user who is not root, through sudo, which must not ask."""
        return command if self.user == "root" else f"sudo -n sh -c {shlex.quote(command)}"


def install(
    host: BoardHost,
    role: BoardRole,
    options: K3sOptions,
    installer: Installer,
    *,
    server_url: str = "",
    places: BoardPaths | None = None,
) -> tuple[CommandedStep, ...]:
    """Everything from looking at a board to a running k3s; `server_url` is whom an agent joins."""
    server = role is BoardRole.MASTER
    unit = "k3s" if server else "k3s-agent"
    places = places or BoardPaths()
    joining = () if server else (_join_token(host, places),)
    return (
        _preflight(places),
        CommandedStep(name="cgroup", phase=ProvisioningState.PREPARING, doing=Doing.CGROUP),
        CommandedStep(
            name="reboot",
            phase=ProvisioningState.REBOOTING,
            doing=Doing.REBOOT,
            commands=(host.privileged("reboot"),),
            seconds=LONG_SECONDS,
        ),
        CommandedStep(
            name="packages",
            phase=ProvisioningState.PREPARING,
            seconds=LONG_SECONDS,
            commands=(
                host.privileged(
                    "command -v curl >/dev/null || { apt-get update && apt-get install -y curl; }"
                ),
            ),
        ),
        *joining,
        CommandedStep(
            name="install",
            phase=ProvisioningState.INSTALLING if server else ProvisioningState.JOINING,
            commands=(
                host.privileged(_fetched(installer, _installing(host, role, options, server_url, places))),
            ),
            seconds=LONG_SECONDS,
        ),
        CommandedStep(
            name="start",
            phase=ProvisioningState.INSTALLING,
            seconds=LONG_SECONDS,
            commands=(host.privileged(f"systemctl enable --now {unit}"),),
        ),
        *((_ready(host), _collect(host, options)) if server else ()),
        CommandedStep(
            name="verify",
            phase=ProvisioningState.VERIFYING,
            commands=(host.privileged(f"systemctl is-active {unit}"), "k3s --version"),
        ),
    )


def check(places: BoardPaths | None = None) -> tuple[CommandedStep, ...]:
    """Only looking."""
    return (_preflight(places or BoardPaths()),)


def uninstall(
    host: BoardHost, options: K3sOptions, places: BoardPaths | None = None
) -> tuple[CommandedStep, ...]:
    """Back to a board without k3s; what is not there is no failure."""
    places = places or BoardPaths()
    scripts = [
        shlex.quote(f"{places.programs}/{name}") for name in ("k3s-uninstall.sh", "k3s-agent-uninstall.sh")
    ]
    leftovers = shlex.join(["rm", "-rf", "--", options.data_dir, places.configuration])
    return (
        CommandedStep(
            name="stop",
            phase=ProvisioningState.ROLLING_BACK,
            tolerant=True,
            commands=tuple(
                host.privileged(f"systemctl disable --now {unit}") for unit in ("k3s", "k3s-agent")
            ),
        ),
        CommandedStep(
            name="uninstall",
            phase=ProvisioningState.ROLLING_BACK,
            seconds=LONG_SECONDS,
            tolerant=True,
            commands=tuple(host.privileged(f"if [ -x {script} ]; then {script}; fi") for script in scripts),
        ),
        CommandedStep(
            name="clean",
            phase=ProvisioningState.ROLLING_BACK,
            commands=(host.privileged(leftovers),),
        ),
        CommandedStep(
            name="verify",
            phase=ProvisioningState.VERIFYING,
            commands=("! command -v k3s >/dev/null || { echo 'k3s is still there' >&2; exit 1; }",),
        ),
    )


def _preflight(places: BoardPaths) -> CommandedStep:
    return CommandedStep(
        name="preflight",
        phase=ProvisioningState.PREFLIGHT,
        doing=Doing.PREFLIGHT,
        commands=(preflight.probe(places),),
    )


def _join_token(host: BoardHost, places: BoardPaths) -> CommandedStep:
    folder, file = shlex.quote(places.configuration), shlex.quote(places.join_token)
    write = f"umask 077 && mkdir -p {folder} && cat > {file}"
    return CommandedStep(
        name="join-token",
        phase=ProvisioningState.JOINING,
        commands=(host.privileged(write),),
        stdin="cluster_token",
    )


def _fetched(installer: Installer, arguments: str) -> str:
    """Fetch, compare and run the installer in a private directory, which is removed whatever happens."""
    fetch = shlex.join(
        ["curl", "--fail", "--silent", "--show-error", "--location", "--proto", "=https,file", installer.url]
    )
    return "\n".join(
        (
            "set -eu",
            "folder=$(mktemp -d)",
            """trap 'rm -rf -- "$folder"' EXIT""",
            "trap 'exit 129' HUP INT TERM",
            f'{fetch} --output "$folder/install.sh"',
            f"""echo "{installer.sha256}  $folder/install.sh" | sha256sum -c - >/dev/null || {{""",
            "    echo 'the installer is not the one that is allowed: its SHA-256 differs' >&2; exit 1; }",
            arguments,
        )
    )


def _installing(
    host: BoardHost, role: BoardRole, options: K3sOptions, server_url: str, places: BoardPaths
) -> str:
    variables = {"INSTALL_K3S_CHANNEL": options.channel, "INSTALL_K3S_SKIP_START": "true"}
    if options.version:
        variables["INSTALL_K3S_VERSION"] = options.version
    if role is BoardRole.MASTER:
        arguments = k3s.server_arguments(options, address=host.address)
    else:
        variables |= {"K3S_URL": server_url, "K3S_TOKEN_FILE": places.join_token}
        arguments = k3s.agent_arguments(options, address=host.address)
    words = shlex.join(["env", *_assigned(variables), "sh"])
    return f'{words} "$folder/install.sh" {shlex.join(arguments)}'


def _assigned(variables: dict[str, str]) -> Iterable[str]:
    return (f"{name}={value}" for name, value in sorted(variables.items()))


def _ready(host: BoardHost) -> CommandedStep:
    return CommandedStep(
        name="ready",
        phase=ProvisioningState.VERIFYING,
        doing=Doing.READY,
        seconds=300.0,
        commands=(host.privileged("k3s kubectl get nodes --no-headers"),),
    )


def _collect(host: BoardHost, options: K3sOptions) -> CommandedStep:
    token = f"{options.data_dir.rstrip('/')}/server/node-token"
    return CommandedStep(
        name="collect",
        phase=ProvisioningState.VERIFYING,
        doing=Doing.COLLECT,
        commands=tuple(
            host.privileged(shlex.join(["cat", "--", path])) for path in (token, options.write_kubeconfig)
        ),
    )


@dataclass(slots=True, eq=False, repr=False)
class BoardSurvey:
    boards: Boards
    clusters: Clusters
    places: BoardPaths
    policy: ProvisioningPolicy

    def host(self, work: BoardOperation, *, user: str) -> BoardHost:
        """Where the order said that the board is, whatever the board says by now."""
        if not work.address:  # an order that an earlier version of this server accepted
            raise FailedPrecondition(
                f"the address of board {work.board} was never confirmed", hint="ask for it anew"
            )
        return BoardHost(address=work.address, user=user)

    def works(self, order: ProvisioningOrder) -> tuple[BoardOperation, ...]:
        if order.cluster_id is not None:
            self.clusters.require(order.cluster_id, field="cluster_id")
        works: list[BoardOperation] = []
        if order.board_id is not None:
            board = self.boards.require(order.board_id, field="node_id")
            works.append(self._work(order, order.board_id, order.role or board.spec.role))
        elif order.cluster_id is not None:
            members = self.boards.in_cluster(order.cluster_id)
            ordered = sorted(members, key=lambda board: board.spec.role is not BoardRole.MASTER)
            works += [self._work(order, int(board.name), board.spec.role) for board in ordered]
        for number in order.worker_ids:
            self.boards.require(number, field="worker_node_ids")
            if all(work.board != number for work in works):
                works.append(self._work(order, number, BoardRole.WORKER))
        if not 1 <= len(works) <= BOARDS_LIMIT:
            raise InvalidArgument(f"an operation is about 1 to {BOARDS_LIMIT} boards", field="node_id")
        return tuple(works)

    def _work(self, order: ProvisioningOrder, number: int, role: BoardRole) -> BoardOperation:
        spec = self.boards.require(number).spec
        address = confirmed_address(
            number, recorded=spec.confirmed_address, reported=spec.ip_address, given=order.addresses
        )
        return BoardOperation(board=number, role=role, address=address)

    def all_steps(self, spec: OperationSpec, *, user: str) -> Iterator[tuple[BoardOperation, CommandedStep]]:
        for work in spec.works:
            for step in self.steps(spec, work, user=user):
                yield work, step

    def steps(self, spec: OperationSpec, work: BoardOperation, *, user: str) -> tuple[CommandedStep, ...]:
        host = self.host(work, user=user)
        match spec.action:
            case ProvisioningAction.CHECK:
                return check(self.places)
            case ProvisioningAction.DEPROVISION:
                return uninstall(host, spec.options, self.places)
        return install(
            host,
            work.role,
            spec.options,
            self.policy.installer(spec.options),
            server_url=self.server_url(spec),
            places=self.places,
        )

    def server_url(self, spec: OperationSpec) -> str:
        """The k3s server that workers join: this operation's own, or their cluster's."""
        if spec.options.server_url:
            return spec.options.server_url
        servers = [work.address for work in spec.works if work.role is BoardRole.MASTER]
        if not servers and spec.cluster_id is not None:
            members = self.boards.in_cluster(spec.cluster_id)
            servers = [
                board.spec.confirmed_address
                for board in members
                if board.spec.role is BoardRole.MASTER and board.spec.confirmed_address
            ]
        if servers:
            address = servers[0]
            return f"https://{f'[{address}]' if ':' in address else address}:{API_PORT}"
        cluster = self.clusters.get(spec.cluster_id) if spec.cluster_id is not None else None
        if spec.action is not ProvisioningAction.PROVISION:
            return ""
        if cluster is None or not cluster.spec.master_endpoint:
            raise FailedPrecondition("a worker needs a cluster with a server to join")
        self.policy.require_server(cluster.spec.master_endpoint)  # anyone who may edit clusters wrote it
        return cluster.spec.master_endpoint
