"""Sees rollouts through: looks at one at a time, writes what a pass decides, and has its subject do it.

A pass begins with what is stored and ends with what is stored, so it makes no difference which server made
the one before. What targets are asked is written first: if the server stops in between, the next pass asks
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import msgspec
import structlog

from fleetplane.fleet import freeze as freezing
from fleetplane.fleet.freeze import Freezes
from fleetplane.fleet.rollouts.book import RolloutBook
from fleetplane.fleet.rollouts.gates import PROBE, GateQuestion, GateSources, Measured
from fleetplane.fleet.rollouts.records import (
    Period,
    Rollout,
    RolloutStatus,
    VersionedSubject,
    policy_for,
    records_of,
    status_of,
)
from fleetplane.fleet.rollouts.rules.orders import OrderedChange
from fleetplane.fleet.rollouts.rules.passes import ACTOR, Decision, decide, matches
from fleetplane.fleet.rollouts.rules.policy import Gate
from fleetplane.fleet.rollouts.rules.states import (
    ENDED,
    GateMeasurement,
    RolloutFacts,
    RolloutPhase,
    TargetRecord,
    TargetState,
)
from fleetplane.kernel.access import covers
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict
from fleetplane.kernel.reconcile import PassResult, Reason, Reconciler
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store, follow
from fleetplane.kernel.values.times import NS

log = structlog.get_logger(__name__)

LOOK_SECONDS = 15.0
"""How often a rollout is looked at although nothing seems to happen."""
GATHER_SECONDS = 0.25
"""Reports that come this close together are looked at in one pass, which costs as many steps as there are
targets: thousands that confirm at once must not make for thousands of passes."""
CONCURRENCY = 4
PROBE_NS = 30 * NS
"""The least time between two probes of one gate: a soak is looked at every few seconds."""
T = TargetState


class RolloutDriver:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        book: RolloutBook,
        subjects: Iterable[VersionedSubject],
        freezes: Freezes,
        sources: GateSources | None = None,
    ) -> None:
        self.sources = sources or GateSources()
        self._probed: dict[tuple[str, str], tuple[int, frozenset[str], Measured]] = {}
        """By rollout and gate: when a probe ran, where and what came of it, so that it runs once a window."""
        self._store = store
        self._clock = clock
        self._book = book
        self._freezes = freezes
        self.subjects = {subject.name: subject for subject in subjects}
        self._observing_since_ns = clock.now_ns()
        self._written: dict[str, int] = {}
        """The revision of each rollout that goes on, as this driver has last written it."""
        self.outcomes: Counter[str] = Counter()
        """Targets of rollouts that ended here, by outcome."""
        self.halts: Counter[str] = Counter()
        """Halts here, by the code of their first reason."""
        self.reconciler = Reconciler(
            "rollouts", self.pass_over, clock=clock, store=store, concurrency=CONCURRENCY
        )

    def __repr__(self) -> str:
        return f"<RolloutDriver {' '.join(sorted(self.subjects))}>"

    def look_at(self, rollout: Rollout, after_seconds: float = 0.0) -> None:
        """Look at a rollout soon."""
        self.reconciler.enqueue(key_of(rollout), after_seconds)

    def wrote(self, rollout: Rollout) -> bool:
        """Whether a rollout is as this driver has last written it."""
        return self._written.get(key_of(rollout)) == rollout.revision

    def take_up(self) -> None:
        """At start: look at everything that has not ended."""
        self._observing_since_ns = self._clock.now_ns()
        for rollout in self._book.unfinished():
            self.look_at(rollout)

    async def run(self) -> None:
        """Until cancelled."""
        kinds = {kind.name: kind for subject in self.subjects.values() for kind in subject.watches}
        async with Boundary() as tasks:
            tasks.keep("rollouts/reconcile", self.reconciler.run)
            tasks.keep("rollouts/freezes", partial(self._freezes.follow, self._thaw))
            for kind in kinds.values():
                tasks.keep(f"rollouts/{kind.name}", partial(self._follow, kind))

    def _thaw(self, _scope: str) -> None:
        for rollout in self._book.unfinished():
            self.look_at(rollout)

    async def _follow(self, kind: AnyKind) -> None:
        async for batch in follow(self._store, kind, again=lambda _watch: self._thaw("")):
            scopes = {event.resource.scope for event in batch.events}
            for rollout in self._book.unfinished():
                if any(covers(rollout.scope, scope) for scope in scopes):
                    self.look_at(rollout, GATHER_SECONDS)

    # Looking.

    async def pass_over(self, key: str) -> PassResult:
        """Look at one rollout, by its key, and do what is due."""
        scope, _, name = key.rpartition("|")
        rollout = self._book.find(scope, name)
        if rollout is None:
            return PassResult()
        subject = self.subjects.get(rollout.spec.subject)
        if subject is None:
            message = f"{rollout.spec.subject} does not run on this server"
            return PassResult(explanation=(Reason(code="NO_SUBJECT", message=message),))
        if status_of(rollout).phase in ENDED:
            return await self._settle(rollout, subject)
        frozen = self._freezes.holding(subject.domain, rollout.scope)
        facts = RolloutFacts(
            targets=subject.targets(rollout.scope),
            gates=await self._readings(rollout, subject),
            frozen=freezing.message(frozen) if frozen is not None else "",
            observing_since_ns=self._observing_since_ns,
        )
        records = records_of(self._store, rollout)
        spec, status = rollout.spec, status_of(rollout)
        made = decide(spec.policy, spec.to, status, records, facts, self._clock.now_ns(), select=matches)
        try:
            rollout = await self._write(rollout, made, facts)
        except Conflict:  # somebody ordered something meanwhile
            return PassResult(explanation=made.reasons, requeue_after_seconds=0.0)
        if frozen is None:
            await self._carry_out(rollout, subject, made, {**records, **made.changes})
        if made.status.phase in ENDED:
            return await self._settle(rollout, subject)
        moved_on = made.status.phase is not status.phase
        after = (
            LOOK_SECONDS if made.look_after_seconds is None else min(LOOK_SECONDS, made.look_after_seconds)
        )
        return PassResult(explanation=made.reasons, requeue_after_seconds=0.0 if moved_on else after)

    async def _write(self, rollout: Rollout, made: Decision, facts: RolloutFacts) -> Rollout:
        before = status_of(rollout)
        if made.status == before and not made.changes:
            return rollout
        titles = {name: facts.targets[name].title or name for name in made.changes if name in facts.targets}
        action = (
            f"rollout.{made.status.phase}" if made.status.phase is not before.phase else "rollout.progress"
        )
        done = await self._book.write(
            rollout,
            OrderedChange(status=made.status, changes=made.changes),
            actor=ACTOR,
            action=action,
            titles=titles,
        )
        self._written[key_of(done)] = done.revision
        if made.status.phase in ENDED:
            del self._written[key_of(done)]
        self._tell(rollout, before, made)
        return done

    def _tell(self, rollout: Rollout, before: RolloutStatus, made: Decision) -> None:
        after = made.status
        for one in after.history[len(before.history) :] if len(after.history) > len(before.history) else ():
            log.info(
                "rollouts.transition",
                rollout=rollout.name,
                subject=rollout.spec.subject,
                scope=rollout.scope,
                before=one.before,
                after=one.after,
                wave=after.wave,
                reason=one.reason,
            )
            if one.after is RolloutPhase.HALTED:
                self.halts[after.halt[0].code] += 1
        if after.phase in ENDED:
            self.outcomes.update(after.counts)

    async def _readings(self, rollout: Rollout, subject: VersionedSubject) -> Mapping[str, GateMeasurement]:
        if status_of(rollout).phase is not RolloutPhase.SOAKING:
            return {}
        return {gate.name: await self._reading(rollout, subject, gate) for gate in rollout.spec.policy.gates}

    async def _reading(self, rollout: Rollout, subject: VersionedSubject, gate: Gate) -> GateMeasurement:
        """A gate's measurement of the targets that have moved; nothing where it cannot be had."""
        status, window_ns = status_of(rollout), round(gate.window_seconds * NS)
        moved = [name for name, one in records_of(self._store, rollout).items() if one.state is T.CONFIRMED]
        now_ns, started_ns = self._clock.now_ns(), rollout.spec.started_at_ns
        current = Period(from_ns=max(now_ns - window_ns, status.soak_started_at_ns), to_ns=now_ns)
        earlier = Period(from_ns=started_ns - window_ns, to_ns=started_ns)
        asked = GateQuestion(
            rollout=rollout.name,
            subject=subject,
            scope=rollout.scope,
            to=rollout.spec.to,
            wave=status.wave,
            gate=gate.name,
            query=gate.query,
            targets=moved,
            period=current,
        )
        value = await (self._probe(asked) if gate.query.startswith(PROBE) else self.sources.measure(asked))
        baseline = Measured()
        if gate.max_increase is not None and value.value is not None:
            baseline = await self.sources.measure(replace(asked, period=earlier))
        return GateMeasurement(
            value=value.value, baseline=baseline.value, problem=value.problem or baseline.problem
        )

    async def _probe(self, asked: GateQuestion) -> Measured:
        """A probe, at most once a window of its gate for the same targets."""
        key, targets, now_ns = (asked.rollout, asked.gate), frozenset(asked.targets), self._clock.now_ns()
        known = self._probed.get(key)
        window_ns = asked.period.to_ns - asked.period.from_ns
        if known is not None and known[1] == targets and now_ns - known[0] < max(window_ns, PROBE_NS):
            return known[2]
        found = await self.sources.measure(asked)
        self._probed[key] = now_ns, targets, found
        return found

    # Doing.

    async def _carry_out(
        self, rollout: Rollout, subject: VersionedSubject, made: Decision, records: Mapping[str, TargetRecord]
    ) -> None:
        to = rollout.spec.to
        versions = {name: to if wants_new(one) else one.before for name, one in records.items()}
        if any(one.moved for one in records.values()):
            back = status_of(rollout).phase in (RolloutPhase.ROLLING_BACK, RolloutPhase.ROLLED_BACK)
            default = rollout.spec.default_before if back else ""
            await subject.steer(rollout.scope, versions, rollout=rollout.name, default=default)
        if again := [name for name in made.asked if records[name].attempts > 1]:
            await subject.again(rollout.scope, again)

    async def _settle(self, rollout: Rollout, subject: VersionedSubject) -> PassResult:
        """Let the subject know how it ended, once."""
        status = status_of(rollout)
        for gate in rollout.spec.policy.gates:
            self._probed.pop((rollout.name, gate.name), None)
        if status.settled == status.phase:
            return PassResult()
        if (frozen := self._freezes.holding(subject.domain, rollout.scope)) is not None:
            return PassResult(explanation=(freezing.reason(frozen),), requeue_after_seconds=LOOK_SECONDS)
        if status.phase is RolloutPhase.DONE:
            held = policy_for(self._store, subject.name, rollout.scope) is not None
            await subject.settle(rollout.scope, rollout.spec.to, rollout=rollout.name, held=held)
        after = msgspec.structs.replace(status, settled=status.phase)
        try:
            await self._book.write(
                rollout, OrderedChange(status=after), actor=ACTOR, action="rollout.settled"
            )
        except Conflict:
            return PassResult(requeue_after_seconds=0.0)
        return PassResult()


def wants_new(record: TargetRecord) -> bool:
    """Whether a target is to have the new version, as its record says."""
    if not record.moved or record.stuck:
        return False
    return record.state in (T.MOVING, T.CONFIRMED, T.FAILED, T.NOT_DELIVERED, T.SKIPPED, T.PENDING)


def key_of(rollout: Rollout) -> str:
    """Of the reconciler: where the rollout lies, and its id."""
    return f"{rollout.scope}|{rollout.name}"
