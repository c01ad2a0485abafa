"""Who belongs to an organisation, and which programs may act in it."""

from __future__ import annotations

from dataclasses import dataclass

from fleetplane.domains.proxies.access import outranks
from fleetplane.domains.proxies.kinds import (
    API_TOKEN,
    MEMBERSHIP,
    ORGANIZATION,
    ApiToken,
    ApiTokenSpec,
    Membership,
    MembershipSpec,
    organization_scope,
)
from fleetplane.domains.proxies.names import hold, new_id, refuse, register, unregister
from fleetplane.domains.proxies.rules import name_problems
from fleetplane.domains.proxies.values import OrganizationRole
from fleetplane.domains.proxies.workspaces import Workspaces
from fleetplane.kernel.access import Principal
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import AlreadyExists, NotFound, PermissionDenied, Unauthenticated
from fleetplane.kernel.identity import Tokens
from fleetplane.kernel.store import Draft, Store
from fleetplane.web.problems import Code, Problem

TOKEN_PREFIX = "nxmesh_pat_"  # noqa: S105  # its beginning
_NAMESPACE = "proxies/"
EXPIRY_DAYS_LIMIT = 3650
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

    async def add(
        self, organization: str, user: str, role: OrganizationRole, *, by: OrganizationRole, actor: str
    ) -> Membership:
        _may_grant(role, by)
        return await self._put(organization, user, role, new=True, actor=actor)

    async def change(
        self, organization: str, user: str, role: OrganizationRole, *, by: OrganizationRole, actor: str
    ) -> Membership:
        _may_grant(role, by)
        _may_grant(self.get(organization, user).spec.role, by)
        return await self._put(organization, user, role, new=False, actor=actor)

    async def _put(
        self, organization: str, user: str, role: OrganizationRole, *, new: bool, actor: str
    ) -> Membership:
        scope = organization_scope(organization)

        def change(draft: Draft) -> Membership:
            if draft.get(ORGANIZATION, scope, organization) is None:
                raise NotFound("organization not found")
            current = draft.get(MEMBERSHIP, scope, user)
            if new and current is not None:
                raise AlreadyExists("the user is a member already", field="email")
            if not new and current is None:
                raise NotFound("member not found")
            if current is not None and role is not OrganizationRole.OWNER:
                _keep_an_owner(draft, scope, current)
            return draft.put(MEMBERSHIP, scope, user, spec=MembershipSpec(role=role))

        async with self._workspaces.editing(scope):
            action = "member.add" if new else "member.change"
            touches = [MEMBERSHIP.key(scope, user)]
            done = await self._store.transact(change, actor=actor, action=action, touches=touches)
        return done.value

    async def remove(self, organization: str, user: str, *, by: OrganizationRole, actor: str) -> None:
        _may_grant(self.get(organization, user).spec.role, by)
        scope = organization_scope(organization)

        def change(draft: Draft) -> None:
            current = draft.get(MEMBERSHIP, scope, user)
            if current is None:
                raise NotFound("member not found")
            _keep_an_owner(draft, scope, current)
            draft.delete(MEMBERSHIP, scope, user)

        async with self._workspaces.editing(scope):
            touches = [MEMBERSHIP.key(scope, user)]
            await self._store.transact(change, actor=actor, action="member.remove", touches=touches)


def _may_grant(role: OrganizationRole, by: OrganizationRole) -> None:
    """Nobody makes, or unmakes, someone above themselves."""
    if outranks(role, by):
        raise PermissionDenied(f"a {by} of this organization may not decide about a {role}")


def _keep_an_owner(draft: Draft, scope: str, leaving: Membership) -> None:
    if leaving.spec.role is not OrganizationRole.OWNER:
        return
    owners = [one for one in draft.list(MEMBERSHIP, scope) if one.spec.role is OrganizationRole.OWNER]
    if len(owners) < 2:
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

    def __init__(self, store: Store, clock: Clock, tokens: Tokens, workspaces: Workspaces) -> None:
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
        identity, scope = new_id(self._clock), organization_scope(organization)
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

    def authenticate(self, token: str) -> ApiToken:
        """The record of a token that is good now."""
        principal: Principal = self._tokens.authenticate(token)
        identity = principal.name.removeprefix(f"token/{_NAMESPACE}")
        record = self._store.get(API_TOKEN, principal.scope, identity)
        if record is None:
            raise Unauthenticated("the token was revoked")
        expires = record.spec.expires_at_ns
        if expires is not None and expires <= self._clock.now_ns():
            raise Unauthenticated("the token has expired")
        return record
