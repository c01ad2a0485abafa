"""Versions that wait for a rollout, for domains that keep only the newest of what they configure.

While a policy or a rollout holds a scope, its targets have the version at which it is held, whatever is
newest; those that a rollout has moved have another. Both stand in one record, `rollout-hold`, named by the
subject. The contents of versions stand beside it in `SLOTS` records, so that there is a way back.

A domain calls `changing` in the very transaction that makes a new version: nothing reaches anybody between
the change and the hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

from fleetplane.fleet.rollouts.records import (
    HOLD,
    KEPT,
    ROLLOUT,
    HoldSpec,
    KeptSpec,
    Rollout,
    policy_for,
    records_of,
    status_of,
)
from fleetplane.fleet.rollouts.rules.passes import ACTOR
from fleetplane.fleet.rollouts.rules.states import ENDED
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store

SLOTS = 8
"""Contents kept for each subject and scope: the one held, the one moved to, and a few to go back to."""
NEWEST = "newest"
PREFIX_LENGTH = 6
"""Characters of a version that are enough to name it, if no other begins with them."""


def digest(content: bytes) -> str:
    """The name of a version: the same contents are the same version, wherever they came from."""
    return hashlib.sha256(content).hexdigest()


def keys_of(subject: str, scope: str) -> frozenset[Key]:
    """Everything that a change of a hold may touch."""
    return frozenset({HOLD.key(scope, subject), *(KEPT.key(scope, name) for name in _slots(subject))})


def _slots(subject: str) -> list[str]:
    return [f"{subject}/{number}" for number in range(SLOTS)]


def is_held(source: Store | Draft, subject: str, scope: str) -> bool:
    """Whether new versions wait for a rollout: the scope has a policy, or one is under way."""
    if policy_for(source, subject, scope) is not None:
        return True
    return bool(running(source, subject, scope))


def running(source: Store | Draft, subject: str, scope: str) -> list[Rollout]:
    """Rollouts of a scope that have not ended."""
    return [
        one
        for one in source.list(ROLLOUT, scope)
        if one.spec.subject == subject and one.scope == scope and status_of(one).phase not in ENDED
    ]


# Changes, as functions of a draft.


def changing(draft: Draft, subject: str, scope: str, *, before: bytes, after: bytes) -> None:
    """Take a new version into account: hold everybody at the one before, or let all go to this one."""
    hold = draft.get(HOLD, scope, subject)
    spec = hold.spec if hold is not None else HoldSpec()
    if not is_held(draft, subject, scope):
        if spec.held:
            draft.put(HOLD, scope, subject, spec=HoldSpec())
        return
    if not spec.held:
        spec = HoldSpec(held=digest(before))
        keep(draft, subject, scope, before, using=spec)
        draft.put(HOLD, scope, subject, spec=spec)
    keep(draft, subject, scope, after, using=spec)


def forget(draft: Draft, subject: str, scope: str) -> None:
    """Hold nobody any more, and keep no contents: what was versioned is gone."""
    if draft.get(HOLD, scope, subject) is not None:
        draft.delete(HOLD, scope, subject)
    for name in _slots(subject):
        if draft.get(KEPT, scope, name) is not None:
            draft.delete(KEPT, scope, name)


def keep(draft: Draft, subject: str, scope: str, content: bytes, *, using: HoldSpec) -> str:
    """Keep the contents of a version in place of the oldest that nobody uses; its name."""
    version = digest(content)
    kept = {name: draft.get(KEPT, scope, name) for name in _slots(subject)}
    if any(one is not None and one.spec.version == version for one in kept.values()):
        return version
    used = {using.held, *using.moved}
    if None not in kept.values():
        used |= _needed(draft, subject, scope)
    free = [
        (one.spec.at_ns if one is not None else -1, name)
        for name, one in kept.items()
        if one is None or one.spec.version not in used
    ]
    if not free:
        raise FailedPrecondition(
            f"{len(used)} versions of {subject} are in use at {scope}, the most there may be",
            hint="wait for the end of the rollout, or undo it",
        )
    _, name = min(free)
    spec = KeptSpec(version=version, content=content, at_ns=draft.now_ns)
    draft.put(KEPT, scope, name, spec=spec)
    return version


def _needed(draft: Draft, subject: str, scope: str) -> set[str]:
    """Versions that a rollout which has not ended goes to, or may go back to."""
    found: set[str] = set()
    for rollout in running(draft, subject, scope):
        found |= {rollout.spec.to, rollout.spec.default_before}
        found |= {record.before for record in records_of(draft, rollout).values()}
    return found


def steered(spec: HoldSpec, versions: Mapping[str, str], held: str) -> HoldSpec:
    """The hold with each target at its version; an empty one means `held`, at which all others are."""
    wanted = {target: version for version, targets in spec.moved.items() for target in targets}
    wanted |= {target: version or held for target, version in versions.items()}
    moved: dict[str, list[str]] = {}
    for target, version in wanted.items():
        if version != held:
            moved.setdefault(version, []).append(target)
    return HoldSpec(held=held, moved={version: tuple(moved[version]) for version in sorted(moved)})


class HoldReader:
    """What one subject's targets are to have, from what is stored."""

    def __init__(self, store: Store, subject: str) -> None:
        self._store = store
        self.subject = subject
        self._wanted: dict[str, tuple[int, str, Mapping[str, str]]] = {}
        """By scope, with the revision of the hold: its version, and that of each target that has another."""

    def __repr__(self) -> str:
        return f"<HoldReader {self.subject}>"

    @property
    def revision(self) -> int:
        """Of the last change to any hold."""
        return self._store.kind_revision(HOLD)

    def wanted(self, scope: str, target: str) -> str:
        """The version that a target is to have; empty if it follows the newest."""
        hold = self._store.get(HOLD, scope, self.subject)
        if hold is None or not hold.spec.held:
            return ""
        known = self._wanted.get(scope)
        if known is None or known[0] != hold.revision:
            moved = {name: version for version, names in hold.spec.moved.items() for name in names}
            known = self._wanted[scope] = hold.revision, hold.spec.held, moved
        return known[2].get(target, known[1])

    def hold(self, scope: str) -> HoldSpec:
        """What is held at a scope."""
        found = self._store.get(HOLD, scope, self.subject)
        return found.spec if found is not None else HoldSpec()

    def kept(self, scope: str) -> Mapping[str, bytes]:
        """The contents of the versions that are kept, newest first."""
        found = [self._store.get(KEPT, scope, name) for name in _slots(self.subject)]
        there = sorted((one for one in found if one is not None), key=lambda one: -one.spec.at_ns)
        return {one.spec.version: one.spec.content for one in there}

    def content(self, scope: str, version: str) -> bytes | None:
        """The contents of one version, if it is kept."""
        return self.kept(scope).get(version)


class HeldVersions:
    """The versions' side of a subject, for domains that keep their newest version only."""

    def __init__(self, store: Store, subject: str, content: Callable[[Store | Draft, str], bytes]) -> None:
        """`content` gives the newest version of a scope, as it is stored or as a draft has it."""
        self._store = store
        self._subject = subject
        self._content = content
        self.reader = HoldReader(store, subject)

    def __repr__(self) -> str:
        return f"<HeldVersions {self._subject}>"

    def newest(self, scope: str) -> str:
        """The newest version, whether or not anybody has it."""
        return digest(self._content(self._store, scope))

    def version(self, scope: str, text: str) -> str:
        """A version by its name, or by the beginning of it, or `newest`."""
        newest = self.newest(scope)
        if text == NEWEST:
            return newest
        if not (text.isascii() and text.isalnum() and PREFIX_LENGTH <= len(text) <= 64):
            raise InvalidArgument(
                f"{text[:40]!r} is not a version; write at least {PREFIX_LENGTH} characters of it, or newest",
                field="to",
            )
        found = {one for one in (newest, *self.reader.kept(scope)) if one.startswith(text.lower())}
        if len(found) != 1:
            what = "is not kept" if not found else "means more than one version"
            raise NotFound(f"version {text[:64]} {what}")
        return found.pop()

    def waiting(self, scope: str) -> str:
        """The newest version if it waits for a rollout."""
        held, newest = self.reader.hold(scope).held, self.newest(scope)
        return newest if held and held != newest else ""

    def default(self, scope: str) -> str:
        """The version that whoever comes new is to have."""
        return self.reader.hold(scope).held or self.newest(scope)

    def known(self, scope: str) -> list[str]:
        """Every version that targets may have: the newest, then those kept."""
        return list(dict.fromkeys((self.newest(scope), *self.reader.kept(scope))))

    def content(self, scope: str, version: str) -> bytes | None:
        """The contents of a version that is kept, or the newest."""
        newest = self._content(self._store, scope)
        return newest if digest(newest) == version else self.reader.content(scope, version)

    async def steer(self, scope: str, versions: Mapping[str, str], *, default: str = "") -> None:
        """Want each target at its version, and whoever is not named at what it has."""
        now = self.reader.hold(scope)
        held = default or now.held or self.newest(scope)
        if steered(now, versions, held) == now:
            return
        contents = self._contents(scope, {held, *filter(None, versions.values())})

        def change(draft: Draft) -> None:
            current = draft.get(HOLD, scope, self._subject)
            spec = current.spec if current is not None else HoldSpec()
            after = steered(spec, versions, default or spec.held or held)
            for content in contents.values():
                keep(draft, self._subject, scope, content, using=after)
            draft.put(HOLD, scope, self._subject, spec=after)

        await self._transact(scope, change, "rollout.steer")

    async def settle(self, scope: str, version: str, *, held: bool) -> None:
        """Want everyone at a version; with `held`, later ones wait for a rollout of their own."""
        contents = self._contents(scope, {version})

        def change(draft: Draft) -> None:
            follows = not held and digest(self._content(draft, scope)) == version
            after = HoldSpec() if follows else HoldSpec(held=version)
            for content in contents.values():
                keep(draft, self._subject, scope, content, using=after)
            draft.put(HOLD, scope, self._subject, spec=after)

        await self._transact(scope, change, "rollout.settle")

    def _contents(self, scope: str, versions: Iterable[str]) -> Mapping[str, bytes]:
        found: dict[str, bytes] = {}
        for version in versions:
            content = self.content(scope, version)
            if content is None:
                raise FailedPrecondition(
                    f"version {version} of {self._subject} at {scope} is not kept any more",
                    hint="roll out a version that is",
                )
            found[version] = content
        return found

    async def _transact(self, scope: str, change: Callable[[Draft], None], action: str) -> None:
        await self._store.transact(change, actor=ACTOR, action=action, touches=keys_of(self._subject, scope))
