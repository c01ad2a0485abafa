"""Defects of ledgers among several servers, put into a server of the simulation."""

from __future__ import annotations

from collections.abc import Sequence

from support.shared.agents_host import Host, LedgerDefects

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import CommandState, state_of
from fleetplane.kernel.commands.rules import CommandStep, Move
from fleetplane.kernel.commands.sessions import SessionRules
from fleetplane.kernel.resources import Key


def put_in(defects: LedgerDefects, host: Host, clock: Clock) -> None:
    ledger = host.ledger
    rules: SessionRules = ledger._sessions
    if defects.lost_without_session:
        losing = rules.losing
        rules.losing = lambda session: {  # type: ignore[method-assign]
            step: condition for step, condition in losing(session).items() if step is CommandStep.NOBODY
        }
    if defects.first_state_from_memory:
        delivery = ledger._delivery
        rules.first_state = lambda _, target, __, *, wait: (  # type: ignore[method-assign, assignment]
            delivery._first_state(target, wait=wait),
            rules.here(target) or 0,
        )
    if defects.new_session_of_an_older_one:
        rules.renewing = lambda _: {}  # type: ignore[method-assign, assignment]
    if defects.deadlines_by_own_clock:
        ledger._clock = clock
        host.store._writer.clock = clock
    if defects.key_is_kept_after_its_command:
        host.store._hooks = {}
    if defects.sent_before_it_is_durable:
        _send_first(host)


def _send_first(host: Host) -> None:
    """Send what waits, and write down afterwards that it was sent."""
    book = host.ledger._book
    move = book.move

    async def moved(moves: Sequence[Move], *, actor: str = "") -> list[Key]:
        for one in moves:
            target = book.find(one.key)
            if (
                CommandStep.HAND_OVER in one.steps
                and target is not None
                and state_of(target) is CommandState.WAITING
            ):
                command = book.command_of(target)
                if command is not None and target.spec.target in host.streams:
                    host.deliver(target.spec.target, command)
        return await move(moves, actor=actor)

    book.move = moved  # type: ignore[method-assign]
