"""How a command fares with one of its targets, as a table. Pure.

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
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


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
