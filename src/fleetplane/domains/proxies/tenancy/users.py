"""Users of proxies: validity, passwords, memberships, and the first administrator.

A user is the profile of an account; `fleet.people.accounts` authenticates and changes both. A failed login
answers the same for a wrong password, an unknown e-mail address and a disabled user.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable

import msgspec

from fleetplane.domains.proxies.kinds.records import (
    MEMBERSHIP,
    USER,
    Membership,
    MembershipSpec,
    User,
    UserSpec,
    user_scope,
)
from fleetplane.domains.proxies.kinds.unique import hold, refuse, register, unregister
from fleetplane.domains.proxies.kinds.values import OrganizationRole
from fleetplane.domains.proxies.rules.validation import name_problems
from fleetplane.domains.proxies.tenancy.members import is_owner
from fleetplane.fleet.people.account_kind import Account
from fleetplane.fleet.people.account_rules import AccountActions, AccountRules, Companion
from fleetplane.fleet.people.accounts import Accounts
from fleetplane.fleet.people.attempts.throttle import ThrottleLimits
from fleetplane.fleet.people.linked_logins import LinkedLogins, LoginCloser
from fleetplane.fleet.people.profiles import NewProfile
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    AlreadyExists,
    Conflict,
    FleetplaneError,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
)
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.passwords import LoginFailures, PasswordFault, fault
from fleetplane.kernel.resources import Nothing
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.web.rest.problems import Code, ConflictBlocker, Problem

_CODES = {PasswordFault.TOO_SHORT: Code.OUT_OF_RANGE, PasswordFault.TOO_LONG: Code.TOO_LONG}


def problems(password: str, *, field: str) -> list[Problem]:
    """Why a password cannot be set."""
    found = fault(password)
    return [] if found is None else [Problem(field=field, message=found.value, code=_CODES[found])]


FAMILY = "proxies"
"""What these logins are called, and the door's name for their tokens and for API tokens."""
EMAIL = "email"
EMAIL_LIMIT = 254
ATTEMPTS_PER_ADDRESS = 10
"""A minute, for all accounts."""
FAILURES_LIMIT = 10
"""Of one account from one address, in a quarter of an hour."""
LOCAL = "fleetplane.local"
ADMIN_EMAIL = f"admin@{LOCAL}"
PASSWORD_BYTES = 18  # 24 characters of base64

_EMAIL = re.compile(r"[^@\s\x00-\x1f]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


def email_problems(email: str) -> list[Problem]:
    if len(email) > EMAIL_LIMIT or not _EMAIL.fullmatch(email):
        return [Problem(field=EMAIL, message="Not an e-mail address")]
    return []


class UserRules(AccountRules[UserSpec, Nothing]):
    kind = USER
    family = FAMILY
    namespace = FAMILY
    actions = AccountActions(
        create="user.create",
        update="user.update",
        delete="user.delete",
        reset="user.password_reset",
        rehash="user.rehash",
        deactivate="user.disable",
        names_closing=True,
    )
    limits = ThrottleLimits(per_address=ATTEMPTS_PER_ADDRESS, failures=FAILURES_LIMIT)
    login_claim = EMAIL
    login_scope = ""
    wrong_login = "the e-mail or the password is wrong"
    tells_inactive = False

    def scope(self, name: str) -> str:
        return user_scope(name)

    def login_names(self, spec: UserSpec) -> frozenset[str]:
        return frozenset({spec.email})

    def checked(self, spec: UserSpec, password: str | None = None) -> UserSpec:
        spec = msgspec.structs.replace(spec, email=spec.email.strip().lower())
        unsafe = problems(password, field="password") if password is not None else []
        refuse([*email_problems(spec.email), *_name(spec), *unsafe])
        return spec

    def check_password(self, password: str, *, field: str) -> None:
        refuse(problems(password, field=field))

    def is_active(self, spec: UserSpec) -> bool:
        return not spec.disabled

    def is_administrator(self, spec: UserSpec) -> bool:
        return spec.is_system_admin

    def principal(self, account: User) -> str:
        return f"user/{account.name}"

    def profile(self, name: str, spec: UserSpec, *, created_by: str) -> NewProfile:
        return NewProfile(
            family=FAMILY,
            id=name,
            login=spec.email,
            display_name=spec.name,
            email=spec.email,
            created_by=created_by,
        )

    def missing(self) -> NotFound:
        return NotFound("user not found")

    def taken(self, login: str) -> AlreadyExists:
        return AlreadyExists(f"{EMAIL} {login!r} is taken", field=EMAIL)

    def last_administrator(self) -> ConflictBlocker:
        return ConflictBlocker(
            "the last system administrator must stay",
            [Problem(field="is_system_admin", message="There is no other", code=Code.IN_USE)],
        )


USER_RULES = UserRules()


class Users(Accounts[UserSpec, Nothing]):
    """The users of proxies, known by id, who log in with an e-mail address."""

    def __init__(
        self,
        store: Store,
        master: MasterKey,
        clock: Clock,
        logins: LoginCloser,
        linked: LinkedLogins | None = None,
        is_welcome: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`is_welcome`: whether an account that is no user yet holds something here, by its name."""
        super().__init__(store, master, clock, USER_RULES, logins, linked)
        self._is_welcome = is_welcome
        self._wrong_passwords = LoginFailures(limit=FAILURES_LIMIT)
        """Of logins that change their user's password: whoever took one over must not guess it."""

    async def create(self, spec: UserSpec, password: str, *, actor: str) -> User:
        identity = new_uuid(self._clock)
        scope = user_scope(identity)
        registered = Companion(change=lambda draft: register(draft, USER, scope, identity))
        return await self._create(identity, spec, None, password, registered, actor=actor)

    async def _welcome(self, account: Account) -> User | None:
        return await self.adopt(account) if self._is_welcome(account.name) else None

    async def invited(self, email: str) -> User | None:
        """The user of an e-mail address; an account that is called so becomes one by being invited."""
        if (found := self.by_login(email)) is not None:
            return found
        account = self._guest(self._store, email.strip().lower())
        if account is None or account.spec.disabled or account.spec.subject:
            return None  # what a provider calls somebody is no address at which they can be reached
        return await self.adopt(account)

    async def adopt(self, account: Account) -> User:
        """Make an account a user, who holds nothing by being one."""
        identity = new_uuid(self._clock)
        scope = user_scope(identity)
        spec = UserSpec(email=self._free_address(account), name=_shown_name(account), is_adopted=True)
        registered = Companion(change=lambda draft: register(draft, USER, scope, identity))
        return await self._adopt(account, identity, spec, None, registered)

    def _free_address(self, account: Account) -> str:
        """What an account is known by here; one that is another user's gets a number."""
        address = _address(account)
        guest = self._guest(self._store, address)
        if self.by_login(address) is None and (guest is None or guest.name == account.name):
            return address
        number = hashlib.sha256(account.name.encode()).hexdigest()[:8]
        return f"{address.partition('@')[0][:55]}-{number}@{LOCAL}"

    def _check_remove_profile(self, name: str) -> None:
        super()._check_remove_profile(name)
        for one in self._store.list(MEMBERSHIP):
            if one.name == name and _is_only_owner(self._store, one):
                _hold_last_owner(one.scope)

    async def _remove_profile(self, name: str, actor: str) -> None:
        await self.delete(name, by=name, whole=False, actor=actor)

    async def delete(self, identity: str, *, by: str, whole: bool = True, actor: str) -> None:
        """Delete a user with every membership; no organisation can prevent it by having added them.

        An organisation whose only owner the user was passes to the administrator `by`, so that it has one.
        The account ends with the user if it is nothing else, and `by` may decide about all of it (`whole`).
        """
        scope = user_scope(identity)
        places = [one.scope for one in self._store.list(MEMBERSHIP) if one.name == identity]

        def change(draft: Draft) -> None:
            for place in places:
                _leave(draft, place, identity, heir=by)
            if any(one.name == identity for one in draft.list(MEMBERSHIP)):
                raise Conflict("the user has just been added to an organization", hint="try again")
            unregister(draft, USER, scope, identity)

        touches = [MEMBERSHIP.key(place, member) for place in places for member in (identity, by)]
        await self._delete(identity, Companion(change=change, touches=touches), whole=whole, actor=actor)

    async def change_password(self, user: User, current: str, new: str, *, session: str, actor: str) -> None:
        """Replace one's own password; all other logins of the user are closed."""
        now = self._clock.now_ns() / 1e9
        pause = self._wrong_passwords.pause_seconds(session, now=now)
        if pause:
            raise ResourceExhausted("too many attempts", retry_after_seconds=pause)
        if await self._passwords.verify_own(self.account_of(user.name).name, current) is None:
            self._wrong_passwords.failed(session, now=now)
            raise Unauthenticated("the current password is wrong")
        USER_RULES.check_password(new, field="new_password")
        await self._replace_password(user.name, new, but=session, actor=actor, action="user.password")

    async def first_administrator(self, email: str, password: str) -> str | None:
        """Make the first user; its password, if it had to be made up, is returned this once."""
        if self._store.list(USER):
            return None
        made_up = "" if password else secrets.token_urlsafe(PASSWORD_BYTES)
        spec = UserSpec(email=email, name="Administrator", is_system_admin=True)
        identity = new_uuid(self._clock)

        def change(draft: Draft) -> None:
            if draft.list(USER):  # another server was faster
                raise _NotTheFirst("there is a user already")
            register(draft, USER, user_scope(identity), identity)

        try:
            await self._create(
                identity, spec, None, password or made_up, Companion(change=change), actor="system"
            )
        except _NotTheFirst:
            return None
        return made_up or None


class _NotTheFirst(FleetplaneError):
    """A first user was to be made where there is one."""


def _address(account: Account) -> str:
    """What an account that becomes a user logs in with here, beside its own name: never another's address."""
    name = account.spec.login
    is_address = not account.spec.subject and not email_problems(name)
    return name if is_address else f"{name.replace('@', '.')[:64]}@{LOCAL}"


def _shown_name(account: Account) -> str:
    name = account.spec.display_name
    return "" if name and name_problems(name) else name


def _name(spec: UserSpec) -> list[Problem]:
    return list(name_problems(spec.name)) if spec.name else []


def _is_only_owner(reader: Draft | Store, member: Membership) -> bool:
    return is_owner(member) and sum(is_owner(one) for one in reader.list(MEMBERSHIP, member.scope)) == 1


def _hold_last_owner(place: str) -> None:
    hold(
        "the last owner of an organization must stay",
        [Problem(field="members", message=place.replace("org/", "organization "), code=Code.IN_USE)],
    )


def _leave(draft: Draft, place: str, user: str, *, heir: str) -> None:
    member = draft.get(MEMBERSHIP, place, user)
    if member is None:
        return
    alone = _is_only_owner(draft, member)
    if alone and heir == user:
        _hold_last_owner(place)
    draft.delete(MEMBERSHIP, place, user)
    if alone:
        draft.put(MEMBERSHIP, place, heir, spec=MembershipSpec(role=OrganizationRole.OWNER))
