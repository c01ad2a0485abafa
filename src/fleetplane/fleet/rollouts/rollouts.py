"""Rollouts: started, shown and ordered about on any server; and started by policies where there are any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from fleetplane.fleet import selectors
from fleetplane.fleet.freeze import Freezes
from fleetplane.fleet.rollouts.book import TRIES, RolloutBook, check_is_last, no_check
from fleetplane.fleet.rollouts.driver import LOOK_SECONDS, RolloutDriver, key_of
from fleetplane.fleet.rollouts.gates import GateQuestion, GateSources, Planned, planned_waves, rehearsed
from fleetplane.fleet.rollouts.records import (
    ROLLOUT,
    ROLLOUT_POLICY,
    ROLLOUT_TARGET,
    HasObjects,
    Period,
    PolicySpec,
    Replaces,
    Rollout,
    RolloutPolicy,
    RolloutSpec,
    RolloutTarget,
    VersionedSubject,
    policy_for,
    records_of,
    status_of,
    targets_scope,
)
from fleetplane.fleet.rollouts.rules import orders
from fleetplane.fleet.rollouts.rules.orders import OrderedChange, RolloutOrder
from fleetplane.fleet.rollouts.rules.passes import ACTOR
from fleetplane.fleet.rollouts.rules.policy import LABEL, Policy
from fleetplane.fleet.rollouts.rules.states import ENDED, TEXT_LIMIT, RolloutStanding, TargetRecord
from fleetplane.kernel.access import covers, who
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    Conflict,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from fleetplane.kernel.reconcile import Explanation, PassResult, Reason, Reconciler
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Draft, Store, follow
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.kernel.watch import Watch

log = structlog.get_logger(__name__)

OPEN_LIMIT = 1000
"""Rollouts of one server that have not ended."""
TARGETS_LIMIT = 20_000
"""Of one rollout; a pass over so many takes a fraction of a second, see docs/rollouts.md."""
SWEEP_SECONDS = 3600.0
NONE = ("0", "0%")
VERBS = ("pause", "resume", "retry", "skip", "abort", "undo", "approve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What somebody wants to have rolled out."""

    subject: str
    scope: str
    to: str
    policy: Policy | None
    """That of the scope if None, and the default if it has none."""
    actor: str
    reason: str = ""
    supersede: bool = False
    automatic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutVerb:
    """An order of a person to a rollout."""

    verb: str
    actor: str
    reason: str = ""
    targets: Collection[str] = ()
    wave: int = 0


class Rollouts:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        subjects: Iterable[VersionedSubject],
        freezes: Freezes,
        sources: GateSources | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._freezes = freezes
        self.book = RolloutBook(store)
        self.driver = RolloutDriver(store, clock, self.book, subjects, freezes, sources)
        self.subjects = self.driver.subjects
        self._starter = Reconciler("rollouts/policies", self.follow_policy, clock=clock, store=store)
        self._starting: dict[str, asyncio.Lock] = {}

    def __repr__(self) -> str:
        return f"<Rollouts {self.book!r}>"

    @property
    def reconcilers(self) -> Sequence[Reconciler]:
        """Its controllers, for metrics."""
        return self.driver.reconciler, self._starter

    def subject(self, name: str) -> VersionedSubject:
        """A subject by its name."""
        found = self.subjects.get(name)
        if found is None:
            known = ", ".join(sorted(self.subjects)) or "none"
            raise InvalidArgument(
                f"{name[:64]!r} cannot be rolled out here", field="subject", hint=f"there are: {known}"
            )
        return found

    # Starting.

    async def plan(self, wanted: Start) -> Planned:
        """Who would be in which wave, and how gates would stand now; nothing is started."""
        subject, scope, to, policy = self._read(wanted)
        facts = subject.targets(scope)
        moving = {name: fact for name, fact in facts.items() if fact.version != to}
        blockers = []
        if (frozen := self._freezes.holding(subject.domain, scope)) is not None:
            blockers.append(f"frozen by {frozen.spec.actor}: {frozen.spec.reason}")
        if (running := self._running(subject.name, scope)) is not None:
            blockers.append(f"rollout {running.name} is {status_of(running).phase}")
        targets = tuple(moving) or tuple(facts)
        asked = GateQuestion(
            rollout="",
            subject=subject,
            scope=scope,
            to=to,
            wave=0,
            gate="",
            query="",
            targets=targets,
            period=Period(from_ns=0, to_ns=self._clock.now_ns()),
        )
        gates = [await rehearsed(self.driver.sources, gate, asked) for gate in policy.gates]
        return Planned(
            to=to,
            policy=policy,
            waves=planned_waves(policy, moving),
            already=len(facts) - len(moving),
            blockers=blockers,
            gates=gates,
        )

    async def start(self, wanted: Start) -> Rollout:
        """Begin a rollout; it goes on by itself."""
        subject, scope, to, policy = self._read(wanted)
        lock = self._starting.setdefault(f"{subject.name}|{scope}", asyncio.Lock())
        async with lock:
            # One may be on its way to the disk although whoever began it has left, and the lock with them.
            await self._store.settled(ROLLOUT)
            rollout = await self._started(wanted, subject, scope, to, policy)
        self.driver.look_at(rollout)
        return rollout

    async def _started(
        self, wanted: Start, subject: VersionedSubject, scope: str, to: str, policy: Policy
    ) -> Rollout:
        for _ in range(TRIES if self._store.shared else 0):
            try:
                return await self._start(wanted, subject, scope, to, policy)
            except Conflict:  # another server was faster: decided again on what it has written
                continue
        return await self._start(wanted, subject, scope, to, policy)

    def _read(self, wanted: Start) -> tuple[VersionedSubject, str, str, Policy]:
        subject = self.subject(wanted.subject)
        scope = subject.scope(wanted.scope)
        to = subject.version(scope, wanted.to)
        policy = wanted.policy
        if policy is None:
            found = policy_for(self._store, subject.name, scope)
            policy = found.spec.policy if found is not None else Policy()
        check_policy(policy, subject, self.driver.sources, scope=scope)
        return subject, scope, to, policy

    async def _start(
        self, wanted: Start, subject: VersionedSubject, scope: str, to: str, policy: Policy
    ) -> Rollout:
        facts = subject.targets(scope)
        targets = {
            name: (fact.title or name, TargetRecord(before=fact.version))
            for name, fact in facts.items()
            if fact.version != to
        }
        running = self._running(subject.name, scope)
        if running is not None and not wanted.supersede:
            raise FailedPrecondition(
                f"rollout {running.name} to version {running.spec.to} is {status_of(running).phase}",
                hint="wait for its end, abort or undo it, or supersede it explicitly",
                details={"rollout": running.name},
            )
        if not targets and running is None:
            raise FailedPrecondition(
                f"nothing is to be moved: all {len(facts)} targets have version {to}",
                hint="set a rollout policy first if versions should wait for a rollout",
            )
        if len(targets) > TARGETS_LIMIT:
            raise ResourceExhausted(f"{len(targets)} targets, more than {TARGETS_LIMIT}")
        if sum(1 for _ in self.book.unfinished()) >= OPEN_LIMIT:
            raise ResourceExhausted(f"{OPEN_LIMIT} rollouts have not ended, the most there may be")
        ending = None
        if running is not None:
            by = RolloutOrder(
                actor=who(wanted.actor), now_ns=self._clock.now_ns(), reason=f"superseded by version {to}"
            )
            ending = running, orders.supersede(status_of(running), records_of(self._store, running), by)
        spec = RolloutSpec(
            subject=subject.name,
            to=to,
            policy=policy,
            actor=wanted.actor,
            started_at_ns=self._clock.now_ns(),
            reason=wanted.reason[:TEXT_LIMIT],
            supersedes=running.name if running is not None else "",
            automatic=wanted.automatic,
            total=len(targets),
            default_before=subject.default(scope),
        )
        rollout = await self.book.begin(scope, new_uuid(self._clock), spec, targets, ending=ending)
        log.info(
            "rollouts.started",
            rollout=rollout.name,
            subject=subject.name,
            scope=scope,
            to=to,
            targets=len(targets),
        )
        return rollout

    def _running(self, subject: str, scope: str) -> Rollout | None:
        """The rollout of this very scope that has not ended."""
        for one in self.book.list(scope, subject):
            if one.scope == scope and status_of(one).phase not in ENDED:
                return one
        return None

    # Orders.

    async def order(self, rollout: Rollout, verb: RolloutVerb) -> Rollout:
        """Carry out an order of a person."""
        by = RolloutOrder(actor=who(verb.actor), now_ns=self._clock.now_ns(), reason=verb.reason[:TEXT_LIMIT])
        names = self._names(rollout, verb.targets)
        policy = rollout.spec.policy
        carry_out: Mapping[str, Callable[[RolloutStanding, Mapping[str, TargetRecord]], OrderedChange]] = {
            "pause": lambda status, _: orders.pause(status, by),
            "resume": lambda status, targets: orders.resume(status, targets, by),
            "retry": lambda status, targets: orders.retry(status, targets, names, by),
            "skip": lambda status, targets: orders.skip(status, targets, names, by),
            "abort": lambda status, _: orders.abort(status, by),
            "undo": lambda status, _: orders.undo(status, by),
            "approve": lambda status, _: orders.approve(policy, status, verb.wave or status.wave + 1, by),
        }
        if verb.verb not in carry_out:
            raise InvalidArgument(
                f"{verb.verb[:40]!r} is not an order", field="verb", hint=f"write one of {', '.join(VERBS)}"
            )
        check = partial(check_is_last, rollout) if verb.verb == "undo" else no_check
        check(self._store)
        done = await self.book.order(
            rollout,
            carry_out[verb.verb],
            actor=verb.actor,
            action=f"rollout.{verb.verb}",
            check=check,
        )
        log.info("rollouts.ordered", rollout=rollout.name, verb=verb.verb, actor=by.actor)
        self.driver.look_at(done)
        return done

    def _names(self, rollout: Rollout, given: Collection[str]) -> list[str]:
        """Targets by their ids, from ids or from names for people."""
        found = self.targets(rollout)
        ids = {one.name for one in found}
        titles: dict[str, list[str]] = {}
        for one in found:
            titles.setdefault(one.spec.title, []).append(one.name)
        named = []
        for text in given:
            if text in ids:
                named.append(text)
            elif len(titles.get(text, ())) == 1:
                named += titles[text]
            else:
                raise NotFound(f"the rollout has no target {text[:100]!r}")
        return named

    # Reading.

    def targets(self, rollout: Rollout) -> Sequence[RolloutTarget]:
        """What became of each target."""
        return self._store.list(ROLLOUT_TARGET, targets_scope(rollout.scope, rollout.name))

    def explain(self, rollout: Rollout) -> Explanation | None:
        """What the last pass over a rollout found."""
        return self.driver.reconciler.explain(key_of(rollout))

    # Policies.

    def policies(self, within: str = "") -> Sequence[RolloutPolicy]:
        """Policies at or below a scope."""
        return self._store.list(ROLLOUT_POLICY, within)

    def check_policy(self, subject: str, policy: Policy, *, scope: str) -> None:
        """Refuse a policy that could not be followed at a scope and below it."""
        check_policy(policy, self.subject(subject), self.driver.sources, scope=scope)

    def policy_scope(self, subject: str, text: str) -> str:
        """The scope at which a policy would lie: one that has versions at or below it, or that is meant."""
        known = self.subject(subject)
        return text if not text or known.scopes(text) else known.scope(text)

    async def set_policy(self, subject: str, scope: str, spec: PolicySpec, *, actor: str) -> RolloutPolicy:
        """Make every new version at and below a scope a rollout."""
        scope = self.policy_scope(subject, scope)
        self.check_policy(subject, spec.policy, scope=scope)
        done = await self._store.transact(
            lambda draft: draft.put(ROLLOUT_POLICY, scope, subject, spec=spec),
            actor=actor,
            action="rollout.policy.set",
            touches=[ROLLOUT_POLICY.key(scope, subject)],
        )
        return done.value

    async def remove_policy(self, subject: str, scope: str, *, actor: str) -> None:
        """Let new versions go to everyone at once again; those that wait go out with the next."""

        def change(draft: Draft) -> None:
            if draft.get(ROLLOUT_POLICY, scope, subject) is None:
                raise NotFound(f"there is no rollout policy of {subject[:64]} at this very scope")
            draft.delete(ROLLOUT_POLICY, scope, subject)

        touches = [ROLLOUT_POLICY.key(scope, subject)]
        await self._store.transact(change, actor=actor, action="rollout.policy.remove", touches=touches)

    async def follow_policy(self, key: str) -> PassResult:
        """Start the rollout of a scope's newest version if its policy wants that and none was started yet."""
        name, _, scope = key.partition("|")
        subject = self.subjects[name]
        policy = policy_for(self._store, name, scope)
        newest = subject.waiting(scope) if scope in subject.scopes(scope) else ""
        if policy is not None and not newest:
            await self._drop_once(policy, subject)  # if what it was written with made no version to wait
        if policy is None or not policy.spec.automatic or not newest:
            return PassResult()
        last = next((one for one in self.book.list(scope, name) if one.scope == scope), None)
        if last is not None and last.spec.to == newest:
            return PassResult()
        if all(fact.version == newest for fact in subject.targets(scope).values()):
            return PassResult()
        running = self._running(name, scope)
        if running is not None and not policy.spec.supersedes:
            message = f"version {newest} waits for the end of rollout {running.name}"
            return PassResult(explanation=(Reason(code="RUNNING", message=message),))
        wanted = Start(
            subject=name,
            scope=scope,
            to=newest,
            policy=policy.spec.policy,
            actor=ACTOR,
            reason="a new version, by the scope's policy",
            supersede=policy.spec.supersedes,
            automatic=True,
        )
        await self.start(wanted)
        await self._drop_once(policy, subject)
        return PassResult()

    async def _drop_once(self, policy: RolloutPolicy, subject: VersionedSubject) -> None:
        """Remove a policy that was for one change, once nothing waits for it to start a rollout.

        A rollout that is under way holds its scope by itself.
        """
        if not policy.spec.once:
            return
        for at in subject.scopes(policy.scope):
            newest, running = subject.waiting(at), self._running(subject.name, at)
            nearest = policy_for(self._store, subject.name, at)
            if nearest is None or nearest.scope != policy.scope or not newest:
                continue
            if running is None or running.spec.to != newest:
                return

        def change(draft: Draft) -> None:
            current = draft.get(ROLLOUT_POLICY, policy.scope, policy.name)
            if current is not None and current.revision == policy.revision:
                draft.delete(ROLLOUT_POLICY, policy.scope, policy.name)

        await self._store.transact(change, actor=ACTOR, action="rollout.policy.remove", touches=[policy.key])

    def holders(self, objects: Iterable[tuple[str, str, str]]) -> list[tuple[str, str]]:
        """Subjects and scopes of which objects of the resource API, by kind, scope and name, are part."""
        able = [(name, one) for name, one in sorted(self.subjects.items()) if isinstance(one, HasObjects)]
        found = (
            (name, subject.holder(kind, scope, title))
            for kind, scope, title in objects
            for name, subject in able
        )
        return sorted({(name, scope) for name, scope in found if scope is not None})

    # Living.

    def take_over(self) -> None:
        """Take up what an earlier server left behind."""
        self.driver.take_up()
        self._look_at_policies("")

    async def run(self) -> None:
        """Until cancelled."""
        kinds: dict[str, AnyKind] = {ROLLOUT_POLICY.name: ROLLOUT_POLICY}
        for subject in self.subjects.values():
            kinds |= {kind.name: kind for kind in subject.versions}
        async with Boundary() as tasks:
            tasks.keep("rollouts/driver", self.driver.run)
            tasks.keep("rollouts/policies", self._starter.run)
            tasks.keep("rollouts/sweep", self._sweep)
            tasks.keep("rollouts/rollouts", self._follow_rollouts)
            for kind in kinds.values():
                tasks.keep(f"rollouts/{kind.name}", partial(self._follow_versions, kind))

    async def _follow_versions(self, kind: AnyKind) -> None:
        # At the beginning at all: others may have written since `take_over`.
        async for batch in follow(self._store, kind, begin=lambda _watch: self._look_at_policies("")):
            for scope in {event.resource.scope for event in batch.events}:
                self._look_at_policies(scope)

    async def _follow_rollouts(self) -> None:
        """Look at what policies wait for, and at what was begun or ordered by somebody who left meanwhile."""

        def begin(_watch: Watch) -> None:
            for rollout in self.book.unfinished():
                self.driver.look_at(rollout)

        async for batch in follow(self._store, ROLLOUT, begin=begin):
            for event in batch.events:
                status = status_of(event.resource)
                if status.phase in ENDED:
                    self._look_at_policies(event.resource.scope)
                if status.phase not in ENDED or status.settled != status.phase:
                    # Soon enough, and no more often than one that goes on is looked at anyway; at once
                    # what other servers have begun or ordered.
                    elsewhere = self._store.shared and not self.driver.wrote(event.resource)
                    self.driver.look_at(event.resource, 0.0 if elsewhere else LOOK_SECONDS)

    def _look_at_policies(self, scope: str) -> None:
        for policy in self.policies():
            if policy.name not in self.subjects or not (
                covers(policy.scope, scope) or covers(scope, policy.scope)
            ):
                continue
            found = self.subjects[policy.name].scopes(policy.scope)
            for at in found:
                if covers(scope, at) or covers(at, scope):
                    self._starter.enqueue(f"{policy.name}|{at}")
            if not found and policy.spec.once:
                self._starter.enqueue(f"{policy.name}|{policy.scope}")

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            await self.book.sweep(self._clock.now_ns())


def check_policy(policy: Policy, subject: VersionedSubject, sources: GateSources, *, scope: str) -> None:
    """Refuse a policy that cannot be meant, or that asks a subject for what it does not measure."""
    policy.check()
    if policy.max_unavailable not in NONE and not isinstance(subject, Replaces):
        raise InvalidArgument(
            f"{subject.name} changes targets as they stand, and replaces none",
            field="max_unavailable",
            hint="leave it out",
        )
    for at, wave in enumerate(policy.waves):
        if wave.startswith(LABEL):
            selectors.check(wave.removeprefix(LABEL).strip(), field=f"waves[{at}]")
    for at, gate in enumerate(policy.gates):
        sources.check(subject, gate.query, scope=scope, field=f"gates[{at}].query")
