"""Sees one run through: lets its targets go as its policy decides, and takes the rest back if it must.

Follows what the ledger writes about the run's targets, so it makes no difference whether it has
driven the run from its start or took it up after a restart. Of several servers on one database one
drives a run; the others have an observer of it, which tells their readers the same events.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic

import msgspec
import structlog

from fleetplane.fleet.runs.channel import RunChannel
from fleetplane.fleet.runs.events import RunEnded, Started, TargetEnded, TargetStarted
from fleetplane.fleet.runs.feed import RunFeed
from fleetplane.fleet.runs.policy import ResultCounts, halts, may_start
from fleetplane.fleet.runs.records import Run, RunBook, RunState, S, Summary, in_turn
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import (
    COMMAND_TARGET,
    OPEN,
    Command,
    Commands,
    CommandState,
    CommandTarget,
    state_of,
)
from fleetplane.kernel.commands.rules import targets_scope
from fleetplane.kernel.store import Store

log = structlog.get_logger(__name__)

RETURN_SECONDS = 20.0
"""How long a run that a restart interrupted waits for agents to come back before it goes on."""
LOOK_SECONDS = 0.25
"""How often it looks who has."""
RELEASED_AT_ONCE = 256
"""Targets let go before what came back is looked at: the first results are told, and a failure can halt the
run, while thousands still wait for their turn."""
FAILURES = frozenset(
    {CommandState.FAILED, CommandState.TIMED_OUT, CommandState.UNDELIVERABLE, CommandState.EXPIRED}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverContext(Generic[S]):
    """What the drivers of one domain's runs share."""

    store: Store
    clock: Clock
    channel: RunChannel[S, Any, Any]
    book: RunBook[S]

    @property
    def ledger(self) -> Commands:
        return self.channel.ledger

    @property
    def actor(self) -> str:
        return f"system/{self.channel.domain}"


class RunProgress(Generic[S]):
    """Where the targets of one run are, told to its feed as they move."""

    def __init__(self, context: DriverContext[S], run: Run[S], command: Command, feed: RunFeed) -> None:
        self._context = context
        self._run = run
        self._command = command
        self._feed = feed
        self._states: dict[str, CommandState] = {}
        self._counts: Counter[CommandState] = Counter()
        self._held: dict[str, None] = {}
        """Those whose turn has not come, in order."""
        self._begun = False
        """Whether its feed was told where the targets are."""
        self._counting = False
        """Whether targets that end are counted: each once, also across servers and restarts."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {dict(self._counts)}>"

    @property
    def run(self) -> str:
        """The run's name in the store."""
        return self._run.name

    @property
    def name(self) -> str:
        return self._context.channel.shown_id(self._command.name)

    @property
    def _under_way(self) -> int:
        """Targets that were let go and have no outcome yet."""
        return sum(self._counts[state] for state in OPEN) - len(self._held)

    def _begin(self) -> None:
        """Tell where the targets are now; call it after the watch of them was opened."""
        spec = self._run.spec
        if not self._begun:
            self._begun = True
            self._feed.add(Started(targets=spec.targets, skipped=spec.skipped_count))
        for target in in_turn(self._context.ledger.targets(self._command)):
            self._note(target)

    def _note(self, target: CommandTarget) -> None:
        state, before = state_of(target), self._states.get(target.name)
        if state is before:
            return
        self._states[target.name] = state
        self._counts[state] += 1
        if before is not None:
            self._counts[before] -= 1
        if state is CommandState.HELD:
            self._held[target.name] = None
            return
        self._held.pop(target.name, None)
        if state not in OPEN:
            if self._context.store.shared and not self._feed.has_output(target.name):
                for stream, output in self._context.channel.printed(target):
                    self._feed.add_output(target.name, stream, output)
            self._feed.add(TargetEnded(target=target))
            if self._counting:
                self._context.channel.target_ended(self._run.spec, target)
        elif state is CommandState.SENT:
            self._feed.add(TargetStarted(name=target.name))

    def _tell_end(self, state: RunState, summary: Summary) -> None:
        self._feed.add(RunEnded(summary=summary, state=state))
        self._feed.end()


class RunObserver(RunProgress[S]):
    """A run that another server drives; changes nothing."""

    async def observe(self) -> None:
        """Until the run has ended."""
        context, command = self._context, self._command
        with context.store.watch(COMMAND_TARGET, targets_scope(command.scope, command.name)) as watch:
            self._begin()
            while self._held or self._under_way:
                for event in (await watch.next()).events:
                    self._note(event.resource)
        with context.store.watch(context.channel.kind, self._run.scope) as watch:
            while not (ended := self._ended()):
                await watch.next()
        self._tell_end(*ended)

    def _ended(self) -> tuple[RunState, Summary] | None:
        """How the run ended, from its record; None while its driver has not written that."""
        run = self._context.book.find(self._run.scope, self._run.name)
        if run is None:  # forgotten, which it is long after its end
            run = self._run
        elif run.status is None or run.status.ended_at_ns is None:
            return None
        summary = Summary.of(self._context.ledger.targets(self._command))
        if run.status is None:
            return RunState.COMPLETE, summary
        return run.status.state, run.status.summary or summary


class RunDriver(RunProgress[S]):
    """One run, from its start or its resumption to its end."""

    def __init__(
        self,
        context: DriverContext[S],
        run: Run[S],
        command: Command,
        feed: RunFeed,
        *,
        resumed: bool = False,
    ) -> None:
        super().__init__(context, run, command, feed)
        self._resumed = resumed
        self._halted = False
        self._counting = not resumed  # what ended before a restart was counted then

    @classmethod
    def after(cls, observer: RunObserver[S]) -> RunDriver[S]:
        """The driver of a run that was observed here until now: its readers are told nothing twice."""
        context, run = observer._context, observer._run
        run = context.book.find(run.scope, run.name) or run  # it may have been halted since
        driver = cls(context, run, observer._command, observer._feed, resumed=True)
        driver._begun = observer._begun
        driver._states, driver._counts = observer._states, observer._counts
        driver._held = observer._held
        return driver

    async def drive(self) -> RunState:
        """Until every target has its outcome; how the run ended."""
        context, command = self._context, self._command
        with context.store.watch(COMMAND_TARGET, targets_scope(command.scope, command.name)) as watch:
            self._begin()
            self._counting = True
            if self._resumed:
                await self._take_up()
            while not await self._step():
                for event in (await watch.next()).events:
                    self._note(event.resource)
        return await self._finish()

    async def _take_up(self) -> None:
        """Go on where an earlier server was interrupted.

        A run that was stopped is stopped again: its record may have been written, and its targets not.
        """
        decided = self._run.status.state if self._run.status is not None else RunState.RUNNING
        if decided is RunState.RUNNING:
            await self._gather()
            return
        await self._take_back(f"the run was {decided} before the server was restarted")

    async def _gather(self) -> None:
        """After a restart nobody is connected yet; a run must not fail for that."""
        clock = self._context.clock
        until = clock.monotonic() + RETURN_SECONDS
        while clock.monotonic() < until and not all(map(self._context.channel.is_present, self._held)):
            await clock.sleep(LOOK_SECONDS)

    async def _step(self) -> bool:
        """Do what is due; whether every target has its outcome."""
        progress = ResultCounts(
            held=len(self._held),
            under_way=self._under_way,
            failures=sum(self._counts[state] for state in FAILURES),
        )
        policy = self._run.spec.policy
        if progress.held + progress.under_way == 0:
            return True
        if halts(policy, progress):
            await self._halt(progress.failures)
        elif self._is_cancelled:
            await self._take_back("the run was cancelled")
        elif (number := may_start(policy, progress)) > 0:
            due = islice(self._held, min(number, RELEASED_AT_ONCE))
            await self._context.ledger.release(self._command, tuple(due))
        return False

    @property
    def _is_cancelled(self) -> bool:
        """Whether operators cancelled it. Its targets may not know: who asked may have left in between."""
        run = self._context.book.find(self._run.scope, self._run.name)
        return run is not None and run.status is not None and run.status.state is RunState.CANCELLED

    async def _halt(self, failures: int) -> None:
        if self._halted:
            return
        await self._context.book.conclude(self._run, RunState.HALTED, actor=self._context.actor)
        await self._take_back(f"the run was halted after {failures} failed")

    async def _take_back(self, reason: str) -> None:
        """Once: what goes on after that ends in its own way."""
        if self._halted:
            return
        await self._context.ledger.cancel(
            self._command.scope, self._command.name, actor=self._context.actor, reason=reason
        )
        self._halted = True

    async def _finish(self) -> RunState:
        context = self._context
        summary = Summary.of(context.ledger.targets(self._command))
        state = await context.book.conclude(
            self._run, RunState.COMPLETE, actor=context.actor, summary=summary
        )
        self._tell_end(state, summary)
        happened = f"{context.channel.domain}.run.ended"
        log.info(happened, run=self.name, state=state, **msgspec.structs.asdict(summary))
        return state
