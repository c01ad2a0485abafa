"""Seeing provisioning through: one operation at a time per board, each step written down.

An operation that fails stands still at the step that failed, and goes on there when it is asked
for again under the same request id; one that a restart of the server interrupted goes on by
itself. Of a cluster, the server comes first; a worker that fails does not undo the others.

Of several servers each takes orders, and the active one carries them out: it follows what is written down,
and so do those who look on elsewhere. What a dead server was at, the next active one goes on with.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec
import structlog

from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.kinds import BoardRole
from fleetplane.domains.boards.ports import (
    ProvisioningAction,
    ProvisioningAnswer,
    ProvisioningOrder,
    ProvisioningState,
    ProvisioningStep,
)
from fleetplane.domains.boards.provisioning import policy as k3s
from fleetplane.domains.boards.provisioning import ssh
from fleetplane.domains.boards.provisioning.operations import (
    ALONE,
    MESSAGE_LIMIT,
    BoardOperation,
    Operation,
    OperationLogs,
    Operations,
    OperationSpec,
    OperationTaken,
    Ownership,
    StepRecord,
    StepState,
    is_over,
    status_of,
)
from fleetplane.domains.boards.provisioning.plan import BoardSurvey, CommandedStep
from fleetplane.domains.boards.provisioning.policy import ProvisioningPolicy
from fleetplane.domains.boards.provisioning.preflight import BoardPaths
from fleetplane.domains.boards.provisioning.secrets import ClusterSecrets, SshCredentials
from fleetplane.domains.boards.provisioning.steps import ACTOR, Aftermath, BoardWork
from fleetplane.kernel.boundary import Boundary, contained
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, NotFound
from fleetplane.kernel.events import EventType
from fleetplane.kernel.unbroken import run_to_completion

log = structlog.get_logger(__name__)

ID_BYTES = 8
AT_ONCE = 8
"""Operations under way at once; each is one or a few SSH connections."""
CANCEL_SECONDS = 10.0
"""How long whoever takes an operation back waits for the server that carries it out."""
CANCEL_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisioningParts:
    """What the engine works with."""

    boards: Boards
    clusters: Clusters
    operations: Operations
    credentials: SshCredentials
    secrets: ClusterSecrets
    clock: Clock
    dial: ssh.Dial = ssh.dial
    places: BoardPaths = field(default_factory=BoardPaths)
    policy: ProvisioningPolicy = field(default_factory=ProvisioningPolicy)
    """What the server's owner lets orders name."""


class ProvisioningEngine:
    """A `Provisioner`."""

    def __init__(self, parts: ProvisioningParts) -> None:
        self._parts = parts
        self._survey = BoardSurvey(parts.boards, parts.clusters, parts.places, parts.policy)
        self._aftermath = Aftermath(parts.boards, parts.clusters, parts.secrets)
        self.logs = OperationLogs()
        self._wanted: asyncio.Queue[str] = asyncio.Queue()
        self._waiting: set[str] = set()
        """Those in the queue."""
        self._running: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()
        """Those that somebody took back, as against those that stop because the server does."""
        self._room = asyncio.Semaphore(AT_ONCE)
        self._runs = False

    def __repr__(self) -> str:
        return f"<Engine running={len(self._running)}>"

    @property
    def _is_driver(self) -> bool:
        """Whether operations are carried out here; of several servers, by the active one."""
        return self._runs or not self._parts.operations.shared

    # Asking.

    async def request(self, order: ProvisioningOrder, *, actor: str) -> ProvisioningAnswer:
        if order.action is ProvisioningAction.CANCEL:
            return await self._cancel(order, actor=actor)
        known = self._parts.operations.of_request(order.request_id)
        if known is not None:
            return await self._again(known, actor=actor)
        options = k3s.read(order.k3s_config, version=order.k3s_version, channel=order.k3s_channel)
        works = self._survey.works(order)
        self._parts.policy.require(options, order.action)
        if order.dry_run:
            return await self._rehearse(order, works, options)
        await self._parts.credentials.get(order.credential_ref)  # that there is one, before anything is begun
        spec = OperationSpec(
            action=order.action,
            works=works,
            options=options,
            credential=order.credential_ref,
            actor=actor,
            created_at_ns=self._parts.clock.now_ns(),
            cluster_id=order.cluster_id,
            request_id=order.request_id,
        )
        steps = tuple(
            StepRecord(board=work.board, name=step.name, phase=step.phase)
            for work, step in self._survey.all_steps(spec, user="")
        )
        name = self._parts.clock.token_bytes(ID_BYTES).hex()
        operation = await self._parts.operations.begin(name, spec, steps)
        if operation.name != name:  # another server was asked at the same time
            return await self._again(operation, actor=actor)
        self._go(operation)
        return told(operation, "accepted")

    async def _again(self, operation: Operation, *, actor: str) -> ProvisioningAnswer:
        """The operation of a repeated request: resumed where it failed, else returned as it is."""
        failed = status_of(operation).state in (ProvisioningState.FAILED, ProvisioningState.CANCELLED)
        if failed:
            operation = await self._parts.operations.resume(operation, actor=actor)
            self._go(operation)
        return told(operation, "resumed at the step that failed" if failed else "known already")

    async def _cancel(self, order: ProvisioningOrder, *, actor: str) -> ProvisioningAnswer:
        operation = self._parts.operations.of_request(order.request_id)
        if operation is None and order.board_id is not None:
            operation = self._parts.operations.at_board(order.board_id)
        if operation is None:
            raise NotFound("there is no operation to cancel")
        if is_over(operation):
            return told(operation, "it was over already")
        name = operation.name
        log.info("boards.provision.cancel", operation=name, actor=actor)
        if not self._is_driver:
            return await self._cancel_elsewhere(name, actor=actor)
        self._cancelled.add(name)  # from here on nobody begins it
        task = self._running.get(name)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        if task is None or self._running.get(name) is task:  # it never had a turn to end itself
            try:
                await self._end(name, ProvisioningState.CANCELLED, f"cancelled by {actor}")
            finally:
                self._over(name)
        operation = self._parts.operations.get(name)
        cancelled = status_of(operation).state is ProvisioningState.CANCELLED
        return told(operation, "cancelled" if cancelled else "it was over already")

    async def _cancel_elsewhere(self, name: str, *, actor: str) -> ProvisioningAnswer:
        """Have the active server end it; if there is none just now, the next one does."""
        operation = await self._parts.operations.take_back(name, actor=actor)
        give_up = self._parts.clock.monotonic() + CANCEL_SECONDS
        while not is_over(operation) and self._parts.clock.monotonic() < give_up:
            await self._parts.clock.sleep(CANCEL_LOOK_SECONDS)
            operation = self._parts.operations.get(name)
        if not is_over(operation):
            return told(operation, "it is being cancelled")
        cancelled = status_of(operation).state is ProvisioningState.CANCELLED
        return told(operation, "cancelled" if cancelled else "it was over already")

    async def _rehearse(
        self, order: ProvisioningOrder, works: tuple[BoardOperation, ...], options: k3s.K3sOptions
    ) -> ProvisioningAnswer:
        """The very commands, without any of them being run, or anyone being connected to."""
        credential = await self._parts.credentials.get(order.credential_ref)
        spec = OperationSpec(
            action=order.action,
            works=works,
            options=options,
            credential="",
            actor="",
            created_at_ns=0,
            cluster_id=order.cluster_id,
        )
        steps = [
            ProvisioningStep(
                name=f"{work.board}/{step.name}", state=step.phase, message="\n".join(step.commands)
            )
            for work, step in self._survey.all_steps(spec, user=credential.user)
        ]
        return ProvisioningAnswer(success=True, message="nothing was done: this is the plan", steps=steps)

    # Doing.

    def _go(self, operation: Operation) -> None:
        """See to an operation, unless somebody does."""
        name = operation.name
        if not self._is_driver or is_over(operation):
            return
        if name in self._running:
            if status_of(operation).cancelled_by and name not in self._cancelled:
                self._cancelled.add(name)
                self._running[name].cancel()
        elif name not in self._waiting:
            self.logs.open(name)
            self._waiting.add(name)
            self._wanted.put_nowait(name)

    async def run(self) -> None:
        """Work on operations until cancelled; those that an earlier server began go on."""
        self._runs = True
        try:
            async with Boundary() as tasks:
                tasks.keep("boards/operations/adopt", self._adopt)
                while True:
                    name = await self._wanted.get()
                    self._waiting.discard(name)
                    if name not in self._cancelled and not is_over(self._parts.operations.get(name)):
                        task = tasks.keep("boards/operation", partial(self._see_through, name), about=name)
                        self._running[name] = task
        finally:
            self._runs = False

    async def _adopt(self) -> None:
        """See to what an earlier server began, and to what was written after its requester had left."""
        operations = self._parts.operations
        with operations.watch() as watch:
            for operation in operations.list():
                with contained("boards/operations/adopt", about=operation.name):
                    self._go(operation)
            async for batch in watch:
                for event in batch.events:
                    if event.type is not EventType.DELETED:
                        with contained("boards/operations/adopt", about=event.resource.name):
                            self._go(operations.get(event.resource.name))

    async def _see_through(self, name: str) -> None:
        try:
            await self._owning(name)
        except OperationTaken as error:  # what is left to do about it is another server's
            log.warning("boards.provision.taken", operation=name, error=error.message)
            self._over(name)
            return
        except asyncio.CancelledError:
            self._over(name)
            raise
        self._over(name)  # after a failure it is begun again, and not over
        self._go(self._parts.operations.get(name))  # if it was asked for again at once, elsewhere

    async def _owning(self, name: str) -> None:
        operations, own = self._parts.operations, ALONE
        try:
            own = await operations.own(name)
            operation = operations.get(name)
            if by := status_of(operation).cancelled_by:
                await self._end(name, ProvisioningState.CANCELLED, f"cancelled by {by}", own)
                return
            async with self._room:
                await self._carry_out(operations.get(name), own)
        except OperationTaken:
            raise
        except asyncio.CancelledError:
            if name not in self._cancelled:
                raise  # the server stops: the next one goes on where this one was
            if not is_over(operations.get(name)):  # else it came to its end before it could be taken back
                await self._end(name, ProvisioningState.CANCELLED, "it was taken back", own)
        except FleetplaneError as error:
            await self._end(name, ProvisioningState.FAILED, error.message, own)
        except Exception as error:
            log.exception("boards.provision.broken", operation=name)
            await self._end(
                name, ProvisioningState.FAILED, f"something unforeseen: {type(error).__name__}", own
            )

    def _over(self, name: str) -> None:
        self._running.pop(name, None)
        self._cancelled.discard(name)
        if (lines := self.logs.get(name)) is not None:
            lines.end()

    async def _carry_out(self, operation: Operation, own: Ownership) -> None:
        spec = operation.spec
        self._parts.policy.require(spec.options, spec.action)  # it may have become stricter meanwhile
        await self._aftermath.began(spec)
        credential = await self._parts.credentials.get(spec.credential)
        failed: list[str] = []
        index = 0
        for work in spec.works:
            steps = self._survey.steps(spec, work, user=credential.user)
            try:
                await self._work(operation.name, spec, work, steps, index, own)
            except OperationTaken:
                raise
            except FleetplaneError as error:
                if work is spec.works[0]:
                    raise
                failed.append(f"board {work.board}: {error.message}")
            index += len(steps)
        await self._aftermath.worked(spec, completely=not failed)
        undone = spec.action is ProvisioningAction.DEPROVISION
        wanted = ProvisioningState.ROLLED_BACK if undone else ProvisioningState.READY
        state = ProvisioningState.FAILED if failed else wanted
        await run_to_completion(self._end(operation.name, state, "; ".join(failed), own))

    async def _work(
        self,
        name: str,
        spec: OperationSpec,
        work: BoardOperation,
        steps: tuple[CommandedStep, ...],
        first: int,
        own: Ownership,
    ) -> None:
        parts = self._parts
        credential = await parts.credentials.get(spec.credential)
        joining = work.role is BoardRole.WORKER and spec.action is ProvisioningAction.PROVISION
        hands = BoardWork(
            host=self._survey.host(work, user=credential.user),
            host_keys=parts.boards.require(work.board).spec.ssh_host_keys,
            server=work.role is BoardRole.MASTER,
            credential=credential,
            dial=parts.dial,
            clock=parts.clock,
            tell=self._teller(name, work.board),
            places=parts.places,
            operation=name,
            fence=own.fence,
            secrets={"cluster_token": await parts.secrets.token(spec.cluster_id)} if joining else {},
        )
        async with hands.at_hand():
            for offset, step in enumerate(steps):
                await self._take(name, first + offset, step, hands, own)
        server_url = self._survey.server_url(spec)
        await self._aftermath.board_done(spec, work, hands, server_url)

    async def _take(
        self, name: str, index: int, step: CommandedStep, hands: BoardWork, own: Ownership
    ) -> None:
        operations, clock = self._parts.operations, self._parts.clock
        if status_of(operations.get(name)).steps[index].state in (StepState.DONE, StepState.SKIPPED):
            return
        began = clock.now_ns()
        await operations.note(
            name, index, _changed(state=StepState.RUNNING, started_at_ns=began), actor=ACTOR, own=own
        )
        hands.tell(f"-- {step.name}")
        try:
            words = await hands.take(step)
        except OperationTaken:
            raise
        except FleetplaneError as error:
            ended = _changed(
                state=StepState.FAILED, message=error.message[:MESSAGE_LIMIT], finished_at_ns=clock.now_ns()
            )
            await operations.note(name, index, ended, actor=ACTOR, own=own)
            hands.tell(f"failed: {error.message}")
            raise
        ended = _changed(state=StepState.DONE, message=words[:MESSAGE_LIMIT], finished_at_ns=clock.now_ns())
        await operations.note(name, index, ended, actor=ACTOR, own=own)

    def _teller(self, name: str, board: int) -> Callable[[str], None]:
        lines = self.logs.get(name) or self.logs.open(name)
        return lambda text: lines.add(f"[{board}] {text}")

    async def _end(self, name: str, state: ProvisioningState, reason: str, own: Ownership = ALONE) -> None:
        if state in (ProvisioningState.FAILED, ProvisioningState.CANCELLED):
            await self._aftermath.failed(self._parts.operations.get(name))
        await self._parts.operations.end(name, state, reason=reason, actor=ACTOR, own=own)
        log.info("boards.provision.ended", operation=name, state=state, reason=reason)

    # Looking on.

    async def follow(self, name: str) -> AsyncIterator[str]:
        """The log of an operation, as it is written; where it is not carried out, its steps."""
        self._parts.operations.get(name)
        lines = self.logs.get(name)
        if lines is None:
            async for line in self._follow_record(name):
                yield line
        else:
            async for line in lines.follow():
                yield line

    async def _follow_record(self, name: str) -> AsyncIterator[str]:
        """What is written down of an operation, and what comes of it, in the words of its log."""
        operations, told_of = self._parts.operations, dict[int, StepState]()
        with operations.watch() as watch:
            operation = operations.get(name)
            for line in _news(operation, told_of):
                yield line
            if is_over(operation):
                return
            async for batch in watch:
                for event in batch.events:
                    if event.resource.name != name:
                        continue
                    for line in _news(event.resource, told_of):
                        yield line
                    if event.type is EventType.DELETED or is_over(event.resource):
                        return


def _news(operation: Operation, told_of: dict[int, StepState]) -> Iterator[str]:
    """Lines about steps that have changed since they were last told of."""
    for index, step in enumerate(status_of(operation).steps):
        before = told_of.get(index, StepState.PENDING)
        if step.state is before:
            continue
        told_of[index] = step.state
        if before is not StepState.RUNNING and step.state is not StepState.PENDING:
            yield f"[{step.board}] -- {step.name}"
        if step.state is StepState.FAILED:
            yield f"[{step.board}] failed: {step.message}"
        elif step.state is StepState.DONE and step.message:
            yield f"[{step.board}] {step.message}"


def _changed(**fields: object) -> Callable[[StepRecord], StepRecord]:
    return lambda record: msgspec.structs.replace(record, **fields)


_SHOWN: Mapping[StepState, ProvisioningState] = {
    StepState.PENDING: ProvisioningState.QUEUED,
    StepState.DONE: ProvisioningState.READY,
    StepState.SKIPPED: ProvisioningState.READY,
    StepState.FAILED: ProvisioningState.FAILED,
}


def told(operation: Operation, message: str) -> ProvisioningAnswer:
    status = status_of(operation)
    return ProvisioningAnswer(
        success=status.state is not ProvisioningState.FAILED,
        message=message,
        operation_id=operation.name,
        state=status.state,
        reason=status.reason,
        steps=[
            ProvisioningStep(
                name=f"{step.board}/{step.name}",
                state=_SHOWN.get(step.state, step.phase),
                message=step.message,
                started_at_ns=step.started_at_ns,
                finished_at_ns=step.finished_at_ns,
            )
            for step in status.steps
        ],
    )
