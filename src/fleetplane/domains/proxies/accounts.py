"""Users: logging in, their passwords, and the first of them.

Guessing is slowed in three ways: attempts per address, attempts per e-mail, and a pause for an
account after too many failures. What is told about a failed login is the same for a wrong
password, an unknown e-mail and a disabled user, and takes the same time.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec
import structlog

from fleetplane.domains.proxies.kinds import MEMBERSHIP, USER, User, UserSpec, user_scope
from fleetplane.domains.proxies.names import (
    claim_unique,
    hold,
    move_unique,
    new_id,
    refuse,
    register,
    unregister,
)
from fleetplane.domains.proxies.passwords import problems as password_problems
from fleetplane.domains.proxies.rules import name_problems
from fleetplane.domains.proxies.sessions import Sessions, TokenPair
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound, ResourceExhausted, Unauthenticated
from fleetplane.kernel.identity.passwords import Failures, Passwords
from fleetplane.kernel.store import Draft, Store
from fleetplane.web.problems import Code, Problem
from fleetplane.web.rate import RateLimit

log = structlog.get_logger(__name__)

EMAIL = "email"
EMAIL_LIMIT = 254
ATTEMPTS_PER_ADDRESS = 10
ATTEMPTS_PER_EMAIL = 5
"""A minute."""
FAILURES_LIMIT = 10
ADMIN_EMAIL = "admin@fleetplane.local"
PASSWORD_BYTES = 18  # 24 characters of base64

_EMAIL = re.compile(r"[^@\s\x00-\x1f]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


def email_problems(email: str) -> list[Problem]:
    if len(email) > EMAIL_LIMIT or not _EMAIL.fullmatch(email):
        return [Problem(field=EMAIL, message="Not an e-mail address")]
    return []


class Accounts:
    def __init__(self, store: Store, clock: Clock, passwords: Passwords, sessions: Sessions) -> None:
        self._store = store
        self._clock = clock
        self._passwords = passwords
        self._sessions = sessions
        self._by_address = RateLimit(ATTEMPTS_PER_ADDRESS)
        self._by_email = RateLimit(ATTEMPTS_PER_EMAIL)
        self._failures = Failures(limit=FAILURES_LIMIT)
        self._replaced: dict[str, int] = {}
        """How often a user's password was replaced since the start."""

    # Logging in.

    async def login(self, email: str, password: str, *, address: str, actor: str) -> TokenPair:
        account = email.strip().lower()
        self._slow_down(account, address)
        user = self.by_email(account)
        known = user is not None and not user.spec.disabled
        replaced = self._replaced.get(user.name, 0) if user is not None else 0
        stored = await self._passwords.verify(user.name if known and user is not None else None, password)
        if stored is None or user is None:
            self._failed(account, address)
            raise Unauthenticated("the e-mail or the password is wrong")
        self._failures.succeeded(account)
        if self._passwords.outdated(stored):
            await self._set_password(user.name, password, actor=actor, action="user.rehash")

        def still_good(draft: Draft) -> bool:
            """Checking took a while, in which everything may have been taken back."""
            current = draft.get(USER, user_scope(user.name), user.name)
            return (
                current is not None
                and not current.spec.disabled
                and self._replaced.get(user.name, 0) == replaced
            )

        return await self._sessions.open(user, actor=actor or f"user/{user.name}", still_good=still_good)

    def _failed(self, account: str, address: str) -> None:
        self._failures.failed(account, now=self._now())
        if pause := self._failures.pause_seconds(account, now=self._now()):
            log.warning("proxies.account_locked", account=account, address=address, seconds=round(pause))

    def _slow_down(self, account: str, address: str) -> None:
        now = self._now()
        pause = self._failures.pause_seconds(account, now=now)
        allowances = (self._by_address.take(address, now=now), self._by_email.take(account, now=now))
        for allowance in allowances:
            if not allowance.allowed:
                pause = max(pause, allowance.reset_seconds)
        if pause:
            raise ResourceExhausted("too many attempts to log in", retry_after_seconds=pause)

    def _now(self) -> float:
        return self._clock.now_ns() / 1e9

    # Users.

    def by_email(self, email: str) -> User | None:
        identity = self._store.claimed_by(USER, "", EMAIL, email.strip().lower()) if email.strip() else None
        return self.find(identity) if identity is not None else None

    def find(self, identity: str) -> User | None:
        return self._store.get(USER, user_scope(identity), identity)

    def get(self, identity: str) -> User:
        found = self.find(identity)
        if found is None:
            raise NotFound("user not found")
        return found

    async def create(self, spec: UserSpec, password: str, *, actor: str) -> User:
        spec = msgspec.structs.replace(spec, email=spec.email.strip().lower())
        refuse([*email_problems(spec.email), *_name(spec), *password_problems(password, field="password")])
        hashed = await self._passwords.hash(password)
        identity = new_id(self._clock)
        scope = user_scope(identity)

        def change(draft: Draft) -> User:
            claim_unique(draft, USER, "", EMAIL, spec.email, identity)
            register(draft, USER, scope, identity)
            self._passwords.put(draft, identity, hashed)
            return draft.put(USER, scope, identity, spec=spec)

        touches = [USER.key(scope, identity)]
        done = await self._store.transact(change, actor=actor, action="user.create", touches=touches)
        return done.value

    async def update(self, identity: str, given: dict[str, Any], *, actor: str) -> User:
        """Disabling a user ends its sessions."""
        scope = user_scope(identity)
        if "email" in given:
            given["email"] = given["email"].strip().lower()

        def change(draft: Draft) -> User:
            current = draft.get(USER, scope, identity)
            if current is None:
                raise NotFound("user not found")
            spec = msgspec.structs.replace(current.spec, **given)
            refuse([*email_problems(spec.email), *_name(spec)])
            if current.spec.is_system_admin and (spec.disabled or not spec.is_system_admin):
                _keep_an_admin(draft, identity)
            move_unique(draft, USER, "", EMAIL, current.spec.email, spec.email, identity)
            return draft.put(USER, scope, identity, spec=spec)

        touches = [USER.key(scope, identity)]
        done = await self._store.transact(change, actor=actor, action="user.update", touches=touches)
        if done.value.spec.disabled:
            await self._sessions.close_all(identity, actor=actor, action="user.disable")
        return done.value

    async def delete(self, identity: str, *, actor: str) -> None:
        scope = user_scope(identity)

        def change(draft: Draft) -> None:
            current = draft.get(USER, scope, identity)
            if current is None:
                raise NotFound("user not found")
            held = [one for one in draft.list(MEMBERSHIP) if one.name == identity]
            hold(
                "the user belongs to organizations",
                (
                    Problem(
                        field="members",
                        message=f"organization {one.scope.removeprefix('org/')}",
                        code=Code.IN_USE,
                    )
                    for one in held
                ),
            )
            if current.spec.is_system_admin:
                _keep_an_admin(draft, identity)
            draft.delete(USER, scope, identity)
            draft.release(USER, "", EMAIL, current.spec.email, identity)
            unregister(draft, USER, scope, identity)
            self._passwords.remove(draft, identity)

        touches = [USER.key(scope, identity)]
        await self._store.transact(change, actor=actor, action="user.delete", touches=touches)
        self._replaced.pop(identity, None)
        await self._sessions.close_all(identity, actor=actor, action="user.delete")

    # Passwords.

    async def change_password(self, user: User, current: str, new: str, *, session: str, actor: str) -> None:
        """All other sessions of the user end."""
        account = user.spec.email
        pause = self._failures.pause_seconds(account, now=self._now())
        if pause:
            raise ResourceExhausted("too many attempts", retry_after_seconds=pause)
        if await self._passwords.verify(user.name, current) is None:
            self._failures.failed(account, now=self._now())
            raise Unauthenticated("the current password is wrong")
        refuse(password_problems(new, field="new_password"))
        await self._replace_password(user.name, new, actor=actor, action="user.password")
        await self._sessions.close_all(user.name, actor=actor, action="user.password", but=session)

    async def reset_password(self, identity: str, new: str, *, actor: str) -> None:
        """By an administrator: every session of the user ends."""
        refuse(password_problems(new, field="password"))
        await self._replace_password(self.get(identity).name, new, actor=actor, action="user.password_reset")
        await self._sessions.close_all(identity, actor=actor, action="user.password_reset")

    async def _replace_password(self, user: str, password: str, *, actor: str, action: str) -> None:
        """From here on nobody gets in with the one before, also not who is being let in just now."""
        self._replaced[user] = self._replaced.get(user, 0) + 1
        await self._set_password(user, password, actor=actor, action=action)

    async def _set_password(self, user: str, password: str, *, actor: str, action: str) -> None:
        hashed = await self._passwords.hash(password)
        await self._store.transact(
            lambda draft: self._passwords.put(draft, user, hashed), actor=actor, action=action, touches=()
        )

    # The first one.

    async def first_administrator(self, email: str, password: str) -> str | None:
        """Make the first user; its password, if it had to be made up, is returned this once."""
        if self._store.list(USER):
            return None
        made_up = "" if password else secrets.token_urlsafe(PASSWORD_BYTES)
        spec = UserSpec(email=email, name="Administrator", is_system_admin=True)
        await self.create(spec, password or made_up, actor="system")
        return made_up or None


def _name(spec: UserSpec) -> list[Problem]:
    return list(name_problems(spec.name)) if spec.name else []


def _keep_an_admin(draft: Draft, leaving: str) -> None:
    others = (
        user
        for user in draft.list(USER)
        if user.spec.is_system_admin and not user.spec.disabled and user.name != leaving
    )
    if next(others, None) is None:
        hold(
            "the last system administrator must stay",
            [Problem(field="is_system_admin", message="There is no other", code=Code.IN_USE)],
        )
