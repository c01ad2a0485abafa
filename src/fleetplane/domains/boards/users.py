"""Users of boards: what a valid one is, and which role it has.

A user is the profile of an account; `fleet.people.accounts` authenticates and changes both.

There is no built-in password and no self-registration: the first user is made by whoever owns the
server, further ones by administrators.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from fleetplane.domains.boards.access import ADMIN, OPERATOR, VIEWER
from fleetplane.domains.boards.inventory.numbers import Numbers
from fleetplane.domains.boards.kinds import SCOPE, BoardsSpec
from fleetplane.fleet.people.account_kind import Account
from fleetplane.fleet.people.account_rules import AccountActions, AccountRules, Companion
from fleetplane.fleet.people.accounts import Accounts
from fleetplane.fleet.people.attempts.throttle import ThrottleLimits
from fleetplane.fleet.people.linked_logins import LinkedLogins, LoginCloser
from fleetplane.fleet.people.profiles import NewProfile
from fleetplane.kernel.access import Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.passwords import fault
from fleetplane.kernel.resources import Kind, Resource
from fleetplane.kernel.store import Draft, Store

FAMILY = "boards"
"""What these logins are called, and the door's name for their tokens."""
ROLES = {"viewer": VIEWER, "operator": OPERATOR, "admin": ADMIN}
FAILURES_LIMIT = 5
"""Wrong passwords for one account from one address, after which that address waits a quarter of an hour."""
ATTEMPTS_PER_ADDRESS = 20
"""A minute: an office behind one address may come to work at once."""
NAME_LIMIT = 64
TEXT_LIMIT = 128
EMAIL_LIMIT = 254
PEOPLE_LIMIT = 10_000
_USERNAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_EMAIL = re.compile(r"[^@\s\x00-\x1f]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


class PersonSpec(BoardsSpec, frozen=True):
    username: str
    role: str = "viewer"
    email: str = ""
    first_name: str = ""
    last_name: str = ""
    is_active: bool = True
    is_guest: bool = False
    """Whether `role` only tells what the account was bound to when its owner logged in, and gives nothing."""
    is_adopted: bool = False
    """Whether the account was there before it became a user of boards."""


class PersonStatus(BoardsSpec, frozen=True):
    last_login_at_ns: int | None = None


Person = Resource[PersonSpec, PersonStatus]
PERSON: Kind[PersonSpec, PersonStatus] = Kind("board-user", PersonSpec, PersonStatus)


def role_of(person: Person) -> Role | None:
    """The role that the user has by being one; None for an account that has it by a binding."""
    return None if person.spec.is_guest else ROLES[person.spec.role]


class PersonRules(AccountRules[PersonSpec, PersonStatus]):
    kind = PERSON
    family = FAMILY
    namespace = FAMILY
    actions = AccountActions(
        create="boards.user_create",
        update="boards.user_update",
        delete="boards.user_delete",
        reset="boards.user_password",
        rehash="boards.user_password",
    )
    limits = ThrottleLimits(per_address=ATTEMPTS_PER_ADDRESS, failures=FAILURES_LIMIT)
    login_claim = "login"
    """Held for the name and for the e-mail address alike: either logs in, so neither may be another's."""
    login_scope = SCOPE
    wrong_login = "the name or the password is wrong"
    tells_inactive = True
    capacity = PEOPLE_LIMIT

    def scope(self, name: str) -> str:  # noqa: ARG002  # all of them lie in one
        return SCOPE

    def login_names(self, spec: PersonSpec) -> frozenset[str]:
        return frozenset(text.lower() for text in (spec.username, spec.email) if text)

    def checked(self, spec: PersonSpec, password: str | None = None) -> PersonSpec:
        spec = _checked(spec)
        if password is not None:
            self.check_password(password, field="password")
        return spec

    def check_password(self, password: str, *, field: str) -> None:
        if (found := fault(password)) is not None:
            raise InvalidArgument(found.value, field=field)

    def is_active(self, spec: PersonSpec) -> bool:
        return spec.is_active

    def is_administrator(self, spec: PersonSpec) -> bool:
        return spec.role == "admin" and not spec.is_guest

    def principal(self, account: Person) -> str:
        return principal_of(account)

    def profile(self, name: str, spec: PersonSpec, *, created_by: str) -> NewProfile:
        return NewProfile(
            family=FAMILY,
            id=name,
            login=spec.username,
            display_name=f"{spec.first_name} {spec.last_name}".strip(),
            email=spec.email,
            created_by=created_by,
        )

    def missing(self) -> NotFound:
        return NotFound("there is no such user", field="id")

    def taken(self, login: str) -> AlreadyExists:
        return AlreadyExists(f"there is a user {login!r} already", field="username")

    def last_administrator(self) -> FailedPrecondition:
        return FailedPrecondition("the last administrator must stay", hint="make another one first")


PERSON_RULES = PersonRules()


def principal_of(person: Person) -> str:
    return f"user/{person.spec.username}"


class People(Accounts[PersonSpec, PersonStatus]):
    """The users of boards, known by number."""

    def __init__(
        self,
        store: Store,
        master: MasterKey,
        clock: Clock,
        logins: LoginCloser,
        linked: LinkedLogins | None = None,
        bound_role: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        """`bound_role`: the role that an account was given where boards lie, by its name."""
        super().__init__(store, master, clock, PERSON_RULES, logins, linked)
        self._numbers = Numbers(store, "user")
        self._bound_role = bound_role

    def all(self) -> Sequence[Person]:
        return sorted(self._store.list(PERSON, SCOPE), key=lambda one: int(one.name))

    async def create(self, spec: PersonSpec, password: str, *, actor: str) -> Person:
        number = await self._numbers.take()
        counted = Companion(
            change=lambda draft: self._numbers.record(draft, number), touches=[self._numbers.key]
        )
        return await self._create(str(number), spec, PersonStatus(), password, counted, actor=actor)

    async def update(
        self, name: str, changes: Mapping[str, object], *, whole: bool = True, actor: str
    ) -> Person:
        if "role" in changes:  # a role that an administrator gives is the user's own
            changes = {**changes, "is_guest": False}
        return await super().update(name, changes, whole=whole, actor=actor)

    async def _welcome(self, account: Account) -> Person | None:
        role = self._bound_role(account.name)
        if role is None:
            return None
        number = await self._numbers.take()
        counted = Companion(
            change=lambda draft: self._numbers.record(draft, number), touches=[self._numbers.key]
        )
        name = self._free_name(account.spec.login)
        spec = PersonSpec(username=name, role=role, is_guest=True, is_adopted=True)
        return await self._adopt(account, str(number), spec, PersonStatus(), counted)

    def _free_name(self, login: str) -> str:
        """An account's name as this family spells names; one that is another user's gets a number."""
        name = re.sub(r"[^a-z0-9._-]", ".", login)[:NAME_LIMIT]
        if name == login or (self.by_login(name) is None and self._guest(self._store, name) is None):
            return name
        return f"{name[: NAME_LIMIT - 9]}-{hashlib.sha256(login.encode()).hexdigest()[:8]}"

    async def _remove_profile(self, name: str, actor: str) -> None:
        await self.delete(name, whole=False, actor=actor)

    async def delete(self, name: str, *, whole: bool = True, actor: str) -> Person:
        return await self._delete(name, Companion(), whole=whole, actor=actor)

    async def record_login(self, name: str, *, actor: str) -> Person:
        """Write down that the user logged in just now, and the role of one who has it by a binding."""
        is_guest = self.get(name).spec.is_guest
        role = self._bound_role(self.account_of(name).name) if is_guest else None

        def change(draft: Draft) -> Person:
            current = PERSON_RULES.present(draft, name)
            status = PersonStatus(last_login_at_ns=draft.now_ns)
            spec = msgspec.structs.replace(current.spec, role=role) if role is not None else current.spec
            return draft.put(PERSON, SCOPE, name, spec=spec, status=status)

        return await self._write(name, change, actor=actor, action="boards.user_login")


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
