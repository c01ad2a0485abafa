"""The ledger against a model, with sessions, answers, time and restarts in any order."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from support.shared.commandkit import SCOPE, FakeCourier, ledger

from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, OPEN, OUTCOMES, CommandState, state_of
from fleetplane.kernel.commands.ledger import Commands
from fleetplane.kernel.store import Store
from fleetplane.sim.clock import VirtualClock

pytestmark = pytest.mark.slow

TARGETS = ("a", "b", "c")
targets = st.sampled_from(TARGETS)
Word = tuple[str, str, str]
"""Target, command and what it says."""


class LedgerMachine(RuleBasedStateMachine):
    commands_issued = Bundle("commands_issued")
    in_the_air: Bundle[Word] = Bundle("in_the_air")
    """Words of targets that have not arrived yet; they arrive in any order, and some twice."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        # In memory where possible: these histories are about order, not about disks.
        memory = Path("/dev/shm")
        self.folder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
        self.clock = VirtualClock()
        self.courier = FakeCourier()
        self.ended: dict[tuple[str, str], CommandState] = {}
        """The first outcome that was seen of each."""
        self.once: set[str] = set()
        self.stack = AsyncExitStack()
        self.store: Store
        self.commands: Commands
        self.do(self.open())

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    async def open(self) -> None:
        made = ledger(Path(self.folder.name), self.clock, self.courier)
        self.store, self.commands = await self.stack.enter_async_context(made)

    @rule(
        target=commands_issued,
        names=st.sets(targets, min_size=1),
        wait=st.booleans(),
        repeatable=st.booleans(),
        deliver=st.integers(1, 60),
        run=st.integers(1, 60),
    )
    def issue(self, names: set[str], wait: bool, repeatable: bool, deliver: int, run: int) -> str:
        issued = self.do(
            self.commands.issue(
                SCOPE,
                "x",
                sorted(names),
                actor="u",
                wait=wait,
                repeatable=repeatable,
                deliver_within_seconds=deliver,
                run_for_seconds=run,
            )
        )
        if not repeatable:
            self.once.add(issued.name)
        return str(issued.name)

    @rule(name=targets)
    def come(self, name: str) -> None:
        self.courier.here.add(name)
        self.do(self.commands.arrived(name))

    @rule(name=targets)
    def go(self, name: str) -> None:
        self.courier.here.discard(name)

    @rule(name=targets, full=st.booleans())
    def be_full(self, name: str, full: bool) -> None:
        (self.courier.full.add if full else self.courier.full.discard)(name)

    @rule(
        target=in_the_air, command=commands_issued, name=targets, word=st.sampled_from(("start", "ok", "no"))
    )
    def say(self, command: str, name: str, word: str) -> Word:
        return name, command, word

    @rule(target=in_the_air, word=consumes(in_the_air), again=st.booleans())
    def hear(self, word: Word, again: bool) -> Any:
        name, command, said = word
        if said == "start":
            self.do(self.commands.started(name, command))
        else:
            self.do(self.commands.answered(name, command, ok=said == "ok", detail=said, output="words"))
        return word if again else multiple()

    @rule(command=commands_issued)
    def cancel(self, command: str) -> None:
        self.do(self.commands.cancel(SCOPE, command, actor="u"))

    @rule(name=targets)
    def remove(self, name: str) -> None:
        self.courier.here.discard(name)
        self.do(self.commands.removed(name))

    @rule(seconds=st.integers(1, 70), noticed=st.booleans())
    def pass_time(self, seconds: int, noticed: bool) -> None:
        self.do(self.clock.advance(seconds))
        if noticed:
            self.do(self.commands.expire())

    @rule(agents_too=st.booleans())
    def restart(self, agents_too: bool) -> None:
        if agents_too:
            self.courier.here.clear()
        self.do(self.stack.aclose())
        self.do(self.open())

    @invariant()
    def outcomes_and_open_targets_are_all_targets(self) -> None:
        for command in self.store.list(COMMAND):
            states = [state_of(target) for target in self.commands.targets(command)]
            assert command.status is not None
            assert len(states) == command.spec.targets
            assert command.status.open == sum(state in OPEN for state in states)
            assert command.status.open + sum(command.status.outcomes.values()) == command.spec.targets
            for outcome in OUTCOMES:
                assert command.status.outcomes.get(outcome, 0) == states.count(outcome)
            assert (command.status.finished_at_ns is not None) == (command.status.open == 0)

    @invariant()
    def an_outcome_never_changes(self) -> None:
        for target in self.store.list(COMMAND_TARGET):
            state = state_of(target)
            if state in OUTCOMES:
                assert self.ended.setdefault((target.spec.command, target.name), state) is state

    @invariant()
    def what_is_not_repeatable_was_delivered_at_most_once(self) -> None:
        sent = [(name, command) for name, _, command in self.courier.delivered if command in self.once]
        assert len(sent) == len(set(sent))

    @invariant()
    def what_ended_undelivered_was_never_delivered(self) -> None:
        sent = {(name, command) for name, _, command in self.courier.delivered}
        for (command, name), state in self.ended.items():
            if state in (CommandState.EXPIRED, CommandState.UNDELIVERABLE):
                assert (name, command) not in sent

    def teardown(self) -> None:
        """When all time has passed, everything has ended."""
        try:
            self.do(self.clock.advance(10_000))
            self.do(self.commands.expire())
            assert all(state_of(target) in OUTCOMES for target in self.store.list(COMMAND_TARGET))
            self.outcomes_and_open_targets_are_all_targets()
            self.an_outcome_never_changes()
        finally:
            self.do(self.stack.aclose())
            self.loop.close()
            self.folder.cleanup()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
