"""Sees one run through: lets its targets go as its policy decides, and takes the rest back if it must.

Follows what the ledger writes about the run's targets, so it makes no difference whether it has
driven the run from its start or took it up after a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import msgspec
import structlog

from fleetplane.domains.edge.calls import decode_outcome, public_id
from fleetplane.domains.edge.policy import Progress, halts, may_start
from fleetplane.domains.edge.run_feed import RunFeed
from fleetplane.domains.edge.runs import Run, RunBook, RunState, Summary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import COMMAND_TARGET, OPEN, Command, Commands, CommandTarget, State, state_of
from fleetplane.kernel.commands.kinds import targets_scope
from fleetplane.kernel.store import Store

log = structlog.get_logger(__name__)

RETURN_SECONDS = 20.0
"""How long a run that a restart interrupted waits for daemons to come back before it goes on."""
LOOK_SECONDS = 0.25
"""How often it looks who has."""
RELEASED_AT_ONCE = 256
"""Targets let go before what came back is looked at: the first results are told, and a failure can halt the
run, while thousands still wait for their turn."""
FAILURES = frozenset({State.FAILED, State.TIMED_OUT, State.UNDELIVERABLE, State.EXPIRED})
ACTOR = "system/edge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What every driver stands on."""

    store: Store
    clock: Clock
    ledger: Commands
    book: RunBook
    is_connected: Callable[[str], bool]


class Driver:
    def __init__(
        self, ground: Ground, run: Run, command: Command, feed: RunFeed, *, resumed: bool = False
    ) -> None:
        self._ground = ground
        self._run = run
        self._command = command
        self._feed = feed
        self._resumed = resumed
        self._states: dict[str, State] = {}
        self._counts: Counter[State] = Counter()
        self._held: dict[str, None] = {}
        """Those whose turn has not come, in order."""
        self._halted = False

    def __repr__(self) -> str:
        return f"<Driver {self.name} {dict(self._counts)}>"

    @property
    def name(self) -> str:
        return public_id(self._command)

    async def drive(self) -> RunState:
        """Until every target has its outcome; how the run ended."""
        ground, command = self._ground, self._command
        with ground.store.watch(COMMAND_TARGET, targets_scope(command.scope, command.name)) as watch:
            spec = self._run.spec
            self._feed.add(
                "started", targets_resolved=spec.targets, targets_skipped=spec.skipped_count, tool=spec.tool
            )
            for target in ground.ledger.targets(command):
                self._note(target)
            if self._resumed:
                await self._gather()
            while not await self._step():
                for event in (await watch.next()).events:
                    self._note(event.resource)
        return await self._finish()

    async def _gather(self) -> None:
        """After a restart nobody is connected yet; a run must not fail for that."""
        clock = self._ground.clock
        until = clock.monotonic() + RETURN_SECONDS
        while clock.monotonic() < until and not all(map(self._ground.is_connected, self._held)):
            await clock.sleep(LOOK_SECONDS)

    def _note(self, target: CommandTarget) -> None:
        state, before = state_of(target), self._states.get(target.name)
        if state is before:
            return
        self._states[target.name] = state
        self._counts[state] += 1
        if before is not None:
            self._counts[before] -= 1
        if state is State.HELD:
            self._held[target.name] = None
            return
        self._held.pop(target.name, None)
        if state not in OPEN:
            assert target.status is not None
            self._feed.add("result", target.name, target=target, outcome=decode_outcome(target.status.result))
        elif state is State.SENT:
            self._feed.add("node_started", target.name)

    async def _step(self) -> bool:
        """Do what is due; whether every target has its outcome."""
        held = len(self._held)
        progress = Progress(
            held=held,
            under_way=sum(self._counts[state] for state in OPEN) - held,
            failures=sum(self._counts[state] for state in FAILURES),
        )
        policy = self._run.spec.policy
        if progress.held + progress.under_way == 0:
            return True
        if halts(policy, progress):
            await self._halt(progress.failures)
        elif (number := may_start(policy, progress)) > 0:
            due = islice(self._held, min(number, RELEASED_AT_ONCE))
            await self._ground.ledger.release(self._command, tuple(due))
        return False

    async def _halt(self, failures: int) -> None:
        if self._halted:
            return
        self._halted = True
        await self._ground.book.conclude(self._run, RunState.HALTED, actor=ACTOR)
        await self._ground.ledger.cancel(
            self._command.scope, self._command.name, actor=ACTOR,
            reason=f"the run was halted after {failures} failed",
        )  # fmt: skip

    async def _finish(self) -> RunState:
        summary = Summary.of(self._ground.ledger.targets(self._command))
        state = await self._ground.book.conclude(self._run, RunState.COMPLETE, actor=ACTOR, summary=summary)
        self._feed.add("done", summary=summary, state=state)
        self._feed.end()
        log.info("edge.run.ended", run=self.name, state=state, **msgspec.structs.asdict(summary))
        return state
