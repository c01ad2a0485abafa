"""The steps of an operation on one board, and the states of boards and clusters that result.

The connection of an operation is opened anew after a restart.

An operation that a server was at when it died is taken over by the next one, while its last command may still
run on the board; and a server that was only stopped continues with its next command when it wakes. So each
command that changes something runs under a lock in the home of the login, and a file beside the lock names
the newest order. A newer owner waits for the command of an older one; an older owner is refused.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from fleetplane.domains.boards.fences import Fence
from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.kinds import BoardRole, BoardState, ClusterState
from fleetplane.domains.boards.ports import ProvisioningAction
from fleetplane.domains.boards.provisioning import preflight
from fleetplane.domains.boards.provisioning.operations import (
    BoardOperation,
    Operation,
    OperationSpec,
    OperationTaken,
    StepState,
    status_of,
)
from fleetplane.domains.boards.provisioning.plan import SHORT_SECONDS, BoardHost, CommandedStep, Doing
from fleetplane.domains.boards.provisioning.preflight import BoardPaths, Findings
from fleetplane.domains.boards.provisioning.secrets import ClusterSecrets, SshCredential
from fleetplane.domains.boards.provisioning.ssh import CommandPrinted, Dial, SshSession
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError, Unavailable

OVERTAKEN = 97
"""Exit code: a newer owner has run something here."""
BUSY = 98
"""Exit code: what another one runs here did not end in time."""


def guarded(command: str, *, fence: Fence, operation: str, mark: str, wait_seconds: float) -> str:
    """The command under the lock; `mark` is where the file lies, from the home or from the root."""
    file = shlex.quote(mark)
    lineage, said = shlex.quote(fence.lineage), shlex.quote(f"{fence.lineage} {fence.revision} {operation}")
    inside = "\n".join(
        (
            "lineage= revision=",
            f"[ ! -e {file} ] || read -r lineage revision rest < {file}",
            f'if [ "$lineage" = {lineage} ] && [ "$revision" -gt {fence.revision} ] 2>/dev/null; then',
            "    echo 'another server has taken the operation over' >&2",
            f"    exit {OVERTAKEN}",
            "fi",
            f"printf '%s\\n' {said} > {file}.new && mv -- {file}.new {file} || exit 1",
            command,
        )
    )
    # The lock stays with flock: what a command leaves running in the background does not keep it.
    lock = shlex.join(["flock", "-o", "-w", f"{wait_seconds:.0f}", "-E", str(BUSY), f"{mark}.lock"])
    return f"(umask 077; : >> {file}.lock) && exec {lock} sh -c {shlex.quote(inside)}"


ASK_SECONDS = 2.0
"""Between two questions whether a board is back, or k3s ready."""
BACK_SECONDS = 600.0
"""For a board to come back after a restart."""
WORDS_LIMIT = 400

Tell = Callable[[str], None]


class StepFailed(FailedPrecondition):
    """A command said no."""


@dataclass(slots=True, kw_only=True)
class BoardWork:
    host: BoardHost
    server: bool
    credential: SshCredential
    dial: Dial
    clock: Clock
    tell: Tell
    """For the log; secrets never go there."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """For steps that write one to the board."""
    places: BoardPaths = field(default_factory=BoardPaths)
    operation: str = ""
    fence: Fence | None = None
    """The order of this server among those of several; None where there is one."""
    host_keys: tuple[str, ...] = ()
    """The keys that the board gave when it joined; empty for one that was only written down."""
    findings: Findings | None = None
    collected: list[str] = field(default_factory=list)
    """Secrets that the board printed, in the order of the commands."""
    version: str = ""
    _open: SshSession | None = None
    _stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    @contextlib.asynccontextmanager
    async def at_hand(self) -> AsyncIterator[None]:
        """For as long as the work takes; connects when the first step needs it."""
        try:
            yield
        finally:
            await self._hang_up()

    @property
    def _boot_id(self) -> str:
        return f"cat -- {shlex.quote(self.places.boot_id)}"

    async def _hang_up(self) -> None:
        self._open = None
        stack, self._stack = self._stack, contextlib.AsyncExitStack()
        await stack.aclose()

    async def _connection(self) -> SshSession:
        if self._open is None:
            self._open = await self._stack.enter_async_context(
                self.dial(self.host.address, self.credential, self.host_keys)
            )
        return self._open

    async def take(self, step: CommandedStep) -> str:
        """Take one step; a few words on what came of it. Raises where it failed."""
        ways: Mapping[Doing, Callable[[CommandedStep], Awaitable[str]]] = {
            Doing.RUN: self._run,
            Doing.PREFLIGHT: self._look,
            Doing.CGROUP: self._turn_on_cgroup,
            Doing.REBOOT: self._reboot,
            Doing.READY: self._until_ready,
            Doing.COLLECT: self._collect,
        }
        return await ways[step.doing](step)

    async def _ask(
        self, command: str, *, seconds: float, stdin: str = "", quiet: bool = False
    ) -> CommandPrinted:
        connection = await self._connection()
        return await connection.run(command, seconds=seconds, stdin=stdin, line=None if quiet else self.tell)

    async def _change(self, command: str, *, seconds: float, stdin: str = "") -> CommandPrinted:
        """Run a command that changes something, unless another server has taken over."""
        if self.fence is None:
            return await self._ask(command, seconds=seconds, stdin=stdin)
        wrapped = guarded(
            command,
            fence=self.fence,
            operation=self.operation,
            mark=self.places.mark,
            wait_seconds=seconds,
        )
        printed = await self._ask(wrapped, seconds=2 * seconds, stdin=stdin)
        if printed.exit_code == OVERTAKEN:
            raise OperationTaken(f"another server has taken operation {self.operation} over")
        if printed.exit_code == BUSY:
            raise StepFailed(
                f"what another server began on the board did not end within {seconds:g} s",
                hint="ask for the operation again",
            )
        return printed

    async def _run(self, step: CommandedStep) -> str:
        printed: CommandPrinted | None = None
        for number, command in enumerate(step.commands):
            stdin = self.secrets[step.stdin] if step.stdin and number == 0 else ""
            self.tell(f"$ {command}")
            printed = await self._change(command, seconds=step.seconds, stdin=stdin)
            if printed.exit_code != 0 and not step.tolerant:
                raise StepFailed(f"{step.name}: exit code {printed.exit_code}: {_end(printed.output)}")
        if printed is None:
            return ""
        for line in printed.stdout.splitlines():
            if line.startswith("k3s version "):
                self.version = line.split()[2]
                return line
        return _end(printed.output)

    async def _look(self, step: CommandedStep) -> str:
        printed = await self._ask(step.commands[0], seconds=step.seconds, quiet=True)
        if printed.exit_code != 0:
            raise StepFailed(f"preflight: exit code {printed.exit_code}: {_end(printed.output)}")
        self.findings = findings = preflight.read(printed.stdout)
        verdict = preflight.judge(findings, server=self.server, now_seconds=self.clock.now_ns() / 1e9)
        for line in (*verdict.problems, *verdict.warnings):
            self.tell(line)
        preflight.require(verdict)
        about = f"{findings.system or 'an unknown system'}, {findings.architecture}"
        return "; ".join((about, *verdict.warnings))

    async def _known(self) -> Findings:
        """What the preflight saw, also if an earlier run of the server took that step."""
        if self.findings is None:
            printed = await self._ask(preflight.probe(self.places), seconds=SHORT_SECONDS, quiet=True)
            self.findings = preflight.read(printed.stdout)
        return self.findings

    async def _turn_on_cgroup(self, _step: CommandedStep) -> str:
        findings = await self._known()
        if findings.memory_cgroup:
            return "the memory controller is on"
        if findings.cmdline not in self.places.cmdlines:  # a path from the board is not written to as root
            raise StepFailed(f"cgroup: {findings.cmdline!r} is not a file of the boot loader")
        path = shlex.quote(findings.cmdline)
        printed = await self._ask(f"cat -- {path}", seconds=SHORT_SECONDS, quiet=True)
        if printed.exit_code != 0:
            raise StepFailed(f"cgroup: {findings.cmdline} cannot be read: {_end(printed.output)}")
        edited = preflight.edited_cmdline(printed.stdout)
        if edited is None:
            return "the boot loader knows; a restart is missing"
        self.tell(f"{findings.cmdline}: {edited.strip()}")
        # Beside the old one and then in its place: a board that loses power here still boots.
        write = (
            f"cp -- {path} {path}.fleetplane-backup && cat > {path}.new && sync && mv -- {path}.new {path}"
        )
        done = await self._change(self.host.privileged(write), seconds=SHORT_SECONDS, stdin=edited)
        if done.exit_code != 0:
            raise StepFailed(f"cgroup: {findings.cmdline} cannot be written: {_end(done.output)}")
        return f"turned on in {findings.cmdline}"

    async def _reboot(self, step: CommandedStep) -> str:
        findings = await self._known()
        if findings.memory_cgroup:
            return "not needed"
        before = (await self._ask(self._boot_id, seconds=SHORT_SECONDS, quiet=True)).stdout.strip()
        self.tell(f"$ {step.commands[0]}")
        with contextlib.suppress(Unavailable):  # the connection breaks: that is what was asked for
            await self._change(step.commands[0], seconds=SHORT_SECONDS)
        await self._hang_up()
        await self._until_back(before)
        self.findings = None
        if not (await self._known()).memory_cgroup:
            raise StepFailed("reboot: the memory controller is still off after the restart")
        return "the memory controller is on"

    async def _until_back(self, before: str) -> None:
        until = self.clock.monotonic() + BACK_SECONDS
        while self.clock.monotonic() < until:
            await self.clock.sleep(ASK_SECONDS)
            try:
                now = (await self._ask(self._boot_id, seconds=SHORT_SECONDS, quiet=True)).stdout.strip()
            except FleetplaneError:
                await self._hang_up()
                continue
            if now and now != before:
                return
        raise Unavailable(f"{self.host.address} did not come back within {BACK_SECONDS:g} s")

    async def _until_ready(self, step: CommandedStep) -> str:
        until = self.clock.monotonic() + step.seconds
        said = ""
        while self.clock.monotonic() < until:
            printed = await self._ask(step.commands[0], seconds=SHORT_SECONDS, quiet=True)
            said = _end(printed.output)
            rows = [line.split() for line in printed.stdout.splitlines()]
            if printed.exit_code == 0 and any(len(row) > 1 and row[1] == "Ready" for row in rows):
                return said
            await self.clock.sleep(ASK_SECONDS)
        raise StepFailed(f"ready: no node is ready after {step.seconds:g} s: {said}")

    async def _collect(self, step: CommandedStep) -> str:
        self.collected = []
        for command in step.commands:
            printed = await self._ask(command, seconds=step.seconds, quiet=True)
            if printed.exit_code != 0 or not printed.stdout.strip():
                raise StepFailed(f"collect: exit code {printed.exit_code}")
            self.collected.append(printed.stdout)
        return "kept sealed"


def _end(output: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:WORDS_LIMIT] if lines else ""


ACTOR = "system/provisioning"


class Aftermath:
    def __init__(self, boards: Boards, clusters: Clusters, secrets: ClusterSecrets) -> None:
        self._boards = boards
        self._clusters = clusters
        self._secrets = secrets

    async def began(self, spec: OperationSpec) -> None:
        if spec.action is ProvisioningAction.CHECK:
            return
        for work in spec.works:
            await self._boards.declare(work.board, BoardState.PROVISIONING, actor=ACTOR)
        await self._cluster(spec, ClusterState.PROVISIONING)

    async def board_done(
        self, spec: OperationSpec, work: BoardOperation, hands: BoardWork, server_url: str
    ) -> None:
        if spec.action is ProvisioningAction.DEPROVISION:
            await self._boards.depart(work.board, actor=ACTOR)
        if spec.action is not ProvisioningAction.PROVISION:
            return
        if work.role is BoardRole.MASTER and spec.cluster_id is not None:
            if hands.collected:
                token, kubeconfig = hands.collected
                await self._secrets.keep(
                    spec.cluster_id, token=token.strip(), kubeconfig=kubeconfig, actor=ACTOR
                )
            await self._clusters.update(
                spec.cluster_id, actor=ACTOR, version=hands.version, master_endpoint=server_url
            )
        hostname = hands.findings.hostname if hands.findings is not None else ""
        facts = BoardFacts(
            role=work.role, cluster_id=spec.cluster_id, kube_version=hands.version, node_name=hostname
        )
        await self._boards.declare(work.board, BoardState.READY, actor=ACTOR, facts=facts)

    async def worked(self, spec: OperationSpec, *, completely: bool) -> None:
        await self._cluster(spec, ClusterState.ACTIVE if completely else ClusterState.DEGRADED)

    async def failed(self, operation: Operation) -> None:
        """A board whose steps were not all taken is not what was wanted."""
        spec = operation.spec
        if spec.action is ProvisioningAction.CHECK:
            return
        unfinished = {step.board for step in status_of(operation).steps if step.state is not StepState.DONE}
        for board in unfinished:
            await self._boards.declare(board, BoardState.FAILED, actor=ACTOR)
        if spec.works[0].board in unfinished:
            await self._cluster(spec, ClusterState.FAILED)

    async def _cluster(self, spec: OperationSpec, state: ClusterState) -> None:
        if spec.cluster_id is not None and spec.action is ProvisioningAction.PROVISION:
            await self._clusters.update(spec.cluster_id, actor=ACTOR, state=state)
