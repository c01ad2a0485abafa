"""Accounts of users who log in with a name and a password, and the profiles that domains keep of them.

`Accounts` authenticates users and changes them; a domain brings `AccountRules`: the kind its users are
stored as, what a valid spec is, and what else a transaction writes. What a domain stores is a profile of
an account (`account_kind`), which has the password: the same one at every family's login. Three promises
hold everywhere: a failed login answers the same, after the same time, for a wrong password and an unknown
name; a user who is deactivated, deleted or given another password loses every open login, and a login that is
being checked at that moment is refused; one active administrator always remains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

import msgspec

from fleetplane.fleet.people import profiles
from fleetplane.fleet.people.account_kind import (
    ACCOUNT,
    FAMILY,
    SCOPE,
    Account,
    AccountReader,
    account_behind,
    account_named,
    subject_of,
)
from fleetplane.fleet.people.account_rules import AccountRules, Companion, S, T
from fleetplane.fleet.people.attempts.throttle import LoginAttempt, LoginThrottle
from fleetplane.fleet.people.linked_logins import LinkedFamily, LinkedLogins, LoginCloser
from fleetplane.kernel.access import who
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.bindings import Bindings
from fleetplane.kernel.identity.passwords import Passwords
from fleetplane.kernel.resources import Key, Resource
from fleetplane.kernel.store import ABSENT, Draft, Store
from fleetplane.kernel.unbroken import run_to_completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Authenticated(Generic[S, T]):
    """A user whose password was right."""

    account: Resource[S, T]
    still_good: Callable[[Draft], bool]
    """Checked again in the transaction that opens the login: hashing took a while."""


class Accounts(Generic[S, T]):
    def __init__(
        self,
        store: Store,
        master: MasterKey,
        clock: Clock,
        rules: AccountRules[S, T],
        logins: LoginCloser,
        linked: LinkedLogins | None = None,
    ) -> None:
        """`linked` is shared by all families of one server; without it no other family's logins are known."""
        self._store = store
        self._clock = clock
        self._rules = rules
        self._logins = logins
        self._linked = linked or LinkedLogins()
        family = LinkedFamily(
            logins=logins, check_remove=self._check_remove_profile, remove=self._remove_profile
        )
        self._linked.add(rules.family, family)
        self._passwords = Passwords(store, master, namespace=FAMILY, queue=self._linked.hashing)
        self._throttle = LoginThrottle(store, master, clock, namespace=rules.namespace, limits=rules.limits)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._store.count(self._rules.kind)}>"

    # Finding.

    def find(self, name: str) -> Resource[S, T] | None:
        return self._rules.find(self._store, name)

    def get(self, name: str) -> Resource[S, T]:
        return self._rules.present(self._store, name)

    def by_login(self, text: str) -> Resource[S, T] | None:
        rules, login = self._rules, text.strip().lower()
        owner = (
            self._store.claimed_by(rules.kind, rules.login_scope, rules.login_claim, login) if login else None
        )
        if owner is None:
            guest = self._guest(self._store, login)
            owner = guest.spec.profiles.get(rules.family) if guest is not None else None
        return self.find(owner) if owner is not None else None

    def account_of(self, name: str) -> Account:
        """The account behind a user."""
        found = self._rules.account(self._store, name)
        if found is None:
            raise self._rules.missing()
        return found

    def _guest(self, reader: AccountReader, login: str) -> Account | None:
        """The account of this name, if another family or the installation itself made it.

        One that this family made is found by the names that its profile claims, which can change.
        """
        found = account_named(reader, login) if self._rules.family != FAMILY else None
        return found if found is not None and found.spec.home != self._rules.family else None

    # Authenticating.

    async def authenticate(
        self, login: str, password: str, *, address: str, actor: str = ""
    ) -> Authenticated[S, T]:
        """The user of this login name and password; raises one `Unauthenticated` for all causes."""
        rules, login = self._rules, login.strip().lower()
        user = self.by_login(login)
        account = (
            rules.account(self._store, user.name) if user is not None else self._guest(self._store, login)
        )
        attempt = await self._throttle.begin(login, address, user=user.name if user is not None else None)
        person = account.name if account is not None else None
        if person is not None:
            self._linked.begin(person, attempt, now=self._clock.now_ns() / 1e9)
        is_active = user is None or rules.active(self._store, user.name) is not None
        may_check = account is not None and (rules.tells_inactive or is_active)
        stored = await self._checked(person, attempt, password, may_check=may_check)
        if stored is None or account is None:
            self._throttle.failed(attempt, login)
            raise Unauthenticated(rules.wrong_login)
        user = user or await self._welcome(account)
        if user is None:
            self._throttle.failed(attempt, login)
            raise Unauthenticated(rules.wrong_login)
        await self._throttle.succeeded(attempt, user.name)
        self._linked.succeeded(account.name, attempt)
        if not is_active:
            raise PermissionDenied("this account is not active", details={"cause": "inactive"})

        def still_good(draft: Draft) -> bool:
            current, behind = rules.active(draft, user.name), rules.account(draft, user.name)
            if current is None or behind is None:
                return False
            same = current.uid == user.uid and behind.uid == account.uid
            return same and behind.spec.password_version == account.spec.password_version

        if self._passwords.outdated(stored):
            await self._rehash(account.name, password, still_good, actor=actor or rules.principal(user))
        return Authenticated(account=user, still_good=still_good)

    async def _checked(
        self, person: str | None, attempt: LoginAttempt, password: str, *, may_check: bool
    ) -> str | None:
        """What is stored of the password, if it is this one; checked when it is the attempt's turn."""
        admitted = False
        try:
            async with self._linked.hashing.place("" if attempt.known else attempt.network):
                admitted = True
                await self._throttle.count(attempt)
                return await self._passwords.verify(person if may_check else None, password)
        finally:
            if not admitted:
                self._throttle.withdrawn(attempt)
                if person is not None:
                    self._linked.withdrawn(person, attempt)

    async def _welcome(self, account: Account) -> Resource[S, T] | None:  # noqa: ARG002  # see the domains'
        """A profile for an account that has none here and comes by its own name; None if it may not come."""
        return None

    async def _rehash(
        self, name: str, password: str, still_good: Callable[[Draft], bool], *, actor: str
    ) -> None:
        hashed = await self._passwords.hash(password)

        def change(draft: Draft) -> None:
            if still_good(draft):  # a password that was replaced meanwhile stays replaced
                self._passwords.put(draft, name, hashed)

        await self._store.transact(change, actor=actor, action=self._rules.actions.rehash, touches=())

    # Changing.

    async def _create(
        self, name: str, spec: S, status: T | None, password: str, companion: Companion, *, actor: str
    ) -> Resource[S, T]:
        rules = self._rules
        spec = rules.checked(spec, password)
        self._check_room(self._store)  # before a hash is made for nothing
        for login in sorted(rules.login_names(spec)):
            if self.by_login(login) is not None or self._guest(self._store, login) is not None:
                raise rules.taken(login)
        hashed = await self._passwords.hash(password)
        scope, made = rules.scope(name), rules.profile(name, spec, created_by=who(actor).partition("?")[0])

        def change(draft: Draft) -> Resource[S, T]:
            self._check_room(draft)
            companion.change(draft)
            self._claim(draft, rules.login_names(spec), name)
            person = profiles.make_account(draft, made) if made is not None else name
            self._passwords.put(draft, person, hashed)
            return draft.put(rules.kind, scope, name, spec=spec, status=status, expect=ABSENT)

        accounts = made.keys if made is not None else ()
        touches = [rules.kind.key(scope, name), *companion.touches, *accounts]
        done = await self._store.transact(change, actor=actor, action=rules.actions.create, touches=touches)
        return done.value

    def _check_room(self, reader: Store | Draft) -> None:
        capacity = self._rules.capacity
        if capacity is not None and reader.count(self._rules.kind) >= capacity:
            raise ResourceExhausted(f"there are {capacity} users, the most there may be")

    async def _adopt(
        self, account: Account, name: str, spec: S, status: T | None, companion: Companion
    ) -> Resource[S, T]:
        """Give an account a profile here; one that another login made meanwhile is taken."""
        rules = self._rules
        scope, key = rules.scope(name), ACCOUNT.key(SCOPE, account.name)

        def change(draft: Draft) -> Resource[S, T] | None:
            current = draft.get(ACCOUNT, SCOPE, account.name)
            if current is None or current.uid != account.uid or current.spec.disabled:
                raise Unauthenticated(rules.wrong_login)
            if rules.family in current.spec.profiles:
                return None
            profiles.link(draft, current, rules.family, name)
            self._claim(draft, rules.login_names(spec), name)
            companion.change(draft)
            return draft.put(rules.kind, scope, name, spec=spec, status=status, expect=ABSENT)

        touches = [rules.kind.key(scope, name), key, *companion.touches]
        done = await self._store.transact(
            change, actor=subject_of(account.name), action=rules.actions.create, touches=touches
        )
        return done.value or self.get(self._profile(account.name))

    def _profile(self, account: str) -> str:
        found = self._store.get(ACCOUNT, SCOPE, account)
        return found.spec.profiles[self._rules.family] if found is not None else ""

    async def change(
        self,
        name: str,
        changes: Mapping[str, object],
        *,
        password: str | None = None,
        whole: bool = True,
        actor: str,
    ) -> Resource[S, T]:
        """Change fields and password of a user; a fault in either is found before anything is written."""
        if password is not None:
            self._rules.check_password(password, field="password")
        return await run_to_completion(self._change(name, changes, password, whole=whole, actor=actor))

    async def _change(
        self, name: str, changes: Mapping[str, object], password: str | None, *, whole: bool, actor: str
    ) -> Resource[S, T]:
        user = await self.update(name, changes, whole=whole, actor=actor) if changes else self.get(name)
        if password is not None:
            await self.set_password(name, password, actor=actor)
        return user

    async def update(
        self, name: str, changes: Mapping[str, object], *, whole: bool = True, actor: str
    ) -> Resource[S, T]:
        """Change fields of the spec. Deactivating a user closes every login of theirs.

        `whole`: whether the actor may decide about everything that the person holds. Then an account whose
        only profile this is is deactivated with it; otherwise it is this family's door alone that closes.
        """
        return await run_to_completion(self._update(name, changes, whole=whole, actor=actor))

    async def _update(
        self, name: str, changes: Mapping[str, object], *, whole: bool, actor: str
    ) -> Resource[S, T]:
        rules = self._rules
        account = rules.account(self._store, name)

        def change(draft: Draft) -> Resource[S, T]:
            current = rules.present(draft, name)
            spec = rules.checked(msgspec.structs.replace(current.spec, **changes))
            if self._is_active_administrator(current.spec) and not self._is_active_administrator(spec):
                self._keep_an_administrator(draft, name)
            before, after = rules.login_names(current.spec), rules.login_names(spec)
            self._claim(draft, after - before, name)
            self._release(draft, before - after, name)
            active = rules.is_active(spec)
            if rules.family != FAMILY and whole and active != rules.is_active(current.spec):
                behind = account_behind(draft, rules.family, name)
                if behind is not None:
                    profiles.follow(draft, behind, rules.family, active=active)
            return draft.put(rules.kind, current.scope, name, spec=spec, status=current.status)

        touches = [ACCOUNT.key(SCOPE, account.name)] if account is not None else []
        updated = await self._write(name, change, actor=actor, action=rules.actions.update, touches=touches)
        if not rules.is_active(updated.spec):
            await self._close_logins(name, actor=actor, action=rules.actions.deactivate)
            behind = rules.account(self._store, name)
            if behind is not None and behind.spec.disabled:
                await self._linked.close(behind, besides=rules.family, actor=actor)
        return updated

    async def _delete(
        self, name: str, companion: Companion, *, whole: bool = True, actor: str
    ) -> Resource[S, T]:
        return await run_to_completion(self._deleted(name, companion, whole=whole, actor=actor))

    async def _deleted(self, name: str, companion: Companion, *, whole: bool, actor: str) -> Resource[S, T]:
        rules = self._rules
        account = rules.account(self._store, name)
        subject = subject_of(account.name) if account is not None else ""
        bound = Bindings.keys_of(self._store, subject) if account is not None else []

        def change(draft: Draft) -> Resource[S, T]:
            current = rules.present(draft, name)
            companion.change(draft)
            if self._is_active_administrator(current.spec):
                self._keep_an_administrator(draft, name)
            self._release(draft, rules.login_names(current.spec), name)
            behind = account_behind(draft, rules.family, name)
            ended = name if rules.family == FAMILY else ""
            if behind is not None and profiles.leave(draft, behind, rules.family, whole=whole):
                ended = behind.name
            if ended:
                self._passwords.remove(draft, ended)
                Bindings.end(draft, subject_of(ended), bound)  # another of its name must not inherit them
            return draft.delete(rules.kind, current.scope, name)

        touches = [*companion.touches, *bound]
        if account is not None and rules.family != FAMILY:
            touches.append(ACCOUNT.key(SCOPE, account.name))
        gone = await self._write(name, change, actor=actor, action=rules.actions.delete, touches=touches)
        await self._throttle.forget(name)
        await self._close_logins(name, actor=actor, action=rules.actions.delete)
        if (
            account is not None
            and rules.family != FAMILY
            and account_named(self._store, account.name) is None
        ):
            await self._linked.close(account, besides=rules.family, actor=actor)
        return gone

    def _check_remove_profile(self, name: str) -> None:
        """Raise if a user must stay although the account is to be deleted."""
        user = self.find(name)
        if user is not None and self._is_active_administrator(user.spec):
            self._keep_an_administrator(self._store, name)

    async def _remove_profile(self, name: str, actor: str) -> None:
        """Delete a user because the account is being deleted."""
        raise NotImplementedError(f"{name} has no profile to delete by {actor}")

    async def set_password(self, name: str, password: str, *, actor: str) -> Resource[S, T]:
        """Replace a user's password, as an administrator. Every login of the person is closed."""
        rules = self._rules
        rules.check_password(password, field="password")
        user = self.get(name)
        await self._replace_password(name, password, actor=actor, action=rules.actions.reset)
        return user

    async def _close_logins(self, name: str, *, but: str = "", actor: str, action: str) -> None:
        recorded = action if self._rules.actions.names_closing else None
        await self._logins.close(name, but=but, actor=actor, action=recorded)

    async def _replace_password(
        self, name: str, password: str, *, but: str = "", actor: str, action: str
    ) -> None:
        """From here on no login with the former password succeeds, including those being checked now.

        Every login of the person is closed, `but` one: those of other families too, which the same password
        opened.
        """
        await run_to_completion(self._password_replaced(name, password, but=but, actor=actor, action=action))

    async def _password_replaced(
        self, name: str, password: str, *, but: str, actor: str, action: str
    ) -> None:
        account = self.account_of(name)
        hashed = await self._passwords.hash(password)

        def change(draft: Draft) -> None:
            current = self._rules.account(draft, name)
            if current is None or current.name != account.name:
                raise self._rules.missing()
            version = current.spec.password_version + 1
            spec = msgspec.structs.replace(current.spec, password_version=version)
            draft.put(ACCOUNT, SCOPE, account.name, spec=spec)
            self._passwords.put(draft, account.name, hashed)

        key = ACCOUNT.key(SCOPE, account.name)
        await self._store.transact(change, actor=actor, action=action, touches=[key])
        self._linked.pardon(account.name)
        await self._throttle.pardon(name)
        await self._linked.close(account, besides=self._rules.family, actor=actor)
        await self._close_logins(name, but=but, actor=actor, action=action)

    async def _write(
        self,
        name: str,
        change: Callable[[Draft], Resource[S, T]],
        *,
        actor: str,
        action: str,
        touches: Sequence[Key] = (),
    ) -> Resource[S, T]:
        key = self._rules.kind.key(self._rules.scope(name), name)
        done = await self._store.transact(change, actor=actor, action=action, touches=[key, *touches])
        return done.value

    def _claim(self, draft: Draft, logins: frozenset[str], name: str) -> None:
        rules = self._rules
        for login in sorted(logins):
            guest = self._guest(draft, login)
            if guest is not None and guest.spec.profiles.get(rules.family) != name:
                raise rules.taken(login)
            try:
                draft.claim(rules.kind, rules.login_scope, rules.login_claim, login, name)
            except AlreadyExists as error:
                raise rules.taken(login) from error

    def _release(self, draft: Draft, logins: frozenset[str], name: str) -> None:
        rules = self._rules
        for login in sorted(logins):
            draft.release(rules.kind, rules.login_scope, rules.login_claim, login, name)

    def _is_active_administrator(self, spec: S) -> bool:
        return self._rules.is_active(spec) and self._rules.is_administrator(spec)

    def _keep_an_administrator(self, reader: Draft | Store, leaving: str) -> None:
        others = (
            one
            for one in reader.list(self._rules.kind)
            if one.name != leaving and self._is_active_administrator(one.spec)
        )
        if next(others, None) is None:
            raise self._rules.last_administrator()
