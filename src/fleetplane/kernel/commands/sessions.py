"""Which session of a target something concerns, where several servers have sessions.

A target has at most one session that counts: the one that its presence names. A server learns late that a
target has gone to another one, so what it wants is decided inside the transaction:

    hand over      only in the session that presence names now, and only by the server that has it
    turn back      only what was sent in that very session
    lost           what was sent in a session that has ended; never what was sent in a newer one
    new session    what was sent in an older one
    nobody         only if presence names no session

On a database file there is one server, which knows its sessions: nothing is asked, and sessions are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fleetplane.kernel.commands.rules import (
    UNDER_WAY,
    CommandState,
    CommandStep,
    CommandTargetSpec,
    Condition,
    TargetStatus,
)
from fleetplane.kernel.resources import Kind, Resource, SpecT, StatusT
from fleetplane.kernel.store import Draft


class SessionReader(Protocol):
    """The store, or a draft of a transaction."""

    def get(self, kind: Kind[SpecT, StatusT], scope: str, name: str) -> Resource[SpecT, StatusT] | None: ...


class SessionPlaces(Protocol):
    """Where the targets of a channel have their sessions: see `kernel.presence.Whereabouts`.

    Numbers of sessions grow: a later session of a target has a higher one, on whichever server.
    """

    @property
    def shared(self) -> bool:
        """Whether other servers may have targets."""

    def session_here(self, agent: str) -> int | None:
        """The session that a target has on this server."""

    def named(self, reader: SessionReader, agent: str) -> int | None:
        """The session that counts, on whichever server."""


Conditions = Mapping[CommandStep, Condition]
ALWAYS: Conditions = {}


class SessionRules:
    def __init__(self, places: SessionPlaces | None) -> None:
        self._places = places if places is not None and places.shared else None

    def __repr__(self) -> str:
        return f"<SessionRules shared={self.shared}>"

    @property
    def shared(self) -> bool:
        return self._places is not None

    def here(self, target: str) -> int | None:
        """The session that a target has on this server; on a database file it may always have one."""
        return 0 if self._places is None else self._places.session_here(target)

    def first_state(
        self, draft: Draft, target: str, ready: int | None, *, wait: bool
    ) -> tuple[CommandState, int]:
        """Of a new command. `ready` is the session that a target has here, if that has room for it."""
        named = self._named(draft, target)
        if named is None:
            return CommandState.WAITING if wait else CommandState.UNDELIVERABLE, 0
        return (CommandState.SENT, named) if named == ready else (CommandState.WAITING, 0)

    def handing_over(self, session: int) -> Conditions:
        if self._places is None:
            return ALWAYS
        return {
            CommandStep.HAND_OVER: lambda draft, spec, _: self._named(draft, spec.target) == session,
            CommandStep.NOBODY: self._nobody,
        }

    def turning_back(self, session: int, *, refused: bool) -> Conditions:
        """`refused`: the session is there, and does not take it."""
        if self._places is None:
            return ALWAYS

        def nobody(draft: Draft, spec: CommandTargetSpec, _: TargetStatus) -> bool:
            named = self._named(draft, spec.target)
            return named is None or (refused and named == session)

        return {CommandStep.TURN_BACK: _sent_in(session), CommandStep.NOBODY: nobody}

    def losing(self, session: int | None) -> Conditions:
        """Of the session that has ended; None: of all that presence does not name."""
        if self._places is None:
            return ALWAYS
        ended = self._unnamed if session is None else _sent_in(session)
        return {CommandStep.LOST: ended, CommandStep.FAILED: ended, CommandStep.NOBODY: self._nobody}

    def renewing(self, session: int | None) -> Conditions:
        """Of a session that begins; None: of whichever presence names."""
        if self._places is None:
            return ALWAYS
        if session is None:
            return {CommandStep.NEW_SESSION: self._unnamed}
        return {CommandStep.NEW_SESSION: lambda _, __, status: status.session < session}

    def may_be_lost(self, reader: SessionReader, spec: CommandTargetSpec, status: TargetStatus) -> bool:
        """Whether a target may concern a session that nobody has any more."""
        if self._places is None:
            return True
        named = self._places.named(reader, spec.target)
        return named is None or (status.state in UNDER_WAY and status.session != named)

    def _named(self, draft: Draft, target: str) -> int | None:
        assert self._places is not None
        return self._places.named(draft, target)

    def _nobody(self, draft: Draft, spec: CommandTargetSpec, _: TargetStatus) -> bool:
        return self._named(draft, spec.target) is None

    def _unnamed(self, draft: Draft, spec: CommandTargetSpec, status: TargetStatus) -> bool:
        return self._named(draft, spec.target) != status.session


def _sent_in(session: int) -> Condition:
    return lambda _, __, status: status.session == session
