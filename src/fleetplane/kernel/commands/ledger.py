"""The outcome ledger: every target of every command ends in exactly one outcome.

Writes down what `rules` decides, before anything is sent and before anyone is told, so that a
restart changes nothing but what was on its way. Hands commands to a courier, which knows the
sessions; takes the targets' words from whoever receives them; sees to the deadlines itself.
Does not know what a command does, how it travels, or who may issue one.

Where several servers share a database, each has such a ledger: any of them issues, cancels and takes words,
the one that has a target's session sends (`delivery`), and the one that has the seat keeps the deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from fleetplane.kernel.access import who
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import rules
from fleetplane.kernel.commands.book import BATCH, TargetBook
from fleetplane.kernel.commands.courier import CommandLimits, Courier, IssuedBeside, IssueResult
from fleetplane.kernel.commands.delivery import Delivery, Outputs
from fleetplane.kernel.commands.rules import (
    COMMAND,
    COMMAND_TARGET,
    UNDER_WAY,
    WORDS,
    Command,
    CommandSpec,
    CommandState,
    CommandStep,
    CommandTarget,
    Move,
    due_ns,
    finished_before,
    is_open,
    state_of,
    targets_scope,
)
from fleetplane.kernel.commands.sessions import SessionPlaces, SessionRules
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store, follow
from fleetplane.kernel.unbroken import run_to_completion
from fleetplane.kernel.values.times import NS

ID_BYTES = 16


class Commands:
    """The commands of one channel. All that is written about them is written here."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        channel: str,
        courier: Courier,
        limits: CommandLimits | None = None,
        stops: Callable[[str], bool] = lambda _: True,
        whereabouts: SessionPlaces | None = None,
    ) -> None:
        """`stops` says whether a target stops a running command on request; `whereabouts`, on which server
        each has its session, where there are several."""
        self._store = store
        self._sessions = SessionRules(whereabouts)
        self._clock = store.clock if self._sessions.shared else clock
        """Deadlines are the database's, where several servers look at them."""
        self._channel = channel
        self._courier = courier
        self._stops = stops
        self._limits = limits or CommandLimits()
        self._book = TargetBook(store, channel=channel)
        self._index = self._book.index
        self._delivery = Delivery(self._book, courier, self._sessions, self._clock, self._limits)
        self.outputs = Outputs()
        self.ignored = 0
        """Messages of targets that came after the end, or about unknown commands."""

    def __repr__(self) -> str:
        return f"<Commands {self._channel} {self._index!r}>"

    @property
    def shared(self) -> bool:
        """Whether other servers have targets, too."""
        return self._sessions.shared

    @property
    def open_count(self) -> int:
        """Targets without an outcome."""
        return len(self._index)

    def recover(self) -> None:
        """Take up what an earlier run left open."""
        self._book.recover()

    async def run_here(self) -> None:
        """What every server does, until cancelled: learn of what was written, by whomever, although its
        writer may have gone away before it heard so; and send what waits for targets that are here."""
        if not self._sessions.shared:
            await self._follow()
            return
        async with Boundary() as tasks:
            for work in (self._delivery.follow, self._delivery.hand_over, self._delivery.retry):
                tasks.keep(f"commands/{self._channel}/{work.__name__}", work)

    async def _follow(self) -> None:
        async for batch in follow(self._store, COMMAND_TARGET):
            for event in batch.events:
                self._book.noted(event.resource.key)

    # Issuing.

    async def issue(
        self,
        scope: str,
        verb: str,
        targets: Sequence[str],
        *,
        actor: str,
        payload: bytes = b"",
        wait: bool = False,
        deliver_within_seconds: float = 60.0,
        run_for_seconds: float = 60.0,
        repeatable: bool = True,
        hold: bool = False,
        beside: IssuedBeside | None = None,
    ) -> Command:
        """Write a command down and send it. What the targets say to it is found out by watching.

        What is to be held is only written down, until `release` lets it go to some of its targets.
        `beside` writes something of the issuer's own in the same transaction.
        `deliver_within_seconds` bounds how long it waits for a target, `run_for_seconds` how long
        its word is waited for once it was sent.
        """
        self._limits.check(
            targets,
            payload,
            deliver_seconds=deliver_within_seconds,
            run_seconds=run_for_seconds,
            already_open=len(self._index),
        )
        command = self._clock.token_bytes(ID_BYTES).hex()
        below = targets_scope(scope, command)
        first = self._delivery.first_states(targets, wait=wait, hold=hold)
        spec = CommandSpec(
            channel=self._channel,
            verb=verb,
            payload=payload,
            actor=who(actor),
            targets=len(targets),
            wait=wait,
            repeatable=repeatable,
            run_for_ns=round(run_for_seconds * NS),
        )

        def change(draft: Draft) -> IssueResult:
            deliver_by_ns = draft.now_ns + round(deliver_within_seconds * NS)
            issued, made = rules.write_down(
                draft, scope, command, spec=spec, first=first(draft), deliver_by_ns=deliver_by_ns
            )
            return IssueResult(issued, made, None if beside is None else beside.write(draft, issued))

        touches = [COMMAND.key(scope, command), *(COMMAND_TARGET.key(below, name) for name in targets)]
        touches += beside.touches(command) if beside is not None else ()

        async def written_and_sent() -> Command:
            done = await self._store.transact(change, actor=actor, action=f"command.{verb}", touches=touches)
            issued, made, _ = done.value
            for target in made:
                self._book.noted(target.key)
            sent = (target.key for target in made if state_of(target) is CommandState.SENT)
            await self._delivery.deliver(sent)
            waiting = (target.key for target in made if state_of(target) is CommandState.WAITING)
            await self._delivery.look_again(waiting)
            return issued

        # Else what is written down as sent would be sent to nobody if the issuer left meanwhile.
        return await run_to_completion(written_and_sent())

    async def release(self, command: Command, targets: Sequence[str]) -> None:
        """Let a held command go to some of its targets."""
        below = targets_scope(command.scope, command.name)
        for start in range(0, len(targets), BATCH):
            moves = [
                self._delivery.released(COMMAND_TARGET.key(below, name), name, wait=command.spec.wait)
                for name in targets[start : start + BATCH]
            ]
            moved = await self._book.move(moves)
            await self._delivery.deliver(moved)
            await self._delivery.look_again(moved)

    # What happens to targets.

    async def arrived(self, target: str, *, session: int | None = None) -> None:
        """The target opened a session: send what waits, and again what may have been lost, in order."""
        await self.renewed(target, session=session)
        await self.room(target)

    async def renewed(self, target: str, *, session: int | None = None) -> None:
        """What an older session was to deliver may not have arrived, and waits for the next one.

        To be called before that one is open, where it could be given something meanwhile: what it has
        would be taken for what the older one lost. Among several servers, `session` is the one that
        begins; without it, that which presence names.
        """
        renewing = partial(Move, steps=(CommandStep.NEW_SESSION,), only_if=self._sessions.renewing(session))
        await self._book.move([renewing(key=key) for key in self._index.of(target)])

    async def room(self, target: str) -> None:
        """The target can take something: send what waits, in order, for as long as it can."""
        await self._delivery.room(target)

    async def lost(
        self,
        target: str,
        *,
        session: int | None = None,
        detail: str = "the session ended",
        recognises: bool = True,
    ) -> None:
        """The target's session ended: nobody will answer for what cannot be sent again.

        That is everything it may have, if it does not recognise what it has seen. Among several servers,
        `session` is the one that ended, and only what was sent in it is lost; without it, what was sent in
        sessions that presence does not name.
        """
        await self._lose(self._index.of(target), detail, session=session, recognises=recognises)

    async def all_lost(self, *, detail: str = "the server was restarted") -> None:
        """No target has a session, as after a restart; among several servers, those whose presence is not
        there any more."""
        await self._lose(self._index.everything(), detail)

    async def _lose(
        self, keys: Iterable[Key], detail: str, *, session: int | None = None, recognises: bool = True
    ) -> None:
        moves = []
        for key in keys:
            target = self._book.find(key)
            command = self._book.command_of(target) if target is not None else None
            if target is None or command is None or target.status is None:
                continue
            if session is None and not self._sessions.may_be_lost(self._store, target.spec, target.status):
                continue
            lost = CommandStep.LOST if recognises or state_of(target) not in UNDER_WAY else CommandStep.FAILED
            leaving = (lost,) if command.spec.wait else (lost, CommandStep.NOBODY)
            only_if = self._sessions.losing(session)
            moves.append(Move(key=key, steps=leaving, detail=detail, only_if=only_if))
        await self._book.move(moves)

    async def started(self, target: str, command: str) -> bool:
        return await self._word(target, command, CommandStep.STARTED, "")

    async def answered(
        self, target: str, command: str, *, ok: bool, detail: str = "", output: str = ""
    ) -> bool:
        """The target's own word; False if nobody waits for it any more."""
        if output and self._index.place(command, target) is not None:
            self.outputs.add(command, target, output)
        return await self._word(target, command, CommandStep.SUCCEEDED if ok else CommandStep.FAILED, detail)

    async def ended(
        self, target: str, command: str, outcome: CommandState, *, detail: str = "", result: bytes = b""
    ) -> bool:
        """The target's own word on how it ended, with what it has to show for it."""
        if len(result) > self._limits.result_bytes:
            raise InvalidArgument(f"a result has at most {self._limits.result_bytes} bytes", field="result")
        return await self._word(target, command, _STEPS[outcome], detail, result)

    async def _word(
        self, target: str, command: str, step: CommandStep, detail: str, result: bytes = b""
    ) -> bool:
        key = self._index.place(command, target)
        if key is None and self._sessions.shared:  # it may have been sent by a server that we are behind
            await self._store.confirmed()
            key = self._index.place(command, target)
        moved: Sequence[Key] = ()
        if key is not None:
            session = self._sessions.here(target) or 0
            move = Move(key=key, steps=(step,), detail=detail, result=result, session=session)
            moved = await self._book.move([move])
        self.ignored += not moved
        return bool(moved)

    async def removed(self, target: str) -> None:
        """There is no such target any more."""
        gone = partial(Move, steps=(CommandStep.REMOVED,), detail="the target was removed")
        await self._book.move([gone(key=key) for key in self._index.of(target)])

    async def cancel(
        self,
        scope: str,
        command: str,
        *,
        actor: str,
        targets: Collection[str] | None = None,
        reason: str = "",
    ) -> Command:
        """Take a command back where it has no outcome yet, and tell those targets that have it.

        What was begun is not undone by that. A target that cannot stop is told to, and keeps the command
        until it says how that ended.
        """
        self._command(scope, command)
        reason = reason or f"cancelled by {who(actor)}"
        doomed = [
            one.key
            for one in self._store.list(COMMAND_TARGET, targets_scope(scope, command))
            if is_open(one) and (targets is None or one.name in targets)
        ]
        # Whoever has it is told, also if the one who cancels leaves meanwhile.
        await run_to_completion(self._end(doomed, CommandStep.CANCEL, reason, actor=actor))
        return self._command(scope, command)

    async def _end(self, keys: Iterable[Key], step: CommandStep, detail: str, *, actor: str = "") -> None:
        """End targets against their will, and tell those that may be at it.

        A target may get the command while this is written, so what it was before does not say that it has
        nothing to be told.
        """
        before = {key: found for key in keys if (found := self._book.find(key)) is not None}
        moves = [
            Move(key=key, steps=(step,), detail=detail, stops=self._stops(target.name))
            for key, target in before.items()
        ]
        for key in await self._book.move(moves, actor=actor):
            target, now = before[key], self._book.find(key)
            handed_over = now is not None and now.status is not None and now.status.deliveries > 0
            if handed_over or state_of(target) in UNDER_WAY:
                self._courier.recall(target.spec.target, target.spec.command, detail)

    # Looking.

    async def finished(self, command: Command) -> Command:
        """The command once every target has its outcome."""
        with self._store.watch(COMMAND, command.scope) as watch:
            while True:
                current = self._command(command.scope, command.name)
                assert current.status is not None
                if current.status.open == 0:
                    return current
                await watch.next()

    def targets(self, command: Command) -> Sequence[CommandTarget]:
        return self._store.list(COMMAND_TARGET, targets_scope(command.scope, command.name))

    def _command(self, scope: str, name: str) -> Command:
        found = self._store.get(COMMAND, scope, name)
        if found is None:
            raise NotFound(f"command {name} does not exist")
        return found

    # Deadlines.

    def due_in_seconds(self) -> float | None:
        """How long `expire` has nothing to do; None if there is no deadline."""
        due_ns = self._index.next_due_ns()
        return None if due_ns is None else (due_ns - self._clock.now_ns()) / NS

    async def expire(self) -> None:
        """Move on whatever has waited or run for too long."""
        now_ns = self._clock.now_ns()
        overdue, retried = [], set()
        for key in self._index.late(now_ns):
            target = self._book.find(key)
            due = due_ns(target) if target is not None else None
            if due is None:
                continue
            assert target is not None
            if due <= now_ns:
                overdue.append(key)
                continue
            self._index.look_again(due, key)  # it was the deadline of an earlier state, or a retry
            if state_of(target) is CommandState.WAITING and self._courier.is_present(target.spec.target):
                retried.add(target.spec.target)
        try:
            await self._end(overdue, CommandStep.TOO_LATE, rules.TOO_LATE)
        finally:
            self._not_ended(overdue, now_ns)
        for name in sorted(retried):
            await self.room(name)

    def _not_ended(self, keys: Iterable[Key], now_ns: int) -> None:
        """Look again at what is open all the same: it could not be written, or another deadline counts."""
        for key in keys:
            target = self._book.find(key)
            if target is not None and (due := due_ns(target)) is not None:
                self._index.look_again(max(due, now_ns + NS), key)

    async def sweep(self) -> int:
        """Forget commands that finished long ago; how many."""
        before_ns = self._clock.now_ns() - round(self._limits.keep_seconds * NS)
        old = [
            command
            for command in self._store.list(COMMAND)
            if command.spec.channel == self._channel and finished_before(command, before_ns)
        ]
        for command in old:
            keys = [command.key, *(target.key for target in self.targets(command))]
            await self._store.transact(
                partial(rules.forget, keys=keys),
                actor=self._book.actor,
                action="command.sweep",
                touches=keys,
            )
        return len(old)


_STEPS = {outcome: step for step, outcome in WORDS.items()}
