"""States and stored records of commands, and the steps between them. Pure.

A table holds the states of a command with one of its targets:

    HELD       written down for later: whoever issued it has not let it go yet
    WAITING    written down, not yet handed over: the target is away, or about to be sent to
    SENT       handed to the target's open session; nothing heard of it yet
    RUNNING    the target said that it began

and six ways to end, of which every target of every command gets exactly one:

    OK, FAILED        the target's own word, or that its session ended and took the answer with it
    TIMED_OUT         it was delivered, and the time to run it passed without that word
    EXPIRED           the time to deliver it passed first
    CANCELLED         whoever issued it took it back, or the target says that it was stopped. A target that
                      has it and cannot stop is only told to: its own word, or none in time, is the outcome
    UNDELIVERABLE     there was nobody to deliver it to, and it was not to wait; or no message can carry it

Two deadlines, because they mean different things: until `deliver_by` nothing has happened to
the target; after delivery, `run_by` says how long its word is waited for. Being delivered is
written down before anything is sent. So a command that is not repeatable reaches its target at
most once, and one whose answer was lost is not sent again: nobody knows whether it was done. A
repeatable one, which its target recognises by its id, is sent again in the next session until
the target answers.

The word of a target is taken whenever it comes before the end, also where the table looks odd:
an answer may overtake the note that the command was sent. What comes after the end changes
nothing, so late and repeated words do no harm.

Stored are each command and each of its targets, and both can be watched by scope:

    COMMAND           in the scope it was issued in, named by its id
    COMMAND_TARGET    below it, in `{scope}/command/{id}`, named by the target

The functions of a draft at the end write a step: state, moments, counts and sums together. What a target
printed is not stored here: see `Outputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from fleetplane.kernel.resources import AnyKind, Key, Kind, Resource
from fleetplane.kernel.store import ABSENT, Draft


class CommandState(StrEnum):
    HELD = "held"
    WAITING = "waiting"
    SENT = "sent"
    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    UNDELIVERABLE = "undeliverable"


OPEN = frozenset({CommandState.HELD, CommandState.WAITING, CommandState.SENT, CommandState.RUNNING})
UNDER_WAY = frozenset({CommandState.SENT, CommandState.RUNNING})
"""The target has it, or may have it."""
OUTCOMES = tuple(state for state in CommandState if state not in OPEN)


class CommandStep(StrEnum):
    """What can happen."""

    RELEASE = "release"
    """What was held may go."""
    HAND_OVER = "hand_over"
    """About to be put on the target's session."""
    TURN_BACK = "turn_back"
    """The session did not take it after all: it certainly did not arrive."""
    UNSENDABLE = "unsendable"
    """No session of the target will ever take it: it cannot be put into a message."""
    NEW_SESSION = "new_session"
    """The target opened another session: what an older one was to deliver may not have arrived."""
    LOST = "lost"
    """The target's session ended. What it had is not answered any more, unless it can be sent again."""
    NOBODY = "nobody"
    """The target is away, and the command is not to wait."""
    REMOVED = "removed"
    """There is no such target any more."""
    STARTED = "started"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    GAVE_UP = "gave_up"
    """The target itself says that the time was not enough."""
    STOPPED = "stopped"
    """The target reports that it stopped on request."""
    TOO_LATE = "too_late"
    """Its deadline has passed: which one depends on the state."""
    CANCEL = "cancel"
    """Where the target has it and cannot stop, it is only told to, and its answer is awaited: see `steps`."""


S = CommandState
WORDS = {
    CommandStep.SUCCEEDED: S.OK,
    CommandStep.FAILED: S.FAILED,
    CommandStep.GAVE_UP: S.TIMED_OUT,
    CommandStep.STOPPED: S.CANCELLED,
}
"""The ends that a target can report itself."""
TABLE: Mapping[CommandState, Mapping[CommandStep, CommandState]] = {
    S.HELD: {
        CommandStep.RELEASE: S.WAITING,
        CommandStep.REMOVED: S.UNDELIVERABLE,
        CommandStep.TOO_LATE: S.EXPIRED,
        CommandStep.CANCEL: S.CANCELLED,
    },
    S.WAITING: {
        **WORDS,
        CommandStep.HAND_OVER: S.SENT,
        CommandStep.NOBODY: S.UNDELIVERABLE,
        CommandStep.UNSENDABLE: S.UNDELIVERABLE,
        CommandStep.REMOVED: S.UNDELIVERABLE,
        CommandStep.STARTED: S.RUNNING,
        CommandStep.TOO_LATE: S.EXPIRED,
        CommandStep.CANCEL: S.CANCELLED,
    },
    S.SENT: {
        **WORDS,
        CommandStep.TURN_BACK: S.WAITING,
        CommandStep.NEW_SESSION: S.WAITING,
        CommandStep.LOST: S.FAILED,
        CommandStep.REMOVED: S.FAILED,
        CommandStep.STARTED: S.RUNNING,
        CommandStep.TOO_LATE: S.TIMED_OUT,
        CommandStep.CANCEL: S.CANCELLED,
    },
    S.RUNNING: {
        **WORDS,
        CommandStep.LOST: S.FAILED,
        CommandStep.REMOVED: S.FAILED,
        CommandStep.TOO_LATE: S.TIMED_OUT,
        CommandStep.CANCEL: S.CANCELLED,
    },
    **{outcome: {} for outcome in OUTCOMES},
}


def after(
    state: CommandState, step: CommandStep, *, repeatable: bool = True, delivered: bool = False
) -> CommandState:
    """The next state; the same one if the step means nothing there.

    `delivered` says that an earlier session may have brought the command to its target, which is
    why WAITING then does not end as if nothing could have happened.
    """
    if step is (CommandStep.LOST if repeatable else CommandStep.NEW_SESSION):
        return state
    if state is S.WAITING and delivered:
        return _AGAIN.get(step, TABLE[state].get(step, state))
    return TABLE[state].get(step, state)


_AGAIN: Mapping[CommandStep, CommandState] = {
    CommandStep.NOBODY: S.WAITING,
    CommandStep.UNSENDABLE: S.FAILED,
    CommandStep.REMOVED: S.FAILED,
    CommandStep.TOO_LATE: S.TIMED_OUT,
}


DETAIL_LIMIT = 1024
"""Characters kept of a target's message; longer text belongs to the output."""
TOO_LATE = "no word came in time"
AWAY = "the target is away"
MAY_FINISH = "told to stop; may finish"


class CommandSpec(msgspec.Struct, frozen=True, kw_only=True):
    channel: str
    """Which part of the server delivers it."""
    verb: str
    payload: bytes
    """For the courier; opaque here."""
    actor: str
    targets: int
    wait: bool
    """Whether it waits for targets that are away."""
    repeatable: bool
    """Whether a target recognises a command that it has seen."""
    run_for_ns: int


class CommandStatus(msgspec.Struct, frozen=True, kw_only=True):
    open: int
    """Targets without an outcome; with the outcomes these are all targets."""
    outcomes: dict[CommandState, int] = {}
    finished_at_ns: int | None = None


class CommandTargetSpec(msgspec.Struct, frozen=True, kw_only=True):
    command: str
    command_scope: str
    channel: str
    verb: str
    target: str
    deliver_by_ns: int


class TargetStatus(msgspec.Struct, frozen=True, kw_only=True):
    state: CommandState
    changed_at_ns: int
    deliveries: int = 0
    run_by_ns: int | None = None
    """While it is delivered and has no outcome."""
    detail: str = ""
    """The target's own message, or why there is none."""
    result: bytes = b""
    """The result that came with it; opaque here."""
    told_to_stop: bool = False
    """It was cancelled while a target had it that cannot stop: what that says later is the outcome."""
    session: int = 0
    """The target's session that it was sent in, where several servers have sessions; 0 on a database file."""


Command = Resource[CommandSpec, CommandStatus]
CommandTarget = Resource[CommandTargetSpec, TargetStatus]

COMMAND: Kind[CommandSpec, CommandStatus] = Kind("command", CommandSpec, CommandStatus, is_secret=True)
COMMAND_TARGET: Kind[CommandTargetSpec, TargetStatus] = Kind(
    "command-target", CommandTargetSpec, TargetStatus, is_secret=True
)


def targets_scope(scope: str, command: str) -> str:
    return f"{scope}/command/{command}" if scope else f"command/{command}"


def finished_before(command: Command, moment_ns: int) -> bool:
    status = command.status
    return status is not None and status.finished_at_ns is not None and status.finished_at_ns < moment_ns


def state_of(target: CommandTarget) -> CommandState:
    assert target.status is not None, "a target is written with its status"
    return target.status.state


def is_open(target: CommandTarget) -> bool:
    return state_of(target) in OPEN


def due_ns(target: CommandTarget) -> int | None:
    """When the present state has lasted long enough; None at the end."""
    if not is_open(target):
        return None
    assert target.status is not None
    under_way = state_of(target) in UNDER_WAY
    return target.status.run_by_ns if under_way else target.spec.deliver_by_ns


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
        state = after(status.state, step, repeatable=command.repeatable, delivered=status.deliveries > 0)
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
