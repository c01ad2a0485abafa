"""Knows what was written about agents and their commands, and what must never be."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from support.shared.cluster_sim import CLOCK_ERROR_SECONDS, KEY, require
from support.shared.memory_engine import SECOND_NS, MemoryDatabase
from support.shared.storekit import THING
from support.shared.virtual_loop import LoopClock

from fleetplane.kernel.commands import (
    COMMAND,
    COMMAND_TARGET,
    OPEN,
    UNDER_WAY,
    Command,
    CommandState,
    CommandTarget,
)
from fleetplane.kernel.commands.rules import TOO_LATE, CommandStatus, TargetStatus
from fleetplane.kernel.events import EventType
from fleetplane.kernel.presence import PRESENCE, PresenceSpec
from fleetplane.kernel.sealing import Sealer
from fleetplane.kernel.store.engine import LoggedGroup, LogRow

LOST = ("the session ended", "the server was restarted")
ERROR_NS = round(CLOCK_ERROR_SECONDS * SECOND_NS)

At = tuple[str, str]
"""A target and a command."""


class AgentsJudge:
    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database
        sealer = Sealer(KEY, LoopClock(random.Random(0)))
        self._command_kind = replace(COMMAND, sealer=sealer)
        self._target_kind = replace(COMMAND_TARGET, sealer=sealer)
        self._presences: dict[str, PresenceSpec] = {}
        self._targets: dict[At, CommandTarget] = {}
        self._commands: dict[str, CommandStatus] = {}
        self.connected: dict[str, tuple[int, bool]] = {}
        """What is written of each agent: the session that said so, and whether it is connected."""
        self.open: set[At] = set()
        self.over: set[int] = set()
        """Sessions whose stream has ended, although presence may not say so yet."""
        self._sent: set[tuple[At, int]] = set()
        self._arrived: Counter[tuple[At, int]] = Counter()
        self.keyed: dict[str, str] = {}
        """Of each key that a client asked with, its command."""
        self.outcomes: Counter[CommandState] = Counter()
        self.sessions = 0
        """That were entered."""
        append = database._append

        def checked(*given: object) -> None:
            append(*given)  # type: ignore[arg-type]
            self._written(database.head)

        database._append = checked  # type: ignore[method-assign, assignment]

    def named(self, agent: str) -> int | None:
        found = self._presences.get(agent)
        return found.session if found is not None and found.is_open else None

    # What is written.

    def _written(self, group: LoggedGroup) -> None:
        touched: set[str] = set()
        for row in group.log:
            if row.kind == PRESENCE.name:
                self._presence(row)
            elif row.kind == COMMAND.name:
                command: Command = self._command_kind.decode(row.body)
                assert command.status is not None
                if key := command.spec.payload:
                    first = self.keyed.setdefault(key.decode(), command.name)
                    require(first == command.name, f"{key!r} is two commands")
                self._commands[command.name] = command.status
                touched.add(command.name)
            elif row.kind == COMMAND_TARGET.name:
                target: CommandTarget = self._target_kind.decode(row.body)
                self._target(target)
                touched.add(target.spec.command)
            elif row.kind == THING.name:
                self._standing(row)
        for name in touched:
            self._summed_up(name)

    def _presence(self, row: LogRow) -> None:
        require(row.type != EventType.DELETED, "a presence is forgotten within an hour")
        found = PRESENCE.decode(row.body)
        before = self._presences.get(found.name)
        require(
            before is None or found.spec.session >= before.session,
            f"{found.name} has session {found.spec.session} after {before and before.session}",
        )
        self.sessions += before is None or found.spec.session > before.session
        self._presences[found.name] = found.spec

    def _standing(self, row: LogRow) -> None:
        found = THING.decode(row.body)
        assert found.status is not None
        named = self.named(found.name)
        if found.status.ready:
            require(named == found.spec.value, f"{found.name} is said to be connected by an old session")
        else:
            require(named is None, f"{found.name} is said to be disconnected, and has session {named}")
        self.connected[found.name] = (found.spec.value, found.status.ready)

    def _target(self, target: CommandTarget) -> None:
        at = (target.spec.target, target.spec.command)
        known = self._targets.get(at)
        before, after = known.status if known is not None else None, target.status
        assert after is not None
        if before == after:  # stored once more, sealed
            return
        where = f"{at[0]} with command {at[1][:6]}"
        require(before is None or before.state in OPEN, f"{where} has an outcome after {before}: {after}")
        self._step(where, at, before, after)
        self._ended(where, target, before, after)
        self._targets[at] = target
        if after.state in OPEN:
            self.open.add(at)
        else:
            self.open.discard(at)
            self.outcomes[after.state] += 1

    def _step(self, where: str, at: At, before: TargetStatus | None, after: TargetStatus) -> None:
        named, was = self.named(at[0]), before.state if before is not None else None
        if after.state is CommandState.SENT and was is not CommandState.SENT:
            require(after.session == named, f"{where} was sent in session {after.session}, and has {named}")
        if before is not None and was in UNDER_WAY and after.state is CommandState.WAITING:
            if after.deliveries < before.deliveries:
                require((at, before.session) not in self._sent, f"{where} was sent, and then not")
            else:
                require(named != before.session, f"{where} has it in its session, and is to get it again")

    def _ended(
        self, where: str, target: CommandTarget, before: TargetStatus | None, after: TargetStatus
    ) -> None:
        named, now_ns = self.named(target.spec.target), self._database.now_ns() + ERROR_NS
        if after.state is CommandState.UNDELIVERABLE:
            require(named is None, f"{where} is undeliverable, and has session {named}")
        if after.state is CommandState.EXPIRED:
            early = target.spec.deliver_by_ns - now_ns
            require(early <= 0, f"{where} expired {early / SECOND_NS:.0f} s early")
        if before is None or before.state not in UNDER_WAY:
            return
        if after.state is CommandState.FAILED and after.detail in LOST:
            over = before.session != named or before.session in self.over
            require(over, f"{where} was lost with the session that it has: {after}")
        if after.state is CommandState.TIMED_OUT and after.detail == TOO_LATE:
            assert before.run_by_ns is not None
            require(before.run_by_ns <= now_ns, f"{where} timed out early")

    def _summed_up(self, name: str) -> None:
        theirs = [target.status for at, target in self._targets.items() if at[1] == name]
        states = Counter(status.state for status in theirs if status is not None)
        status = self._commands[name]
        counted = {state: states[state] for state in states if state not in OPEN}
        require(status.outcomes == counted, f"{name}: {status.outcomes} and not {counted}")
        require(status.open == len(theirs) - sum(counted.values()), f"{name} has {status.open} open")

    # What travels.

    def sent(self, agent: str, session: int, command: str) -> None:
        """A server puts a command on a session of an agent."""
        at = (agent, command)
        known = self._targets.get(at)
        status = known.status if known is not None else None
        require(status is not None and status.deliveries > 0, f"{at} is sent before that is durable")
        self._sent.add((at, session))

    def arrived(self, agent: str, session: int, command: Command) -> None:
        """The agent has it."""
        at = (agent, command.name)
        self._arrived[at, session] += 1
        require(self._arrived[at, session] == 1, f"{at} arrived twice in session {session}")
        times = sum(count for (other, _), count in self._arrived.items() if other == at)
        require(times == 1 or command.spec.repeatable, f"{at} cannot be repeated, and arrived {times} times")

    def answered(self, agent: str, command: str, word: CommandState) -> None:
        """A server was told that this is the outcome."""
        status = self._targets[agent, command].status
        require(status is not None and status.state is word, f"{agent} said {word}, and {status} is written")
