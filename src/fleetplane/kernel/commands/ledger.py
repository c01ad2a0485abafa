"""The outcome ledger: every target of every command ends in exactly one outcome.

Writes down what `rules` decides, before anything is sent and before anyone is told, so that a
restart changes nothing but what was on its way. Hands commands to a courier, which knows the
sessions; takes the targets' words from whoever receives them; sees to the deadlines itself.
Does not know what a command does, how it travels, or who may issue one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import steps
from fleetplane.kernel.commands.kinds import (
    COMMAND,
    COMMAND_TARGET,
    Command,
    CommandSpec,
    CommandStatus,
    CommandTarget,
    TargetSpec,
    due_ns,
    is_open,
    state_of,
    targets_scope,
)
from fleetplane.kernel.commands.outputs import Outputs
from fleetplane.kernel.commands.rules import State, Step
from fleetplane.kernel.commands.steps import Move
from fleetplane.kernel.errors import InvalidArgument, NotFound, ResourceExhausted
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import ABSENT, Draft, Store

NS = 1_000_000_000
ID_BYTES = 16
BATCH = 256
"""Targets moved in one transaction, so that a large command never holds up other writers for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLimits:
    targets: int = 10_000
    """Of one command: about 300 bytes each, 3 MB in one transaction."""
    open: int = 100_000
    """Targets without an outcome in one channel; about 1 KB each in memory, 100 MB."""
    payload_bytes: int = 256 * 1024
    deliver_seconds: float = 30 * 86_400.0
    run_seconds: float = 86_400.0
    keep_seconds: float = 7 * 86_400.0
    """How long a finished command can be looked up."""
    retry_seconds: float = 5.0
    """After which a target that is there, but took nothing, is tried again."""


class Courier(Protocol):
    """Whoever holds the sessions of a channel's targets."""

    def is_present(self, target: str) -> bool: ...

    def deliver(self, target: str, command: Command) -> bool:
        """Put a command on the target's session; False if nothing took it."""


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
    ) -> None:
        self._store = store
        self._clock = clock
        self._channel = channel
        self._actor = f"commands/{channel}"
        self._courier = courier
        self._limits = limits or CommandLimits()
        self._open: dict[str, dict[Key, int]] = {}
        """By target: its open commands, and the revision each was issued at, which is their order."""
        self._places: dict[tuple[str, str], Key] = {}
        """From a command's id and a target to where that is written; open ones only."""
        self._due: list[tuple[int, Key]] = []
        self.outputs = Outputs()
        self.ignored = 0
        """Words of targets that came after the end, or were about nothing known."""

    def __repr__(self) -> str:
        return f"<Commands {self._channel} open={len(self._places)} targets={len(self._open)}>"

    @property
    def open_count(self) -> int:
        """Targets without an outcome."""
        return len(self._places)

    def recover(self) -> None:
        """Take up what an earlier run left open."""
        for target in self._store.list(COMMAND_TARGET):
            if target.spec.channel == self._channel:
                self._note(target)

    async def follow(self) -> None:
        """Learn of what was written although its writer went away before it heard so."""
        async with self._store.watch(COMMAND_TARGET) as watch:
            async for batch in watch:
                for event in batch.events:
                    key = event.resource.key
                    current = self._store.get(COMMAND_TARGET, key.scope, key.name)
                    if current is not None and current.spec.channel == self._channel:
                        self._note(current)

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
    ) -> Command:
        """Write a command down and send it. What the targets say to it is found out by watching.

        `deliver_within_seconds` bounds how long it waits for a target, `run_for_seconds` how long
        its word is waited for once it was sent.
        """
        self._check(targets, payload, deliver_within_seconds, run_for_seconds)
        command = self._clock.token_bytes(ID_BYTES).hex()
        below = targets_scope(scope, command)
        first = {name: self._first_state(name, wait=wait) for name in targets}
        spec = CommandSpec(
            channel=self._channel, verb=verb, payload=payload, actor=actor, targets=len(targets), wait=wait,
            repeatable=repeatable, run_for_ns=round(run_for_seconds * NS),
        )  # fmt: skip

        def change(draft: Draft) -> tuple[Command, list[CommandTarget]]:
            made = [
                draft.put(
                    COMMAND_TARGET, below, name,
                    spec=TargetSpec(
                        command=command, command_scope=scope, channel=self._channel, verb=verb, target=name,
                        deliver_by_ns=draft.now_ns + round(deliver_within_seconds * NS),
                    ),
                    status=steps.begun(state, spec, draft.now_ns),
                    expect=ABSENT,
                )
                for name, state in first.items()
            ]  # fmt: skip
            status = steps.counted(
                CommandStatus(open=len(made)), [state_of(one) for one in made], draft.now_ns
            )
            return draft.put(COMMAND, scope, command, spec=spec, status=status, expect=ABSENT), made

        touches = [COMMAND.key(scope, command), *(COMMAND_TARGET.key(below, name) for name in targets)]
        done = await self._store.transact(change, actor=actor, action=f"command.{verb}", touches=touches)
        issued, made = done.value
        for target in made:
            self._note(target)
        await self._deliver(target.key for target in made if state_of(target) is State.SENT)
        return issued

    def _check(
        self, targets: Sequence[str], payload: bytes, deliver_seconds: float, run_seconds: float
    ) -> None:
        limits = self._limits
        if not 1 <= len(targets) <= limits.targets or len(set(targets)) != len(targets):
            raise InvalidArgument(f"a command has 1 to {limits.targets} different targets", field="targets")
        if len(payload) > limits.payload_bytes:
            raise InvalidArgument(f"a command's content has at most {limits.payload_bytes} bytes")
        if not 0 < deliver_seconds <= limits.deliver_seconds:
            raise InvalidArgument(f"a command waits at most {limits.deliver_seconds:g} seconds")
        if not 0 < run_seconds <= limits.run_seconds:
            raise InvalidArgument(f"a command runs for at most {limits.run_seconds:g} seconds")
        if len(self._places) + len(targets) > limits.open:
            raise ResourceExhausted(f"{len(self._places)} commands are open, the most there may be")

    def _first_state(self, target: str, *, wait: bool) -> State:
        if self._courier.is_present(target):
            return State.SENT
        return State.WAITING if wait else State.UNDELIVERABLE

    # What happens to targets.

    async def arrived(self, target: str) -> None:
        """The target opened a session: send what waits, and again what may have been lost, in order."""
        await self._deliver(
            await self._move(
                [Move(key=key, steps=(Step.NEW_SESSION, Step.HAND_OVER)) for key in self._of(target)]
            )
        )

    async def started(self, target: str, command: str) -> bool:
        return await self._word(target, command, Step.STARTED, "")

    async def answered(
        self, target: str, command: str, *, ok: bool, detail: str = "", output: str = ""
    ) -> bool:
        """The target's own word; False if nobody waits for it any more."""
        if output and (command, target) in self._places:
            self.outputs.add(command, target, output)
        return await self._word(target, command, Step.SUCCEEDED if ok else Step.FAILED, detail)

    async def _word(self, target: str, command: str, step: Step, detail: str) -> bool:
        key = self._places.get((command, target))
        moved = await self._move([Move(key=key, steps=(step,), detail=detail)]) if key is not None else ()
        self.ignored += not moved
        return bool(moved)

    async def removed(self, target: str) -> None:
        """There is no such target any more."""
        await self._move(
            [
                Move(key=key, steps=(Step.REMOVED,), detail="the target was removed")
                for key in self._of(target)
            ]
        )

    async def cancel(self, scope: str, command: str, *, actor: str) -> Command:
        """Take a command back where it has no outcome yet. What was begun is not undone."""
        if self._store.get(COMMAND, scope, command) is None:
            raise NotFound(f"command {command} does not exist")
        targets = self._store.list(COMMAND_TARGET, targets_scope(scope, command))
        await self._move(
            [
                Move(key=one.key, steps=(Step.CANCEL,), detail=f"cancelled by {actor}")
                for one in targets
                if is_open(one)
            ],
            actor=actor,
        )
        return self._command(scope, command)

    def _of(self, target: str) -> list[Key]:
        """A target's open commands in the order of their issue."""
        found = self._open.get(target, {})
        return sorted(found, key=lambda key: (found[key], key))

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

    def next_due_ns(self) -> int | None:
        """The moment before which `expire` has nothing to do."""
        return self._due[0][0] if self._due else None

    async def expire(self) -> None:
        """Move on whatever has waited or run for too long."""
        now_ns = self._clock.now_ns()
        late: dict[Key, None] = {}
        while self._due and self._due[0][0] <= now_ns:
            late[heapq.heappop(self._due)[1]] = None
        overdue, retried = [], set()
        for key in late:
            target = self._store.get(COMMAND_TARGET, key.scope, key.name)
            due = due_ns(target) if target is not None else None
            if due is None:
                continue
            assert target is not None
            if due <= now_ns:
                overdue.append(key)
                continue
            heapq.heappush(self._due, (due, key))  # the deadline of an earlier state, or a retry
            if state_of(target) is State.WAITING and self._courier.is_present(target.spec.target):
                retried.add(target.spec.target)
        await self._move([Move(key=key, steps=(Step.TOO_LATE,), detail=steps.TOO_LATE) for key in overdue])
        for name in sorted(retried):
            await self.arrived(name)

    async def sweep(self) -> int:
        """Forget commands that finished long ago; how many."""
        before_ns = self._clock.now_ns() - round(self._limits.keep_seconds * NS)
        old = [
            command
            for command in self._store.list(COMMAND)
            if command.spec.channel == self._channel
            and command.status is not None
            and command.status.finished_at_ns is not None
            and command.status.finished_at_ns < before_ns
        ]
        for command in old:
            keys = [command.key, *(target.key for target in self.targets(command))]
            await self._store.transact(
                partial(steps.forget, keys=keys), actor=self._actor, action="command.sweep",
                touches=keys,
            )  # fmt: skip
        return len(old)

    # Writing.

    async def _deliver(self, keys: Iterable[Key]) -> None:
        """Send what is written down as sent; take back what no session took."""
        returned = []
        for key in keys:
            target = self._store.get(COMMAND_TARGET, key.scope, key.name)
            if target is None or state_of(target) is not State.SENT:
                continue  # cancelled or answered meanwhile
            command = self._store.get(COMMAND, target.spec.command_scope, target.spec.command)
            if command is None or self._courier.deliver(target.spec.target, command):
                continue
            back = (Step.TURN_BACK,) if command.spec.wait else (Step.TURN_BACK, Step.NOBODY)
            returned.append(Move(key=key, steps=back, detail="no session took it"))
        await self._move(returned)
        retry_ns = self._clock.now_ns() + round(self._limits.retry_seconds * NS)
        for move in returned:
            heapq.heappush(self._due, (retry_ns, move.key))

    async def _move(self, moves: Sequence[Move], *, actor: str = "") -> list[Key]:
        """Take steps; the keys of those targets for which they meant something."""
        moved: list[Key] = []
        for start in range(0, len(moves), BATCH):
            batch = moves[start : start + BATCH]
            touches = {move.key for move in batch}
            for key in tuple(touches):
                target = self._store.get(COMMAND_TARGET, key.scope, key.name)
                if target is not None:
                    touches.add(COMMAND.key(target.spec.command_scope, target.spec.command))
            done = await self._store.transact(
                partial(steps.take, moves=batch),
                actor=actor or self._actor, action="command.step", touches=touches,
            )  # fmt: skip
            for target in done.value:
                self._note(target)
            moved += [target.key for target in done.value]
        return moved

    def _note(self, target: CommandTarget) -> None:
        """Keep the index of what is open, which is only a shorter way to what the store says."""
        spec, key = target.spec, target.key
        due = due_ns(target)
        if due is None:
            self._places.pop((spec.command, spec.target), None)
            theirs = self._open.get(spec.target, {})
            theirs.pop(key, None)
            if not theirs:
                self._open.pop(spec.target, None)
            return
        self._places[spec.command, spec.target] = key
        self._open.setdefault(spec.target, {})[key] = target.created_revision
        heapq.heappush(self._due, (due, key))
        if len(self._due) > 4 * len(self._places) + BATCH:  # mostly deadlines that were met
            self._due = sorted(self._deadlines())

    def _deadlines(self) -> Iterable[tuple[int, Key]]:
        for key in self._places.values():
            target = self._store.get(COMMAND_TARGET, key.scope, key.name)
            due = due_ns(target) if target is not None else None
            if due is not None:
                yield due, key
