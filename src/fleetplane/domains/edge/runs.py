"""What is written down about runs, beside what the ledger knows of each target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from fleetplane.domains.edge.kinds import Spec, tenant_scope
from fleetplane.domains.edge.policy import RunPolicy
from fleetplane.domains.edge.targets import Skipped, Target
from fleetplane.kernel.commands import OPEN, Command, CommandTarget, State, state_of
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


class RunSpec(Spec, frozen=True):
    target: Target
    tool: str
    args_json: bytes
    security_context: str
    policy: RunPolicy
    actor: str
    targets: int
    skipped_count: int
    skipped: tuple[Skipped, ...]
    """The first of them."""
    started_at_ns: int


class Outcome(StrEnum):
    """How a target fared, in the words of the run's readers."""

    OK = "ok"
    ERR = "err"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    NOT_STARTED = "not_started"
    """It never reached the daemon."""
    RUNNING = "running"
    PENDING = "pending"


class Summary(Spec, frozen=True):
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
        counts = dict.fromkeys(Outcome, 0)
        for target in targets:
            counts[outcome_of(target)] += 1
        return cls(**{outcome.value: number for outcome, number in counts.items()})


class RunStatus(Spec, frozen=True):
    state: RunState = RunState.RUNNING
    ended_at_ns: int | None = None
    summary: Summary | None = None
    """Once every target has its outcome."""


Run = Resource[RunSpec, RunStatus]
EDGE_RUN: Kind[RunSpec, RunStatus] = Kind("edge-run", RunSpec, RunStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBeside:
    """The run's record, written in the transaction that issues its command and under the same name."""

    scope: str
    spec: RunSpec

    def touches(self, command: str) -> Iterable[Key]:
        return (EDGE_RUN.key(self.scope, command),)

    def write(self, draft: Draft, command: Command) -> None:
        draft.put(EDGE_RUN, self.scope, command.name, spec=self.spec, status=RunStatus(), expect=ABSENT)


def outcome_of(target: CommandTarget) -> Outcome:
    assert target.status is not None
    state = state_of(target)
    if state in OPEN:
        return Outcome.PENDING if state is State.HELD else Outcome.RUNNING
    if state in (State.UNDELIVERABLE, State.EXPIRED):
        return Outcome.NOT_STARTED
    if state is State.CANCELLED and not target.status.deliveries:
        return Outcome.NOT_STARTED
    return _WORDS[state]


_WORDS = {
    State.OK: Outcome.OK,
    State.FAILED: Outcome.ERR,
    State.TIMED_OUT: Outcome.TIMED_OUT,
    State.CANCELLED: Outcome.CANCELLED,
}


class RunBook:
    """The runs as they are written down."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<RunBook {len(self._store.list(EDGE_RUN))}>"

    def get(self, tenant: str, run_id: str) -> Run:
        found = self._store.get(EDGE_RUN, tenant_scope(tenant), run_id.replace("-", "").lower())
        if found is None:
            raise NotFound(f"there is no run {run_id[:80]!r}")
        return found

    def list(self, tenant: str) -> list[Run]:
        found = self._store.list(EDGE_RUN, tenant_scope(tenant))
        return sorted(found, key=lambda run: (run.spec.started_at_ns, run.name), reverse=True)

    def unfinished(self) -> Iterator[Run]:
        for run in self._store.list(EDGE_RUN):
            if run.status is None or run.status.ended_at_ns is None:
                yield run

    async def conclude(
        self, run: Run, state: RunState, *, actor: str, summary: Summary | None = None
    ) -> RunState:
        """Say how a run ends, and with its summary that it has. The first word on how stands."""
        scope, name = run.scope, run.name

        def change(draft: Draft) -> RunState:
            current = draft.get(EDGE_RUN, scope, name)
            if current is None:
                return state
            known = current.status or RunStatus()
            ended_at_ns = known.ended_at_ns or (draft.now_ns if summary is not None else None)
            status = RunStatus(
                state=state if known.state is RunState.RUNNING else known.state,
                ended_at_ns=ended_at_ns, summary=known.summary or summary,
            )  # fmt: skip
            draft.put(EDGE_RUN, scope, name, spec=current.spec, status=status)
            return status.state

        done = await self._store.transact(
            change, actor=actor, action=f"edge.run.{state}", touches=[EDGE_RUN.key(scope, name)]
        )
        return done.value

    async def sweep(self, now_ns: int) -> int:
        """Forget runs that ended long ago; how many."""
        before_ns = now_ns - round(KEEP_SECONDS * 1e9)
        old = [
            run.key
            for run in self._store.list(EDGE_RUN)
            if run.status is not None
            and run.status.ended_at_ns is not None
            and run.status.ended_at_ns < before_ns
        ]
        for start in range(0, len(old), SWEEP_BATCH):
            batch = old[start : start + SWEEP_BATCH]
            await self._store.transact(
                partial(_forget, batch), actor="system/edge", action="edge.run.sweep", touches=batch
            )
        return len(old)


def _forget(keys: Iterable[Key], draft: Draft) -> None:
    for key in keys:
        if draft.get(EDGE_RUN, key.scope, key.name) is not None:
            draft.delete(EDGE_RUN, key.scope, key.name)
