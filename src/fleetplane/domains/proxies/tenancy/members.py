"""Who belongs to an organisation, and which programs may act in it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fleetplane.domains.proxies.access import outranks
from fleetplane.domains.proxies.kinds.records import (
    API_TOKEN,
    MEMBERSHIP,
    ORGANIZATION,
    USER,
    ApiToken,
    ApiTokenSpec,
    Membership,
    MembershipSpec,
    organization_scope,
    user_scope,
)
from fleetplane.domains.proxies.kinds.unique import hold, refuse, register, unregister
from fleetplane.domains.proxies.kinds.values import OrganizationRole
from fleetplane.domains.proxies.rules.validation import name_problems
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.kernel.access import Principal
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import AlreadyExists, NotFound, PermissionDenied, Unauthenticated
from fleetplane.kernel.identity import OneTimeTokens
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.web.rest.problems import Code, Problem

TOKEN_PREFIX = "nxmesh_pat_"  # noqa: S105  # its beginning
_NAMESPACE = "proxies/"
EXPIRY_DAYS_LIMIT = 3650
MAKERS_LIMIT = 16
"""Tokens that were made by tokens that were made by tokens: nobody needs more, and a ring would never end."""
NS_PER_DAY = 86_400 * 1_000_000_000


class Members:
    def __init__(self, store: Store, workspaces: Workspaces) -> None:
        self._store = store
        self._workspaces = workspaces

    def get(self, organization: str, user: str) -> Membership:
        found = self._store.get(MEMBERSHIP, organization_scope(organization), user)
        if found is None:
            raise NotFound("member not found")
        return found

    def invitations(self, user: str) -> list[Membership]:
        """What a user was invited to and has not answered."""
        return [one for one in self._store.list(MEMBERSHIP) if one.name == user and not one.spec.accepted]

    async def add(
        self,
        organization: str,
        user: str,
        role: OrganizationRole,
        *,
        by: OrganizationRole,
        consented: bool,
        actor: str,
    ) -> Membership:
        """Make a user a member; one who has not consented is invited, and has no rights before accepting."""
        _may_grant(role, by)
        spec = MembershipSpec(role=role, accepted=consented, invited_by=actor.partition("?")[0])
        scope = organization_scope(organization)

        def change(draft: Draft) -> Membership:
            if draft.get(ORGANIZATION, scope, organization) is None:
                raise NotFound("organization not found")
            if draft.get(MEMBERSHIP, scope, user) is not None:
                raise AlreadyExists("the user is a member already", field="email")
            return draft.put(MEMBERSHIP, scope, user, spec=spec)

        async with self._workspaces.editing(scope):
            touches = [MEMBERSHIP.key(scope, user)]
            done = await self._store.transact(change, actor=actor, action="member.add", touches=touches)
        return done.value

    async def answer(self, organization: str, user: str, *, accept: bool, actor: str) -> None:
        """The invited user's word. An invitation that is declined is gone."""
        scope = organization_scope(organization)

        def change(draft: Draft) -> None:
            current = draft.get(MEMBERSHIP, scope, user)
            if current is None or current.spec.accepted:
                raise NotFound("there is no such invitation")
            if accept:
                spec = msgspec.structs.replace(current.spec, accepted=True)
                draft.put(MEMBERSHIP, scope, user, spec=spec)
            else:
                draft.delete(MEMBERSHIP, scope, user)

        async with self._workspaces.editing(scope):
            await self._store.transact(
                change,
                actor=actor,
                action="member.accept" if accept else "member.decline",
                touches=[MEMBERSHIP.key(scope, user)],
            )

    async def change(
        self, organization: str, user: str, role: OrganizationRole, *, by: OrganizationRole, actor: str
    ) -> Membership:
        _may_grant(role, by)
        scope = organization_scope(organization)

        def change(draft: Draft) -> Membership:
            current = _decided_about(draft, scope, user, by)
            if role is not OrganizationRole.OWNER:
                _keep_an_owner(draft, scope, current)
            spec = msgspec.structs.replace(current.spec, role=role)
            return draft.put(MEMBERSHIP, scope, user, spec=spec)

        async with self._workspaces.editing(scope):
            touches = [MEMBERSHIP.key(scope, user)]
            done = await self._store.transact(change, actor=actor, action="member.change", touches=touches)
        return done.value

    async def remove(self, organization: str, user: str, *, by: OrganizationRole, actor: str) -> None:
        scope = organization_scope(organization)

        def change(draft: Draft) -> None:
            current = _decided_about(draft, scope, user, by)
            _keep_an_owner(draft, scope, current)
            draft.delete(MEMBERSHIP, scope, user)

        async with self._workspaces.editing(scope):
            touches = [MEMBERSHIP.key(scope, user)]
            await self._store.transact(change, actor=actor, action="member.remove", touches=touches)


def _may_grant(role: OrganizationRole, by: OrganizationRole) -> None:
    """Refuse to grant or take a role above the caller's own."""
    if outranks(role, by):
        raise PermissionDenied(f"a {by} of this organization may not decide about a {role}")


def _decided_about(draft: Draft, scope: str, user: str, by: OrganizationRole) -> Membership:
    """A membership that the caller may decide about, as it is by now."""
    found = draft.get(MEMBERSHIP, scope, user)
    if found is None:
        raise NotFound("member not found")
    _may_grant(found.spec.role, by)
    return found


def is_owner(member: Membership) -> bool:
    return member.spec.role is OrganizationRole.OWNER and member.spec.accepted


def _keep_an_owner(draft: Draft, scope: str, leaving: Membership) -> None:
    if not is_owner(leaving):
        return
    if sum(is_owner(one) for one in draft.list(MEMBERSHIP, scope)) < 2:
        hold(
            "the last owner must stay",
            [Problem(field="role", message="There is no other owner", code=Code.IN_USE)],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    record: ApiToken
    token: str


class ApiTokens:
    """Tokens of programs. The kernel keeps and checks them; here is what they are good for."""

    def __init__(self, store: Store, clock: Clock, tokens: OneTimeTokens, workspaces: Workspaces) -> None:
        self._store = store
        self._clock = clock
        self._tokens = tokens
        self._workspaces = workspaces

    async def create(
        self,
        organization: str,
        name: str,
        role: OrganizationRole,
        *,
        days: int | None,
        by: OrganizationRole,
        creator: str,
        actor: str,
    ) -> NewToken:
        problems = list(name_problems(name))
        if days is not None and not 1 <= days <= EXPIRY_DAYS_LIMIT:
            message = f"Must be between 1 and {EXPIRY_DAYS_LIMIT}"
            problems.append(Problem(field="expires_in_days", message=message, code=Code.OUT_OF_RANGE))
        refuse(problems)
        _may_grant(role, by)
        identity, scope = new_uuid(self._clock), organization_scope(organization)
        minted = self._tokens.mint(_NAMESPACE + identity, roles=frozenset(), scope=scope, prefix=TOKEN_PREFIX)

        def change(draft: Draft) -> NewToken:
            if draft.get(ORGANIZATION, scope, organization) is None:
                raise NotFound("organization not found")
            register(draft, API_TOKEN, scope, identity)
            expires = None if days is None else draft.now_ns + days * NS_PER_DAY
            spec = ApiTokenSpec(name=name, role=role, created_by=creator, expires_at_ns=expires)
            self._tokens.put(draft, minted)
            record = draft.put(API_TOKEN, scope, identity, spec=spec)
            return NewToken(record=record, token=minted.token)

        async with self._workspaces.editing(scope):
            touches = [API_TOKEN.key(scope, identity)]
            done = await self._store.transact(change, actor=actor, action="api_token.create", touches=touches)
        self._tokens.admit(minted)
        return done.value

    async def revoke(self, scope: str, identity: str, *, actor: str) -> None:
        await self._tokens.revoke(_NAMESPACE + identity, actor=actor)

        def change(draft: Draft) -> None:
            draft.delete(API_TOKEN, scope, identity)
            unregister(draft, API_TOKEN, scope, identity)

        touches = [API_TOKEN.key(scope, identity)]
        await self._store.transact(change, actor=actor, action="api_token.revoke", touches=touches)

    def authenticate(self, token: str) -> tuple[ApiToken, OrganizationRole]:
        """The record of a token that is good now, and the role that it has now.

        A token never outlives its maker's access, nor may it do more than its maker may by now.
        """
        principal: Principal = self._tokens.authenticate(token)
        identity = principal.name.removeprefix(f"token/{_NAMESPACE}")
        record = self._store.get(API_TOKEN, principal.scope, identity)
        if record is None:
            raise Unauthenticated("the token was revoked")
        return record, self._role_now(record, depth=0)

    def _role_now(self, record: ApiToken, *, depth: int) -> OrganizationRole:
        expires = record.spec.expires_at_ns
        if expires is not None and expires <= self._clock.now_ns():
            raise Unauthenticated("the token has expired")
        allowed = self._makers_role(record, depth=depth)
        if allowed is None:
            raise Unauthenticated(
                "the token has ended with its maker's access", hint="ask an administrator for a new one"
            )
        return allowed if outranks(record.spec.role, allowed) else record.spec.role

    def _makers_role(self, record: ApiToken, *, depth: int) -> OrganizationRole | None:
        """The present role of a token's creator; None if they have no access any more."""
        kind, _, identity = record.spec.created_by.partition("/")
        if kind == "api-token":
            maker = self._store.get(API_TOKEN, record.scope, identity)
            return self._role_now(maker, depth=depth + 1) if maker and depth < MAKERS_LIMIT else None
        user = self._store.get(USER, user_scope(identity), identity)
        if user is None or user.spec.disabled:
            return None
        member = self._store.get(MEMBERSHIP, record.scope, identity)
        return member.spec.role if member is not None and member.spec.accepted else None
