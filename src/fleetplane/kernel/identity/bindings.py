"""Bindings of roles to subjects at scopes, and the scopes that no longer exist.

A binding names its subject (`token/ci`, `account/ann`, `group/sre`), a role and a path of the scope tree
(`/tenants/acme`); it holds there and below. What a role allows is the access table's business; what a path
means to each domain that of `fleet.people.scopes`.

A token holds the name of its scope (`tenant/acme`). Another organisation that takes the name later must
not be open to it. When a scope is deleted or renamed, its lifetime is recorded under its path in the
same transaction; a token that was made within that time is refused from then on. A token made before it
stays valid: it was made for the name, and taking a name for a while must not take away what others hold
there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec

from fleetplane.kernel.access import who
from fleetplane.kernel.errors import Conflict, NotFound, ResourceExhausted
from fleetplane.kernel.resources import Key, Kind, Nothing, Resource
from fleetplane.kernel.store import Draft, Store, transact_found

SCOPE = "ended-places"
LIVES_LIMIT = 64
"""Of one path; the two that are nearest to each other become one then: whoever takes and leaves a name many
times ends next to nothing that was given between."""

SpecT = TypeVar("SpecT")
StatusT = TypeVar("StatusT")


class EndedPlaceSpec(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    lives: tuple[tuple[int, int], ...]
    """From when to when each thing of that path was there, in nanoseconds, oldest first."""


EndedPlace = Resource[EndedPlaceSpec, Nothing]
ENDED_PLACE: Kind[EndedPlaceSpec, Nothing] = Kind("ended-place", EndedPlaceSpec, Nothing)


class PlaceReader(Protocol):
    """What a store and a draft have in common."""

    def get(self, kind: Kind[SpecT, StatusT], scope: str, name: str) -> Resource[SpecT, StatusT] | None: ...


def ended_key(path: str) -> Key:
    """What a transaction announces in which the place of this path goes."""
    return ENDED_PLACE.key(SCOPE, _name(path))


def end_life(draft: Draft, path: str, *, since_ns: int) -> None:
    """Write down that what had this path since then has it no longer."""
    current = draft.get(ENDED_PLACE, SCOPE, _name(path))
    lives = [*(current.spec.lives if current is not None else ()), (since_ns, draft.now_ns)]
    if len(lives) > LIVES_LIMIT:
        first = min(range(len(lives) - 1), key=lambda at: lives[at + 1][0] - lives[at][1])
        lives[first : first + 2] = [(lives[first][0], lives[first + 1][1])]
    draft.put(ENDED_PLACE, SCOPE, _name(path), spec=EndedPlaceSpec(path=path, lives=tuple(lives)))


def has_ended(reader: PlaceReader, scope: str, made_at_ns: int) -> bool:
    """Whether something that was made then, for this stored scope, was made for a place that is no more."""
    for path in _paths(scope):
        found = reader.get(ENDED_PLACE, SCOPE, _name(path))
        if found is not None and any(since <= made_at_ns <= until for since, until in found.spec.lives):
            return True
    return False


def _paths(scope: str) -> list[str]:
    """The paths of a stored scope that has names, and of what it lies in; scopes that have ids need none."""
    parts = scope.split("/")
    if parts[0] != "tenant" or len(parts) < 2:
        return []
    above = f"/tenants/{parts[1]}"
    return [above, f"{above}/{parts[2]}s/{parts[3]}"] if len(parts) >= 4 else [above]


def _name(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()[:32]


BINDINGS_LIMIT = 20_000
"""In all; about 300 bytes of memory each."""
_DIGEST_CHARACTERS = 32


class BindingSpec(msgspec.Struct, frozen=True, kw_only=True):
    subject: str
    role: str
    scope: str
    """A path of the scope tree, such as `/tenants/acme`."""
    created_by: str = ""
    created_at_ns: int = 0


BindingRecord = Resource[BindingSpec, Nothing]
BINDING: Kind[BindingSpec, Nothing] = Kind("role-binding", BindingSpec, Nothing)


def binding_id(subject: str, role: str, scope: str) -> str:
    """The same for the same binding, so that giving it twice gives it once."""
    return _digest(f"{subject}\n{role}\n{scope}")


def _place(subject: str) -> str:
    return f"binding/{_digest(subject)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]


class BindingReader(Protocol):
    """What a store and a draft have in common, where bindings are looked for by their scope."""

    def list(self, kind: Kind[BindingSpec, Nothing], scope: str = "") -> Sequence[BindingRecord]: ...


def _given_at(reader: BindingReader, path: str, *, since_ns: int) -> list[BindingRecord]:
    """Bindings at a path and below it that were given since then."""
    return [
        one
        for one in reader.list(BINDING)
        if (one.spec.scope == path or one.spec.scope.startswith(f"{path}/"))
        and one.spec.created_at_ns >= since_ns
    ]


def keys_at(reader: BindingReader, path: str, *, since_ns: int) -> Iterator[Key]:
    """What a transaction announces that calls `end_at`."""
    yield ended_key(path)
    for one in _given_at(reader, path, since_ns=since_ns):
        yield BINDING.key(one.scope, one.name)


def end_at(draft: Draft, path: str, *, since_ns: int) -> None:
    """Take away what was given at a path since it got its meaning: another thing of its name has none of it.

    Bindings are deleted; tokens that were made for it are refused (`ended_places`). What was given before is
    left: it was given at the name, and whoever takes a name for a while must not be able to take from others
    what they hold there. The transaction announces the keys of `keys_at`.
    """
    for one in _given_at(draft, path, since_ns=since_ns):
        draft.delete(BINDING, one.scope, one.name)
    end_life(draft, path, since_ns=since_ns)


class Bindings:
    """All bindings of this installation. Reading one subject's costs the same however many there are."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<Bindings {self._store.count(BINDING)}>"

    def of(self, subjects: Iterable[str]) -> list[BindingRecord]:
        """What was given to any of these subjects."""
        return [one for subject in subjects for one in self._store.list(BINDING, _place(subject))]

    def all(self) -> Sequence[BindingRecord]:
        return sorted(self._store.list(BINDING), key=lambda one: (one.spec.subject, one.spec.scope, one.name))

    def get(self, identity: str) -> BindingRecord:
        found = next((one for one in self._store.list(BINDING) if one.name == identity), None)
        if found is None:
            raise NotFound("there is no such binding", field="id")
        return found

    @staticmethod
    def is_bound(draft: Draft, subject: str) -> bool:
        """Whether something was given to a subject already, as one transaction sees it."""
        return bool(draft.list(BINDING, _place(subject)))

    @staticmethod
    def keys_of(reader: BindingReader, subject: str, *, given_to: str = "") -> list[Key]:
        """What a transaction announces that ends a subject's bindings, or passes them on to another."""
        found = reader.list(BINDING, _place(subject))
        keys = [BINDING.key(one.scope, one.name) for one in found]
        if given_to:
            place = _place(given_to)
            keys += [BINDING.key(place, binding_id(given_to, one.spec.role, one.spec.scope)) for one in found]
        return keys

    @staticmethod
    def end(draft: Draft, subject: str, announced: Collection[Key]) -> None:
        """Take everything from a subject inside the transaction in which it ceases to be."""
        for one in draft.list(BINDING, _place(subject)):
            if BINDING.key(one.scope, one.name) not in announced:
                raise Conflict(f"{subject} has just been given a role", hint="try again")
            draft.delete(BINDING, one.scope, one.name)

    @staticmethod
    def pass_on(draft: Draft, subject: str, heir: str) -> None:
        """Give what a subject holds to the one that it is called from now on."""
        place = _place(heir)
        for one in draft.list(BINDING, _place(subject)):
            draft.delete(BINDING, one.scope, one.name)
            spec = msgspec.structs.replace(one.spec, subject=heir)
            draft.put(BINDING, place, binding_id(heir, spec.role, spec.scope), spec=spec)

    async def give(self, subject: str, role: str, scope: str, *, actor: str) -> BindingRecord:
        """Give a role at a scope; one that is held already stays as it is."""
        name, place = binding_id(subject, role, scope), _place(subject)

        def change(draft: Draft) -> BindingRecord:
            current = draft.get(BINDING, place, name)
            if current is not None:
                return current
            if draft.count(BINDING) >= BINDINGS_LIMIT:
                raise ResourceExhausted(f"there are {BINDINGS_LIMIT} bindings, the most there may be")
            spec = BindingSpec(
                subject=subject,
                role=role,
                scope=scope,
                created_by=who(actor).partition("?")[0],
                created_at_ns=draft.now_ns,
            )
            return draft.put(BINDING, place, name, spec=spec)

        touches = [BINDING.key(place, name)]
        done = await self._store.transact(change, actor=actor, action="people.bind", touches=touches)
        return done.value

    async def take(self, identity: str, *, actor: str) -> None:
        """Take a role away. It ends at once, also for calls and streams that are open."""
        found = self.get(identity)
        key = BINDING.key(found.scope, found.name)

        def change(draft: Draft) -> None:
            if draft.get(BINDING, found.scope, found.name) is not None:
                draft.delete(BINDING, found.scope, found.name)

        await self._store.transact(change, actor=actor, action="people.unbind", touches=[key])

    async def forget(self, subject: str, *, actor: str) -> None:
        """Take everything from a subject that ceases to be: another of its name must not inherit it."""

        def held(reader: BindingReader) -> list[Key]:
            return self.keys_of(reader, subject)

        def change(draft: Draft, keys: Sequence[Key]) -> None:
            for key in keys:
                draft.delete(BINDING, key.scope, key.name)

        await self._store.settled(BINDING)  # what is being given is taken, too
        if held(self._store):
            await transact_found(self._store, held, change, actor=actor, action="people.unbind")
