"""What is written down about provisioning: each operation, and how far it is with each step.

A step is written down when it begins and when it ends, so that a server that is started again
knows where to go on. What commands print is not written down: see `OperationLog`.

Of several servers the active one carries operations out. It writes down that they are its own; a server that
no longer owns one writes nothing of it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from fleetplane.domains.boards.fences import Fence
from fleetplane.domains.boards.kinds import SCOPE, BoardRole, BoardsSpec
from fleetplane.domains.boards.ports import ProvisioningAction, ProvisioningState
from fleetplane.domains.boards.provisioning.policy import K3sOptions
from fleetplane.kernel.errors import Conflict, NotFound
from fleetplane.kernel.resources import Kind, Resource
from fleetplane.kernel.store import ABSENT, Draft, Store
from fleetplane.kernel.watch import Watch

LINES_LIMIT = 5000
"""Kept of one operation's log."""
LOGS_LIMIT = 64
"""Operations whose log is kept; the one begun longest ago goes first."""
MESSAGE_LIMIT = 1000
BOARDS_LIMIT = 64
"""In one operation."""
_BOARD_CLAIM = "board"
_REQUEST_CLAIM = "request"


class BoardOperation(BoardsSpec, frozen=True):
    """One board's part of an operation."""

    board: int
    role: BoardRole
    address: str = ""
    """Where SSH goes: what a person confirmed when the order was accepted."""


class StepState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"


class StepRecord(BoardsSpec, frozen=True):
    board: int
    name: str
    phase: ProvisioningState
    state: StepState = StepState.PENDING
    message: str = ""
    started_at_ns: int | None = None
    finished_at_ns: int | None = None


class OperationSpec(BoardsSpec, frozen=True):
    action: ProvisioningAction
    works: tuple[BoardOperation, ...]
    """In order; the first is the cluster's server, where there is one."""
    options: K3sOptions
    credential: str
    actor: str
    created_at_ns: int
    cluster_id: int | None = None
    request_id: str = ""


class Owner(BoardsSpec, frozen=True):
    """Who carries an operation out, of several servers."""

    server: str
    boot: int
    term: int
    """Of the active server's seat."""
    number: int
    """Counts owners, also those of one name."""


class OperationStatus(BoardsSpec, frozen=True):
    state: ProvisioningState = ProvisioningState.QUEUED
    steps: tuple[StepRecord, ...] = ()
    reason: str = ""
    """Why it failed."""
    finished_at_ns: int | None = None
    owner: Owner | None = None
    """None where no other server is, and before the first."""
    cancelled_by: str = ""
    """Who asked for its end, at a server that does not carry it out."""


Operation = Resource[OperationSpec, OperationStatus]
OPERATION: Kind[OperationSpec, OperationStatus] = Kind(
    "board-operation", OperationSpec, OperationStatus, is_secret=True
)


def status_of(operation: Operation) -> OperationStatus:
    assert operation.status is not None, "an operation is written with its status"
    return operation.status


def is_over(operation: Operation) -> bool:
    return status_of(operation).finished_at_ns is not None


class OperationTaken(Conflict):
    """Another server carries the operation out now."""

    reason = "OPERATION_TAKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """What a server has that carries an operation out."""

    owner: Owner | None = None
    fence: Fence | None = None
    """Goes along with what is done on boards."""


ALONE = Ownership()


class Operations:
    def __init__(self, store: Store) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<Operations {len(self._store.list(OPERATION))}>"

    @property
    def shared(self) -> bool:
        """Whether other servers take orders, too."""
        return self._store.shared

    def get(self, name: str) -> Operation:
        found = self._store.get(OPERATION, SCOPE, name)
        if found is None:
            raise NotFound(f"there is no operation {name[:64]!r}")
        return found

    def list(self) -> list[Operation]:
        """The newest first."""
        found = self._store.list(OPERATION, SCOPE)
        return sorted(found, key=lambda one: one.created_revision, reverse=True)

    def watch(self) -> Watch:
        """What happens to operations from now on."""
        return self._store.watch(OPERATION, SCOPE)

    def of_request(self, request_id: str) -> Operation | None:
        name = self._store.claimed_by(OPERATION, SCOPE, _REQUEST_CLAIM, request_id) if request_id else None
        return self._store.get(OPERATION, SCOPE, name) if name is not None else None

    def at_board(self, board: int) -> Operation | None:
        """The operation that has a board in its hands."""
        name = self._store.claimed_by(OPERATION, SCOPE, _BOARD_CLAIM, str(board))
        return self._store.get(OPERATION, SCOPE, name) if name is not None else None

    async def begin(self, name: str, spec: OperationSpec, steps: tuple[StepRecord, ...]) -> Operation:
        """Write an operation down; two never have one board in their hands.

        Of requests with one id, also at several servers, one begins something; the others get what it began.
        """

        def change(draft: Draft) -> Operation:
            if spec.request_id:
                known = draft.claimed_by(OPERATION, SCOPE, _REQUEST_CLAIM, spec.request_id)
                if known is not None:
                    return _present(draft, known)
                draft.claim(OPERATION, SCOPE, _REQUEST_CLAIM, spec.request_id, name)
            _take(draft, name, spec)
            return draft.put(
                OPERATION, SCOPE, name, spec=spec, status=OperationStatus(steps=steps), expect=ABSENT
            )

        return await self._write(name, change, actor=spec.actor, action="boards.provision")

    async def resume(self, operation: Operation, *, actor: str) -> Operation:
        """Let a failed operation go on at the step that failed."""
        name = operation.name

        def change(draft: Draft) -> Operation:
            current = _present(draft, name)
            status = status_of(current)
            if status.state not in (ProvisioningState.FAILED, ProvisioningState.CANCELLED):
                return current
            _take(draft, name, current.spec)
            steps = tuple(
                StepRecord(board=step.board, name=step.name, phase=step.phase)
                if step.state in (StepState.FAILED, StepState.RUNNING)
                else step
                for step in status.steps
            )
            fresh = OperationStatus(steps=steps, owner=status.owner)
            return draft.put(OPERATION, SCOPE, name, spec=current.spec, status=fresh)

        return await self._write(name, change, actor=actor, action="boards.provision.resume")

    async def own(self, name: str) -> Ownership:
        """Carry an operation out from now on; whoever did so before does no more."""
        if not self._store.shared:
            return ALONE
        author = self._store.author

        def change(draft: Draft) -> tuple[Owner, int]:
            current = _present(draft, name)
            status = status_of(current)
            before = status.owner
            if before is not None and before.term > author.term:
                raise OperationTaken(f"{before.server} carries operation {name} out")
            number = before.number + 1 if before is not None else 1
            owner = Owner(server=author.server, boot=author.boot, term=author.term, number=number)
            status = msgspec.structs.replace(status, owner=owner)
            made = draft.put(OPERATION, SCOPE, name, spec=current.spec, status=status)
            return owner, made.revision

        done = await self._store.transact(
            change,
            actor=f"system/{author.server}",
            action="boards.provision.own",
            touches=[OPERATION.key(SCOPE, name)],
        )
        owner, revision = done.value
        return Ownership(owner=owner, fence=Fence(lineage=self._store.lineage, revision=revision))

    async def take_back(self, name: str, *, actor: str) -> Operation:
        """Ask whoever carries an operation out, or would, to end it."""

        def change(draft: Draft) -> Operation:
            current = _present(draft, name)
            status = status_of(current)
            if is_over(current) or status.cancelled_by:
                return current
            status = msgspec.structs.replace(status, cancelled_by=actor)
            return draft.put(OPERATION, SCOPE, name, spec=current.spec, status=status)

        return await self._write(name, change, actor=actor, action="boards.provision.cancel")

    async def note(
        self,
        name: str,
        index: int,
        changed: Callable[[StepRecord], StepRecord],
        *,
        actor: str,
        own: Ownership = ALONE,
    ) -> Operation:
        """Write down how far one step is; the operation is in that step's phase."""

        def change(draft: Draft) -> Operation:
            current = _present(draft, name)
            _require(current, own)
            status = status_of(current)
            steps = list(status.steps)
            steps[index] = changed(steps[index])
            status = msgspec.structs.replace(status, steps=tuple(steps), state=steps[index].phase)
            return draft.put(OPERATION, SCOPE, name, spec=current.spec, status=status)

        return await self._write(name, change, actor=actor, action="boards.provision.step")

    async def end(
        self,
        name: str,
        state: ProvisioningState,
        *,
        reason: str = "",
        actor: str,
        own: Ownership = ALONE,
    ) -> Operation:
        """End an operation and release its boards."""

        def change(draft: Draft) -> Operation:
            current = _present(draft, name)
            _require(current, own)
            for work in current.spec.works:
                draft.release(OPERATION, SCOPE, _BOARD_CLAIM, str(work.board), name)
            status = msgspec.structs.replace(
                status_of(current), state=state, reason=reason[:MESSAGE_LIMIT], finished_at_ns=draft.now_ns
            )
            return draft.put(OPERATION, SCOPE, name, spec=current.spec, status=status)

        return await self._write(name, change, actor=actor, action=f"boards.provision.{state}")

    async def _write(
        self, name: str, change: Callable[[Draft], Operation], *, actor: str, action: str
    ) -> Operation:
        done = await self._store.transact(
            change, actor=actor, action=action, touches=[OPERATION.key(SCOPE, name)]
        )
        return done.value


def _present(draft: Draft, name: str) -> Operation:
    found = draft.get(OPERATION, SCOPE, name)
    if found is None:
        raise NotFound(f"there is no operation {name[:64]!r}")
    return found


def _require(operation: Operation, own: Ownership) -> None:
    if own.owner is not None and status_of(operation).owner != own.owner:
        raise OperationTaken(f"another server carries operation {operation.name} out")


def _take(draft: Draft, name: str, spec: OperationSpec) -> None:
    for work in spec.works:
        holder = draft.claimed_by(OPERATION, SCOPE, _BOARD_CLAIM, str(work.board))
        if holder is not None and holder != name:
            raise Conflict(
                f"operation {holder} is at board {work.board}",
                hint="wait for it, or cancel it",
                details={"cause": "busy"},
            )
        draft.claim(OPERATION, SCOPE, _BOARD_CLAIM, str(work.board), name)


class OperationLog:
    """What the commands of one operation print, line by line."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES_LIMIT)
        self._total = 0
        self._changed = asyncio.Event()
        self._over = False

    def add(self, line: str) -> None:
        self._lines.append(line)
        self._total += 1
        self._wake()

    def end(self) -> None:
        self._over = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self) -> AsyncIterator[str]:
        """Every line that is still known and every later one, until the operation is over."""
        seen = 0
        while True:
            changed, first = self._changed, self._total - len(self._lines)
            fresh = list(self._lines)[max(0, seen - first) :]
            seen = self._total
            for line in fresh:
                yield line
            if changed is not self._changed:
                continue  # more came while these were read
            if self._over:
                return
            await changed.wait()


class OperationLogs:
    def __init__(self) -> None:
        self._logs: OrderedDict[str, OperationLog] = OrderedDict()

    def open(self, operation: str) -> OperationLog:
        log = self._logs[operation] = OperationLog()
        while len(self._logs) > LOGS_LIMIT:
            self._logs.popitem(last=False)
        return log

    def get(self, operation: str) -> OperationLog | None:
        return self._logs.get(operation)
