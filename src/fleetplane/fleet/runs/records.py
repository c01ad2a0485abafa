"""What is written down about runs, beside what the ledger knows of each target.

Each domain has a kind of its own, whose spec is `RunSpec` with what that domain runs and on whom. Specs are
stored by field names, so fields may be added, and none may be renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import msgspec

from fleetplane.fleet.runs.policy import RunPolicy
from fleetplane.fleet.runs.targets import Skipped
from fleetplane.kernel.commands import OPEN, Command, CommandState, CommandTarget, state_of
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.resources import Key, Kind, Resource
from fleetplane.kernel.store import ABSENT, Draft, Store

KEEP_SECONDS = 30 * 86_400.0
"""How long a run that ended can be looked up; its targets, for as long as the ledger keeps them."""
SWEEP_BATCH = 256


class RunState(StrEnum):
    RUNNING = "running"
    COMPLETE = "complete"
    """Every target had its turn, whatever came of it."""
    HALTED = "halted"
    """Too much failed; the rest was taken back."""
    CANCELLED = "cancelled"


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What every domain's runs have in common."""

    policy: RunPolicy
    actor: str
    targets: int
    skipped_count: int
    skipped: tuple[Skipped, ...]
    """The first of them."""
    started_at_ns: int


class TargetOutcome(StrEnum):
    """The outcome of a target, as clients of runs see it."""

    OK = "ok"
    ERR = "err"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    NOT_STARTED = "not_started"
    """It never reached the target."""
    RUNNING = "running"
    PENDING = "pending"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How many fared how; with those still under way these are all targets."""

    ok: int = 0
    err: int = 0
    timed_out: int = 0
    cancelled: int = 0
    not_started: int = 0
    running: int = 0
    pending: int = 0

    @classmethod
    def of(cls, targets: Iterable[CommandTarget]) -> Summary:
        counts = dict.fromkeys(TargetOutcome, 0)
        for target in targets:
            counts[outcome_of(target)] += 1
        return cls(**{outcome.value: number for outcome, number in counts.items()})


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    state: RunState = RunState.RUNNING
    ended_at_ns: int | None = None
    summary: Summary | None = None
    """Once every target has its outcome."""

    @property
    def shown(self) -> str:
        """The state for people: a run that had all its turns is `complete` only if every target is ok."""
        found = self.summary
        if self.state is not RunState.COMPLETE or found is None:
            return self.state
        if sum(msgspec.structs.astuple(found)) == found.ok:
            return self.state
        return "partly_failed" if found.ok else "failed"


S = TypeVar("S", bound=RunSpec)
Run: TypeAlias = Resource[S, RunStatus]
RunKind: TypeAlias = Kind[S, RunStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBeside(Generic[S]):
    """The run's record, written in the transaction that issues its command and under the same name."""

    kind: RunKind[S]
    scope: str
    spec: S
    check: Callable[[Draft], None] = lambda _draft: None
    """Refuses the run, by what is so in the transaction."""

    def touches(self, command: str) -> Iterable[Key]:
        return (self.kind.key(self.scope, command),)

    def write(self, draft: Draft, command: Command) -> Run[S]:
        self.check(draft)
        return draft.put(
            self.kind, self.scope, command.name, spec=self.spec, status=RunStatus(), expect=ABSENT
        )


def has_ended(run: Run[S]) -> bool:
    """Whether every target has its outcome, and the run its summary."""
    return run.status is not None and run.status.ended_at_ns is not None


def in_turn(targets: Iterable[CommandTarget]) -> list[CommandTarget]:
    """In the order in which the domain named them, which is the order of their turns."""
    return sorted(targets, key=lambda target: target.created_revision)


def outcome_of(target: CommandTarget) -> TargetOutcome:
    assert target.status is not None
    state = state_of(target)
    if state in OPEN:
        return TargetOutcome.PENDING if state is CommandState.HELD else TargetOutcome.RUNNING
    if state in (CommandState.UNDELIVERABLE, CommandState.EXPIRED):
        return TargetOutcome.NOT_STARTED
    if state is CommandState.CANCELLED and not target.status.deliveries:
        return TargetOutcome.NOT_STARTED
    return _WORDS[state]


_WORDS = {
    CommandState.OK: TargetOutcome.OK,
    CommandState.FAILED: TargetOutcome.ERR,
    CommandState.TIMED_OUT: TargetOutcome.TIMED_OUT,
    CommandState.CANCELLED: TargetOutcome.CANCELLED,
}


class RunBook(Generic[S]):
    """The runs of one domain as they are written down."""

    def __init__(self, store: Store, kind: RunKind[S], *, domain: str) -> None:
        self._store = store
        self._kind = kind
        self._domain = domain

    def __repr__(self) -> str:
        return f"<RunBook {len(self._store.list(self._kind))}>"

    def get(self, scope: str, run_id: str) -> Run[S]:
        found = self.find(scope, run_id)
        if found is None:
            raise NotFound(f"there is no run {run_id[:80]!r}")
        return found

    def find(self, scope: str, run_id: str) -> Run[S] | None:
        return self._store.get(self._kind, scope, run_id.replace("-", "").lower())

    def list(self, scope: str) -> list[Run[S]]:
        found = self._store.list(self._kind, scope)
        return sorted(found, key=lambda run: (run.spec.started_at_ns, run.name), reverse=True)

    def unfinished(self) -> Iterator[Run[S]]:
        for run in self._store.list(self._kind):
            if not has_ended(run):
                yield run

    async def conclude(
        self, run: Run[S], state: RunState, *, actor: str, summary: Summary | None = None
    ) -> RunState:
        """Write how a run ends, and with its summary that it has. The first state that was written stays."""
        kind, scope, name = self._kind, run.scope, run.name

        def change(draft: Draft) -> RunState:
            current = draft.get(kind, scope, name)
            if current is None:
                return state
            known = current.status or RunStatus()
            ended_at_ns = known.ended_at_ns or (draft.now_ns if summary is not None else None)
            status = RunStatus(
                state=state if known.state is RunState.RUNNING else known.state,
                ended_at_ns=ended_at_ns,
                summary=known.summary or summary,
            )
            draft.put(kind, scope, name, spec=current.spec, status=status)
            return status.state

        done = await self._store.transact(
            change, actor=actor, action=f"{self._domain}.run.{state}", touches=[kind.key(scope, name)]
        )
        return done.value

    async def sweep(self, now_ns: int) -> int:
        """Forget runs that ended long ago; how many."""
        before_ns = now_ns - round(KEEP_SECONDS * 1e9)
        old = [
            run.key
            for run in self._store.list(self._kind)
            if run.status is not None
            and run.status.ended_at_ns is not None
            and run.status.ended_at_ns < before_ns
        ]
        for start in range(0, len(old), SWEEP_BATCH):
            batch = old[start : start + SWEEP_BATCH]
            await self._store.transact(
                partial(_forget, self._kind, batch),
                actor=f"system/{self._domain}",
                action=f"{self._domain}.run.sweep",
                touches=batch,
            )
        return len(old)


def _forget(kind: RunKind[S], keys: Iterable[Key], draft: Draft) -> None:
    for key in keys:
        if draft.get(kind, key.scope, key.name) is not None:
            draft.delete(kind, key.scope, key.name)
