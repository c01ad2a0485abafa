"""Rollouts as they are written down: started, ordered about, gone on with. All or nothing, each time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from fleetplane.fleet.rollouts.records import (
    ROLLOUT,
    ROLLOUT_TARGET,
    Rollout,
    RolloutSpec,
    RolloutStatus,
    RolloutTargetSpec,
    records_of,
    status_of,
    targets_scope,
)
from fleetplane.fleet.rollouts.rules.orders import OrderedChange
from fleetplane.fleet.rollouts.rules.states import ENDED, RolloutStanding, TargetRecord, counted
from fleetplane.kernel.access import EVERYWHERE, covers
from fleetplane.kernel.errors import Conflict, FailedPrecondition, NotFound
from fleetplane.kernel.resources import AnyKind, Key
from fleetplane.kernel.store import ABSENT, Draft, Store

KEEP_SECONDS = 90 * 86_400.0
"""How long a rollout that ended can be looked up."""
TRIES = 8
"""Of an order whose rollout goes on meanwhile."""

Check = Callable[[Draft | Store], None]
"""Refuses something by what is so, in the store or in a transaction."""


class RolloutBook:
    def __init__(self, store: Store) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<RolloutBook {self._store.count(ROLLOUT)}>"

    def find(self, scope: str, rollout: str) -> Rollout | None:
        """A rollout by where it lies and its id."""
        return self._store.get(ROLLOUT, scope, rollout)

    def get(self, rollout: str, within: Collection[str] = (EVERYWHERE,)) -> Rollout:
        """A rollout by its id, or by the beginning of one, at or below one of some scopes."""
        found = [
            one
            for one in self._store.list(ROLLOUT)
            if rollout and one.name.startswith(rollout) and any(covers(at, one.scope) for at in within)
        ]
        if len(found) != 1:
            what = "there is no rollout" if not found else "more than one rollout begins with"
            raise NotFound(f"{what} {rollout[:80]!r}", hint="list them to see their ids")
        return found[0]

    def list(self, within: str = "", subject: str = "") -> list[Rollout]:
        """Rollouts at or below a scope, the newest first."""
        found = self._store.list(ROLLOUT, within)
        return newest_first(one for one in found if subject in ("", one.spec.subject))

    def unfinished(self) -> Iterator[Rollout]:
        """Those that have not ended, or whose subject does not know it yet."""
        for one in self._store.list(ROLLOUT):
            status = status_of(one)
            if status.phase not in ENDED or status.settled != status.phase:
                yield one

    async def begin(
        self,
        scope: str,
        name: str,
        spec: RolloutSpec,
        targets: Mapping[str, tuple[str, TargetRecord]],
        *,
        ending: tuple[Rollout, OrderedChange] | None,
    ) -> Rollout:
        """Write a rollout with its targets, by name with their titles, and the end of one it supersedes.

        `Conflict` if another server has begun one there meanwhile.
        """
        below = targets_scope(scope, name)

        def change(draft: Draft) -> Rollout:
            if ending is not None:
                _write(draft, *ending)
            if self._store.shared:
                _check_is_only_one(draft, scope, spec.subject)
            for target, (title, record) in targets.items():
                draft.put(
                    ROLLOUT_TARGET,
                    below,
                    target,
                    spec=RolloutTargetSpec(title=title),
                    status=record,
                    expect=ABSENT,
                )
            status = RolloutStatus(counts=counted(record for _, record in targets.values()))
            return draft.put(ROLLOUT, scope, name, spec=spec, status=status, expect=ABSENT)

        touches = [ROLLOUT.key(scope, name), *(ROLLOUT_TARGET.key(below, target) for target in targets)]
        if ending is not None:
            touches += _keys(*ending)
        done = await self._store.transact(change, actor=spec.actor, action="rollout.start", touches=touches)
        return done.value

    async def write(
        self,
        rollout: Rollout,
        made: OrderedChange,
        *,
        actor: str,
        action: str,
        titles: Mapping[str, str] | None = None,
        check: Check | None = None,
    ) -> Rollout:
        """Write where a rollout stands now; `Conflict` if it went on since it was read."""

        def change(draft: Draft) -> Rollout:
            if check is not None:
                check(draft)
            return _write(draft, rollout, made, titles)

        done = await self._store.transact(change, actor=actor, action=action, touches=_keys(rollout, made))
        return done.value

    async def order(
        self,
        rollout: Rollout,
        decide: Callable[[RolloutStanding, Mapping[str, TargetRecord]], OrderedChange],
        *,
        actor: str,
        action: str,
        check: Check | None = None,
    ) -> Rollout:
        """Carry out a person's order on where the rollout stands when it is written."""
        for left in reversed(range(TRIES)):
            current = self._store.get(ROLLOUT, rollout.scope, rollout.name)
            if current is None:
                raise NotFound(f"there is no rollout {rollout.name}")
            made = decide(status_of(current), records_of(self._store, current))
            try:
                return await self.write(current, made, actor=actor, action=action, check=check)
            except Conflict:
                if not left:
                    raise
                await self._store.settled(ROLLOUT, rollout.scope, rollout.name)
        raise AssertionError("the last try returns or raises")

    async def sweep(self, now_ns: int) -> int:
        """Forget rollouts that ended long ago, but the last of each scope and subject; how many."""
        before_ns = now_ns - round(KEEP_SECONDS * 1e9)
        seen: set[tuple[str, str]] = set()
        swept = 0
        for one in self.list():
            place, ended_at_ns = (one.scope, one.spec.subject), status_of(one).ended_at_ns
            if place in seen and ended_at_ns is not None and ended_at_ns < before_ns:
                await self._forget(one)
                swept += 1
            seen.add(place)
        return swept

    async def _forget(self, rollout: Rollout) -> None:
        below = self._store.list(ROLLOUT_TARGET, targets_scope(rollout.scope, rollout.name))
        keys = [rollout.key, *(one.key for one in below)]

        def change(draft: Draft) -> None:
            for key in keys:
                kind: AnyKind = ROLLOUT if key.kind == ROLLOUT.name else ROLLOUT_TARGET
                if draft.get(kind, key.scope, key.name) is not None:
                    draft.delete(kind, key.scope, key.name)

        await self._store.transact(change, actor="system/rollouts", action="rollout.sweep", touches=keys)


def no_check(_reader: Draft | Store) -> None:
    """Nothing to refuse."""


def check_is_last(rollout: Rollout, reader: Draft | Store) -> None:
    """Refuse what concerns a rollout that was followed by another of its scope."""
    here = [
        one
        for one in reader.list(ROLLOUT, rollout.scope)
        if (one.scope, one.spec.subject) == (rollout.scope, rollout.spec.subject)
    ]
    last = newest_first(here)[0] if here else rollout
    if last.name != rollout.name:
        raise FailedPrecondition(
            f"rollout {last.name} came after it",
            hint="undo the last one, or start one to the version wanted",
        )


def newest_first(rollouts: Iterable[Rollout]) -> list[Rollout]:
    return sorted(rollouts, key=lambda one: (one.spec.started_at_ns, one.created_revision), reverse=True)


def _check_is_only_one(draft: Draft, scope: str, subject: str) -> None:
    for one in draft.list(ROLLOUT, scope):
        if (one.scope, one.spec.subject) == (scope, subject) and status_of(one).phase not in ENDED:
            raise Conflict(f"rollout {one.name} was started meanwhile")


def _keys(rollout: Rollout, made: OrderedChange) -> list[Key]:
    below = targets_scope(rollout.scope, rollout.name)
    return [rollout.key, *(ROLLOUT_TARGET.key(below, name) for name in made.changes)]


def _write(
    draft: Draft, rollout: Rollout, made: OrderedChange, titles: Mapping[str, str] | None = None
) -> Rollout:
    below = targets_scope(rollout.scope, rollout.name)
    current = draft.get(ROLLOUT, rollout.scope, rollout.name)
    if current is None or current.revision != rollout.revision:
        raise Conflict(f"rollout {rollout.name} went on meanwhile")
    for name, record in made.changes.items():
        known = draft.get(ROLLOUT_TARGET, below, name)
        spec = known.spec if known is not None else RolloutTargetSpec(title=(titles or {}).get(name, name))
        draft.put(ROLLOUT_TARGET, below, name, spec=spec, status=record)
    assert isinstance(made.status, RolloutStatus)
    return draft.put(ROLLOUT, rollout.scope, rollout.name, spec=rollout.spec, status=made.status)
