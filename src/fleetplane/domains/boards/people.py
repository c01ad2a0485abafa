"""People who log in with a name and a password: who they are, and which role they have.

There is no password that everybody knows and nobody can register: the first person is made by
whoever owns the server, further ones by administrators. Guessing is slowed per address and per
account; what is told about a failed login, and how long it takes, is the same for a wrong password
and a name that nobody has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from fleetplane.domains.boards.access import ADMIN, OPERATOR, VIEWER
from fleetplane.domains.boards.kinds import SCOPE, Spec
from fleetplane.domains.boards.numbers import Numbers
from fleetplane.kernel.access import Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.passwords import Failures, Passwords, fault
from fleetplane.kernel.resources import Key, Kind, Resource
from fleetplane.kernel.store import ABSENT, Draft, Store
from fleetplane.web.rate import RateLimit

ROLES = {"viewer": VIEWER, "operator": OPERATOR, "admin": ADMIN}
FAILURES_LIMIT = 5
"""Wrong passwords in a row, after which an account pauses for a quarter of an hour."""
ATTEMPTS_PER_ADDRESS = 20
"""A minute: an office behind one address may come to work at once."""
NAME_LIMIT = 64
TEXT_LIMIT = 128
EMAIL_LIMIT = 254
PEOPLE_LIMIT = 10_000
_USERNAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_EMAIL = re.compile(r"[^@\s\x00-\x1f]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_CLAIM = "login"
"""Held for the name and for the e-mail address alike: either logs in, so neither may be another's."""


class PersonSpec(Spec, frozen=True):
    username: str
    role: str = "viewer"
    email: str = ""
    first_name: str = ""
    last_name: str = ""
    is_active: bool = True


class PersonStatus(Spec, frozen=True):
    last_login_at_ns: int | None = None


Person = Resource[PersonSpec, PersonStatus]
PERSON: Kind[PersonSpec, PersonStatus] = Kind("board-user", PersonSpec, PersonStatus)


def role_of(person: Person) -> Role:
    return ROLES[person.spec.role]


class People:
    def __init__(self, store: Store, master: MasterKey, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._numbers = Numbers(store, "user")
        self._passwords = Passwords(store, master, namespace="boards")
        self._by_address = RateLimit(ATTEMPTS_PER_ADDRESS)
        self._failures = Failures(limit=FAILURES_LIMIT)

    def __repr__(self) -> str:
        return f"<People {len(self._store.list(PERSON, SCOPE))}>"

    # Finding.

    def find(self, name: str) -> Person | None:
        """By number."""
        return self._store.get(PERSON, SCOPE, name)

    def get(self, number: int) -> Person:
        return _present(self.find(str(number)))

    def all(self) -> Sequence[Person]:
        return sorted(self._store.list(PERSON, SCOPE), key=lambda one: int(one.name))

    def by_login(self, text: str) -> Person | None:
        """By user name or e-mail address."""
        owner = self._store.claimed_by(PERSON, SCOPE, _CLAIM, text.strip().lower()) if text.strip() else None
        return self.find(owner) if owner is not None else None

    # Logging in.

    async def recognise(self, login: str, password: str, *, address: str) -> Person:
        """Whose name and password these are."""
        account = login.strip().lower()
        self._slow_down(account, address)
        person = self.by_login(account)
        stored = await self._passwords.verify(person.name if person is not None else None, password)
        if stored is None or person is None:
            self._failures.failed(account, now=self._now())
            raise Unauthenticated("the name or the password is wrong")
        self._failures.succeeded(account)
        if not person.spec.is_active:  # told only to one who knows the password
            raise PermissionDenied("this account is not active", details={"cause": "inactive"})
        if self._passwords.outdated(stored):
            await self._store_password(person.name, password, actor=f"user/{person.spec.username}")
        return person

    def _slow_down(self, account: str, address: str) -> None:
        now = self._now()
        pause = self._failures.pause_seconds(account, now=now)
        allowance = self._by_address.take(address, now=now)
        if not allowance.allowed:
            pause = max(pause, allowance.reset_seconds)
        if pause:
            raise ResourceExhausted(
                "too many attempts to log in", retry_after_seconds=pause, details={"cause": "locked"}
            )

    def _now(self) -> float:
        return self._clock.now_ns() / 1e9

    # Changing.

    async def create(self, spec: PersonSpec, password: str, *, actor: str) -> Person:
        spec = _checked(spec)
        _check_password(password)
        if len(self._store.list(PERSON, SCOPE)) >= PEOPLE_LIMIT:
            raise ResourceExhausted(f"there are {PEOPLE_LIMIT} users, the most there may be")
        for login in sorted(_logins(spec)):
            if self.by_login(login) is not None:
                raise AlreadyExists(f"there is a user {login!r} already", field="username")
        hashed = await self._passwords.hash(password)
        number = self._numbers.take()

        def change(draft: Draft) -> Person:
            for login in _logins(spec):
                draft.claim(PERSON, SCOPE, _CLAIM, login, str(number))
            self._numbers.record(draft, number)
            self._passwords.put(draft, str(number), hashed)
            return draft.put(PERSON, SCOPE, str(number), spec=spec, status=PersonStatus(), expect=ABSENT)

        done = await self._store.transact(
            change, actor=actor, action="boards.user_create", touches=[_key(number), self._numbers.key]
        )
        return done.value

    async def update(self, number: int, *, actor: str, **changes: object) -> Person:
        """`changes` are fields of the spec; the last active administrator stays one."""

        def change(draft: Draft) -> Person:
            current = _present(draft.get(PERSON, SCOPE, str(number)))
            spec = _checked(msgspec.structs.replace(current.spec, **changes))
            if _is_boss(current.spec) and not _is_boss(spec):
                _keep_a_boss(draft, current.name)
            before, after = _logins(current.spec), _logins(spec)
            for login in before - after:
                draft.release(PERSON, SCOPE, _CLAIM, login, current.name)
            for login in after:
                draft.claim(PERSON, SCOPE, _CLAIM, login, current.name)
            return draft.put(PERSON, SCOPE, current.name, spec=spec, status=current.status)

        return await self._write(number, change, actor=actor, action="boards.user_update")

    async def came(self, number: int, *, actor: str) -> Person:
        """They logged in just now."""

        def change(draft: Draft) -> Person:
            current = _present(draft.get(PERSON, SCOPE, str(number)))
            status = PersonStatus(last_login_at_ns=draft.now_ns)
            return draft.put(PERSON, SCOPE, current.name, spec=current.spec, status=status)

        return await self._write(number, change, actor=actor, action="boards.user_login")

    async def delete(self, number: int, *, actor: str) -> Person:
        def change(draft: Draft) -> Person:
            current = _present(draft.get(PERSON, SCOPE, str(number)))
            if _is_boss(current.spec):
                _keep_a_boss(draft, current.name)
            for login in _logins(current.spec):
                draft.release(PERSON, SCOPE, _CLAIM, login, current.name)
            self._passwords.remove(draft, current.name)
            return draft.delete(PERSON, SCOPE, current.name)

        return await self._write(number, change, actor=actor, action="boards.user_delete")

    async def set_password(self, number: int, password: str, *, actor: str) -> Person:
        _check_password(password)
        person = self.get(number)
        await self._store_password(person.name, password, actor=actor)
        self._failures.succeeded(person.spec.username.lower())
        return person

    async def _store_password(self, name: str, password: str, *, actor: str) -> None:
        hashed = await self._passwords.hash(password)
        await self._store.transact(
            lambda draft: self._passwords.put(draft, name, hashed), actor=actor,
            action="boards.user_password", touches=(),
        )  # fmt: skip

    async def _write(
        self, number: int, change: Callable[[Draft], Person], *, actor: str, action: str
    ) -> Person:
        done = await self._store.transact(change, actor=actor, action=action, touches=[_key(number)])
        return done.value


def _key(number: int) -> Key:
    return PERSON.key(SCOPE, str(number))


def _present(person: Person | None) -> Person:
    if person is None:
        raise NotFound("there is no such user", field="id")
    return person


def _logins(spec: PersonSpec) -> set[str]:
    return {text.lower() for text in (spec.username, spec.email) if text}


def _is_boss(spec: PersonSpec) -> bool:
    return spec.role == "admin" and spec.is_active


def _keep_a_boss(draft: Draft, leaving: str) -> None:
    """The owner could make another, but who acts from elsewhere could not."""
    others = (one for one in draft.list(PERSON, SCOPE) if one.name != leaving and _is_boss(one.spec))
    if next(others, None) is None:
        raise FailedPrecondition("the last administrator must stay", hint="make another one first")


def _checked(spec: PersonSpec) -> PersonSpec:
    spec = msgspec.structs.replace(spec, username=spec.username.strip(), email=spec.email.strip().lower())
    if not _USERNAME.fullmatch(spec.username):
        raise InvalidArgument(
            f"has 1 to {NAME_LIMIT} letters, digits, dots, dashes and underscores", field="username"
        )
    if spec.email and (len(spec.email) > EMAIL_LIMIT or not _EMAIL.fullmatch(spec.email)):
        raise InvalidArgument("is no e-mail address", field="email")
    if spec.role not in ROLES:
        raise InvalidArgument(f"is not one of {', '.join(ROLES)}", field="role")
    for field in ("first_name", "last_name"):
        text = getattr(spec, field)
        if len(text) > TEXT_LIMIT or not text.isprintable():
            raise InvalidArgument(f"has at most {TEXT_LIMIT} printable characters", field=field)
    return spec


def _check_password(password: str) -> None:
    if (found := fault(password)) is not None:
        raise InvalidArgument(found.value, field="password")
