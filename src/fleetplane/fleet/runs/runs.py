"""Runs: one action on many agents, in the order and with the care that the run's policy asks for.

A run is a command of the ledger whose targets are held, and a record beside it, written in one
transaction. A driver per run sees it through. What became of each target is the ledger's; a run
is over when every target has its outcome, also across a restart of the server. Does not know how
a command travels, nor what it does: that is the domain's `RunChannel`.

Of several servers on one database any begins and cancels a run, and tells how it goes; the one that
is active drives it. Live output is told where the agent has its session; results are told everywhere.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic

import msgspec
import structlog

from fleetplane.fleet.runs.channel import C, RunChannel, RunOrder, T
from fleetplane.fleet.runs.driver import DriverContext, RunDriver, RunObserver
from fleetplane.fleet.runs.events import RunEnded, RunEvent, TargetEnded
from fleetplane.fleet.runs.feed import RunFeed, RunFeeds
from fleetplane.fleet.runs.records import Run, RunBeside, RunBook, RunSpec, RunState, S, Summary, has_ended
from fleetplane.fleet.runs.targets import Resolution, Skipped, SkipReason, resolve
from fleetplane.kernel.access import who
from fleetplane.kernel.boundary import Boundary, contained
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, OPEN, Commands, CommandTarget, state_of
from fleetplane.kernel.commands.rules import targets_scope
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from fleetplane.kernel.store import Draft, Store

log = structlog.get_logger(__name__)

SKIPPED_LIMIT = 1000
"""Of those who were left out, written down with a run."""
MISSING_LIMIT = 1000
"""Names in a target that are nobody's: a record would keep megabytes of them."""
RUNS_LIMIT = 1000
"""Of one tenant that have not ended."""
TARGETS_LIMIT = 20_000
"""Of one tenant's runs that have not ended: two runs over as many as a command can have, and a fifth of the
100,000 targets that a channel has for everybody."""
LONGEST_SECONDS = 7 * 86_400.0
"""Of a run, from its start: what is still held then expires."""
SWEEP_SECONDS = 3600.0
STORED = "stored"
"""The epoch of events that are read from the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelledTargets:
    """What cancelling a run came to, in targets."""

    cancelled: int = 0
    told_to_stop: int = 0
    """Of agents that cannot stop what they are at: what they say later is their outcome."""


class Runs(Generic[S, T, C]):
    """The runs of one domain."""

    def __init__(self, store: Store, clock: Clock, channel: RunChannel[S, T, C]) -> None:
        self._store = store
        self._clock = clock
        self._channel = channel
        self._ledger = channel.ledger
        self._feeds = RunFeeds(clock)
        self._book = RunBook(store, channel.kind, domain=channel.domain)
        self._context = DriverContext(store=store, clock=clock, channel=channel, book=self._book)
        self._wanted: asyncio.Queue[RunDriver[S] | RunObserver[S]] = asyncio.Queue()
        self._driven: dict[str, Run[S]] = {}
        """Runs that have not ended, by name."""
        self._observed: dict[RunObserver[S], asyncio.Task[None]] = {}
        """Those of them that another server drives."""
        self.ended: Counter[RunState] = Counter()
        """Runs that came to their end here."""

    def __repr__(self) -> str:
        return f"<Runs {self._channel.domain} {self._feeds!r}>"

    @property
    def open_count(self) -> int:
        """Runs that have not ended."""
        return len(self._driven)

    @property
    def ledger(self) -> Commands:
        return self._ledger

    # Starting and stopping.

    def preview(self, scope: str, target: T, *, wait: bool = False) -> Resolution:
        """Who would take part in a run, and who is left out and why."""
        candidates, missing = self._channel.candidates(scope, target)
        return resolve(candidates, missing, is_present=self._channel.is_present, wait=wait)

    def _taking_part(self, order: RunOrder[T, C]) -> Resolution:
        found = self.preview(order.scope, order.target, wait=order.policy.wait or order.keeps_absent)
        unable = {name for name in found.resolved if not self._channel.is_able(order, name)}
        if not unable:
            return found
        return Resolution(
            resolved=tuple(name for name in found.resolved if name not in unable),
            skipped=(
                *found.skipped,
                *(Skipped(node_id=name, reason=SkipReason.UNSUPPORTED) for name in sorted(unable)),
            ),
        )

    async def start(self, order: RunOrder[T, C]) -> Run[S]:
        """Begin a run; it goes on by itself. Nothing begins unless enough targets can be reached."""
        policy = order.policy
        policy.check()
        issue = self._channel.issue(order)
        found = self._taking_part(order)
        if len(found.resolved) < policy.require_min:
            raise FailedPrecondition(
                f"{len(found.resolved)} targets can be reached, {policy.require_min} are required",
                details={"cause": "RequireMinNotSatisfied"},
            )
        if not found.resolved:
            raise Unavailable(
                self._channel.nobody,
                details={"cause": self._channel.nobody_cause},
                hint="`preview` shows which targets are selected, and why others are left out",
            )
        self._check_room(order.scope, found)
        common = RunSpec(
            policy=policy,
            actor=who(order.actor),
            targets=len(found.resolved),
            skipped_count=len(found.skipped),
            skipped=found.skipped[:SKIPPED_LIMIT],
            started_at_ns=self._clock.now_ns(),
        )
        beside = RunBeside(
            kind=self._channel.kind,
            scope=order.scope,
            spec=self._channel.spec(order, common),
            check=self._room_check(order.scope, len(found.resolved)),
        )
        command = await self._ledger.issue(
            order.scope,
            issue.verb,
            list(found.resolved),
            actor=order.actor,
            payload=issue.payload,
            wait=policy.wait,
            repeatable=issue.repeatable,
            hold=True,
            beside=beside,
            deliver_within_seconds=policy.deliver_within_seconds if policy.wait else LONGEST_SECONDS,
            run_for_seconds=issue.run_for_seconds,
        )
        self._channel.left_out(found.skipped)
        run = self.get(order.scope, command.name)
        happened, shown = f"{self._channel.domain}.run.started", self._channel.shown_id(command.name)
        log.info(happened, run=shown, tool=issue.verb, targets=len(found.resolved))
        self._drive_from_here(run)
        return run

    def _check_room(self, scope: str, found: Resolution) -> None:
        """Refuse a run that would leave others too little."""
        missing = sum(one.reason is SkipReason.NOT_FOUND for one in found.skipped)
        if missing > MISSING_LIMIT:
            raise InvalidArgument(
                f"names {missing} targets that do not exist; at most {MISSING_LIMIT} may be missing",
                field="target",
            )
        tenant = self._channel.tenant(scope)
        going = [run for run in self._driven.values() if self._channel.tenant(run.scope) == tenant]
        _check_within_limits(going, len(found.resolved))

    def _room_check(self, scope: str, more: int) -> Callable[[Draft], None]:
        """The same inside the transaction, where other servers begin runs, too."""
        kind, tenant = self._channel.kind, self._channel.tenant(scope)

        def check(draft: Draft) -> None:
            _check_within_limits([run for run in draft.list(kind, tenant) if not has_ended(run)], more)

        return check if self._store.shared else lambda _draft: None

    def _drive_from_here(self, run: Run[S], *, resumed: bool = False) -> None:
        """Give a run its driver, unless it has one; on a server that stands by, its observer."""
        if run.name in self._driven:
            return
        command = self._store.get(COMMAND, run.scope, run.name)
        assert command is not None, "a run's command is kept for as long as it goes on"
        self._driven[run.name] = run
        feed = self._feeds.open(run.name)
        if not self._store.leads:
            self._wanted.put_nowait(RunObserver(self._context, run, command, feed))
            return
        self._wanted.put_nowait(RunDriver(self._context, run, command, feed, resumed=resumed))

    async def cancel(self, scope: str, run_id: str, *, actor: str) -> CancelledTargets:
        """Cancel a run. Targets already sent are asked to stop; held targets are dropped."""
        run = self.get(scope, run_id)
        command = self._store.get(COMMAND, run.scope, run.name)
        if command is None or command.status is None or not command.status.open:
            return CancelledTargets()
        before = command.status.open
        await self._book.conclude(run, RunState.CANCELLED, actor=actor)
        await self._ledger.cancel(run.scope, run.name, actor=actor)
        left = [one for one in self.targets(run) if one.status is not None and one.status.told_to_stop]
        told = sum(state_of(one) in OPEN for one in left)
        return CancelledTargets(cancelled=before - told, told_to_stop=told)

    # Looking.

    def get(self, scope: str, run_id: str) -> Run[S]:
        """A run of this scope; raises `NotFound`."""
        return self._book.get(scope, run_id)

    def find(self, scope: str, run_id: str) -> Run[S] | None:
        """The run, or None."""
        return self._book.find(scope, run_id)

    def list(self, scope: str) -> list[Run[S]]:
        """The newest first."""
        return self._book.list(scope)

    def targets(self, run: Run[S]) -> Sequence[CommandTarget]:
        """What became of each; nothing is known of runs that ended long ago."""
        command = self._store.get(COMMAND, run.scope, run.name)
        return self._ledger.targets(command) if command is not None else ()

    def target(self, run: Run[S], name: str) -> CommandTarget | None:
        """What became of one of them."""
        return self._store.get(COMMAND_TARGET, targets_scope(run.scope, run.name), name)

    def summary(self, run: Run[S]) -> Summary:
        """What became of how many; of a run that is just being written, nobody had his turn."""
        if run.status is not None and run.status.summary is not None:
            return run.status.summary
        targets = self.targets(run)
        return Summary.of(targets) if targets else Summary(pending=run.spec.targets)

    def feed(self, run: Run[S]) -> RunFeed | None:
        """What is still known of how it went; None after a restart."""
        return self._feeds.get(run.name)

    async def follow(self, run: Run[S], *, mark: str = "") -> AsyncIterator[RunEvent | None]:
        """What happened and happens in a run after a reader's mark; None where something is missing.

        A mark from before a restart means nothing any more, and everything known is told again. Of a
        run that ended before the restart, the results are told from what is stored.
        """
        epoch, _, number = mark.rpartition("-")
        seen = int(number) if number.isdecimal() and len(number) <= 12 else 0
        feed = self.feed(run)
        if feed is not None:
            async for event in feed.after(seen if epoch == feed.epoch else 0):
                yield event
            return
        seen = seen if epoch == STORED else 0
        for place, event in enumerate(self._stored(run), 1):
            if place > seen:
                yield msgspec.structs.replace(event, number=place, epoch=STORED)

    def _stored(self, run: Run[S]) -> Iterator[RunEvent]:
        for target in self.targets(run):
            if state_of(target) not in OPEN:
                yield TargetEnded(target=target)
        if run.status is not None and has_ended(run):
            yield RunEnded(summary=self.summary(run), state=run.status.state)

    def progressed(self, name: str, command: str, stream: str, output: bytes) -> None:
        """Take some output of a target, or its report on how far it is."""
        self._feeds.add_output(command, name, stream, output)

    # Going on.

    async def prepare_here(self) -> None:
        """Take up the runs that have not ended; after the ledger has recovered."""
        for run in self._book.unfinished():
            self._adopt_one(run, resumed=True)

    async def take_over(self) -> None:
        """Drive what another server drove, and this one observed; after what it had sent is lost."""
        observed, self._observed = self._observed, {}
        for task in observed.values():
            task.cancel()
        await asyncio.gather(*observed.values(), return_exceptions=True)
        for observer in observed:
            if observer.run in self._driven:  # else it has come to its end
                self._wanted.put_nowait(observer)

    async def run_here(self) -> None:
        """Until cancelled: see runs through that are driven here, and tell of those that are not."""
        async with Boundary() as tasks:
            tasks.keep(f"{self._channel.domain}/runs/adopt", self._adopt)
            while True:
                wanted = await self._wanted.get()
                if isinstance(wanted, RunObserver) and self._store.leads:  # by now
                    wanted = RunDriver.after(wanted)
                work = f"{self._channel.domain}/run"
                task = tasks.keep(work, partial(self._see_through, wanted), about=wanted.name)
                if isinstance(wanted, RunObserver):
                    self._observed[wanted] = task

    async def run_active(self) -> None:
        """Forget the oldest, until cancelled."""
        await self._sweep()

    async def _see_through(self, wanted: RunDriver[S] | RunObserver[S]) -> None:
        if isinstance(wanted, RunDriver):
            self.ended[await wanted.drive()] += 1
        else:
            await wanted.observe()
            self._observed.pop(wanted, None)
        self._driven.pop(wanted.run, None)

    async def _adopt(self) -> None:
        """Take up runs that another server began, or that were written although whoever started them went
        away before hearing so."""
        kind = self._channel.kind
        async with self._store.watch(kind) as watch:
            for run in self._book.unfinished():  # begun elsewhere before we listened
                self._adopt_one(run)
            async for batch in watch:
                for event in batch.events:
                    found = self._store.get(kind, event.resource.scope, event.resource.name)
                    if found is not None and not has_ended(found):
                        self._adopt_one(found)

    def _adopt_one(self, run: Run[S], *, resumed: bool = False) -> None:
        """A record that cannot be driven holds up no other."""
        with contained(f"{self._channel.domain}/runs/adopt", about=run.name):
            self._drive_from_here(run, resumed=resumed)

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            await self._book.sweep(self._clock.now_ns())


def _check_within_limits(going: Sequence[Run[S]], more: int) -> None:
    """Refuse a run over so many targets beside those of the same tenant that have not ended. Pure."""
    targets = sum(run.spec.targets for run in going)
    if len(going) >= RUNS_LIMIT or targets + more > TARGETS_LIMIT:
        raise ResourceExhausted(
            f"{len(going)} runs over {targets} targets have not ended; at most {RUNS_LIMIT} runs over "
            f"{TARGETS_LIMIT} targets may go on at once",
            hint="wait for some to end, or cancel them",
        )
