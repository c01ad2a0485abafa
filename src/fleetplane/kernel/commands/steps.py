"""What a transaction about commands writes. Pure functions of a draft.

`rules` decides the state; here are the moments, counts and sums that go with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from fleetplane.kernel.commands import rules
from fleetplane.kernel.commands.kinds import (
    COMMAND,
    COMMAND_TARGET,
    Command,
    CommandSpec,
    CommandStatus,
    CommandTarget,
    CommandTargetSpec,
    TargetStatus,
    targets_scope,
)
from fleetplane.kernel.commands.rules import OPEN, UNDER_WAY, CommandState, CommandStep
from fleetplane.kernel.resources import AnyKind, Key
from fleetplane.kernel.store import ABSENT, Draft

DETAIL_LIMIT = 1024
"""Characters kept of a target's message; longer text belongs to the output."""
TOO_LATE = "no word came in time"
AWAY = "the target is away"
MAY_FINISH = "told to stop; may finish"


Condition = Callable[[Draft, CommandTargetSpec, TargetStatus], bool]
"""Whether a step concerns a target as it is in a transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Steps for one target, taken in order and together."""

    key: Key
    steps: Sequence[CommandStep]
    detail: str = ""
    result: bytes = b""
    stops: bool = True
    """Whether the target can stop what it has; one that cannot is only told to."""
    session: int = 0
    """The session in which it is handed over, or in which the target says something."""
    only_if: Mapping[CommandStep, Condition] = field(default_factory=dict)
    """Steps that are passed over unless this holds when they are decided."""


def begun(state: CommandState, spec: CommandSpec, now_ns: int, session: int = 0) -> TargetStatus:
    if state is not CommandState.SENT:
        detail = AWAY if state is CommandState.UNDELIVERABLE else ""
        return TargetStatus(state=state, changed_at_ns=now_ns, detail=detail)
    return TargetStatus(
        state=state,
        changed_at_ns=now_ns,
        deliveries=1,
        run_by_ns=now_ns + spec.run_for_ns,
        session=session,
    )


def write_down(
    draft: Draft,
    scope: str,
    command: str,
    *,
    spec: CommandSpec,
    first: Mapping[str, tuple[CommandState, int]],
    deliver_by_ns: int,
) -> tuple[Command, list[CommandTarget]]:
    """A new command with all its targets, each in its first state and in the session that it is sent in."""
    below = targets_scope(scope, command)
    made = [
        draft.put(
            COMMAND_TARGET,
            below,
            name,
            spec=CommandTargetSpec(
                command=command,
                command_scope=scope,
                channel=spec.channel,
                verb=spec.verb,
                target=name,
                deliver_by_ns=deliver_by_ns,
            ),
            status=begun(state, spec, draft.now_ns, session),
            expect=ABSENT,
        )
        for name, (state, session) in first.items()
    ]
    states = (state for state, _ in first.values())
    status = counted(CommandStatus(open=len(made)), states, draft.now_ns)
    return draft.put(COMMAND, scope, command, spec=spec, status=status, expect=ABSENT), made


def take(draft: Draft, moves: Sequence[Move]) -> list[CommandTarget]:
    """Decide every move on what is so now, and write what changed, with the commands' sums."""
    changed: list[CommandTarget] = []
    ended: dict[tuple[str, str], list[CommandState]] = {}
    for move in moves:
        target = draft.get(COMMAND_TARGET, move.key.scope, move.key.name)
        command = draft.get(COMMAND, target.spec.command_scope, target.spec.command) if target else None
        if target is None or command is None:
            continue
        status = _taken(draft, target, move, command.spec)
        if status == target.status:
            continue
        changed.append(
            draft.put(COMMAND_TARGET, move.key.scope, move.key.name, spec=target.spec, status=status)
        )
        if status.state not in OPEN:
            ended.setdefault((command.scope, command.name), []).append(status.state)
    _sum_up(draft, ended)
    return changed


def _taken(draft: Draft, target: CommandTarget, move: Move, command: CommandSpec) -> TargetStatus:
    status, now_ns = target.status, draft.now_ns
    assert status is not None
    overdue = now_ns >= target.spec.deliver_by_ns
    for asked in move.steps:
        condition = move.only_if.get(asked)
        if condition is not None and not condition(draft, target.spec, status):
            continue
        if asked is CommandStep.TOO_LATE and now_ns < (_due_ns(target.spec, status) or 0):
            continue  # it was another state's deadline, or another clock's
        if asked is CommandStep.CANCEL and not move.stops and status.state in UNDER_WAY:
            if not status.told_to_stop:
                status = msgspec.structs.replace(
                    status, told_to_stop=True, detail=f"{MAY_FINISH}: {move.detail}"[:DETAIL_LIMIT]
                )
            continue
        step = CommandStep.TOO_LATE if overdue and asked is CommandStep.HAND_OVER else asked
        if overdue and asked is CommandStep.NEW_SESSION:
            continue  # too late to send it again: what was sent may still be answered
        state = rules.after(
            status.state, step, repeatable=command.repeatable, delivered=status.deliveries > 0
        )
        if state is status.state:
            continue
        status = TargetStatus(
            state=state,
            changed_at_ns=now_ns,
            deliveries=status.deliveries + (step is CommandStep.HAND_OVER) - (step is CommandStep.TURN_BACK),
            run_by_ns=_run_by_ns(status, state, command, now_ns),
            detail="" if state in OPEN else _words(status, state, move),
            told_to_stop=status.told_to_stop and state is not CommandState.WAITING,
            result=b"" if state in OPEN else move.result,
            session=_session(status, state, step, move),
        )
    return status


def _session(status: TargetStatus, state: CommandState, step: CommandStep, move: Move) -> int:
    """The session in which its outcome is awaited: the one that it was sent in, or that says it began."""
    if state is CommandState.WAITING:
        return 0
    return move.session if step in (CommandStep.HAND_OVER, CommandStep.STARTED) else status.session


def _due_ns(spec: CommandTargetSpec, status: TargetStatus) -> int | None:
    return status.run_by_ns if status.state in UNDER_WAY else spec.deliver_by_ns


def _words(status: TargetStatus, state: CommandState, move: Move) -> str:
    unsure = status.told_to_stop and state is CommandState.TIMED_OUT and not move.result
    return (f"{MAY_FINISH}: {move.detail}" if unsure else move.detail)[:DETAIL_LIMIT]


def _run_by_ns(status: TargetStatus, state: CommandState, command: CommandSpec, now_ns: int) -> int | None:
    """Counted from the handing over; from its first word if that overtook the note of it."""
    if state is CommandState.SENT or (state is CommandState.RUNNING and status.run_by_ns is None):
        return now_ns + command.run_for_ns
    return status.run_by_ns if state is CommandState.RUNNING else None


def _sum_up(draft: Draft, ended: Mapping[tuple[str, str], Sequence[CommandState]]) -> None:
    for (scope, name), states in ended.items():
        command = draft.get(COMMAND, scope, name)
        assert command is not None
        assert command.status is not None
        status = counted(command.status, states, draft.now_ns)
        draft.put(COMMAND, scope, name, spec=command.spec, status=status)


def counted(status: CommandStatus, states: Iterable[CommandState], now_ns: int) -> CommandStatus:
    outcomes = dict(status.outcomes)
    open_ = status.open
    for state in states:
        if state not in OPEN:
            outcomes[state] = outcomes.get(state, 0) + 1
            open_ -= 1
    finished = now_ns if open_ == 0 else None
    return msgspec.structs.replace(status, open=open_, outcomes=outcomes, finished_at_ns=finished)


def forget(draft: Draft, keys: Iterable[Key]) -> None:
    for key in keys:
        kind: AnyKind = COMMAND if key.kind == COMMAND.name else COMMAND_TARGET
        if draft.get(kind, key.scope, key.name) is not None:
            draft.delete(kind, key.scope, key.name)
