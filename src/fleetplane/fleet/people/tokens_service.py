"""`fleetplane.admin.v1.OperatorsAdmin`: tokens for those who act on the server from elsewhere.

Reaching the socket is the credential. Knows which roles exist, so that a misspelt one is refused
when the token is made and not when its holder is turned away at night.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Protocol

from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb
from fleetplane.kernel.access import EVERYWHERE, Role
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.identity.bindings import Bindings
from fleetplane.kernel.identity.operators import SESSION_LIMIT_SECONDS, Operators
from fleetplane.kernel.identity.revocation_lists import RevocationLists
from fleetplane.kernel.identity.tokens import TokenRecord
from fleetplane.kernel.unbroken import run_to_completion
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import CallContext

SESSION_SECONDS = 600.0
TOKEN_LIFE_LIMIT_SECONDS = 10 * 365 * 86_400.0
OWNER = "local"
"""The principal name of the socket's owner."""
TENANT = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_PREFIX = "tenant/"


class LinkMaker(Protocol):
    """Makes the code of a link that opens one console session with a token."""

    async def __call__(self, token: str, *, actor: str) -> str: ...


class OperatorsService:
    def __init__(
        self,
        operators: Operators,
        *,
        roles: Collection[Role],
        lists: RevocationLists | None = None,
        bindings: Bindings | None = None,
        link: LinkMaker | None = None,
    ) -> None:
        self._operators = operators
        self._link = link
        self._bindings = bindings
        self._lists = lists
        self._roles = frozenset(roles)
        self.web_addresses: Sequence[str] = ()

    async def CreateToken(
        self, request: pb.CreateTokenRequest, context: CallContext
    ) -> pb.CreateTokenResponse:
        if not 0 <= request.life_seconds <= TOKEN_LIFE_LIMIT_SECONDS:
            raise InvalidArgument(
                f"a token lives up to {TOKEN_LIFE_LIMIT_SECONDS:g} seconds", field="life_seconds"
            )
        token = await self._operators.tokens.create(
            request.name,
            roles=self._known(request.roles),
            scope=_scope(request.tenant),
            actor=context.principal.name,
            life_seconds=request.life_seconds or None,
        )
        return pb.CreateTokenResponse(token=token)

    async def ListTokens(
        self, _request: pb.ListTokensRequest, _context: CallContext
    ) -> pb.ListTokensResponse:
        return pb.ListTokensResponse(
            tokens=[_told(record) for record in self._operators.tokens.records() if self._is_ours(record)]
        )

    async def RevokeToken(
        self, request: pb.RevokeTokenRequest, context: CallContext
    ) -> pb.RevokeTokenResponse:
        known = any(
            record.name == request.name and self._is_ours(record)
            for record in self._operators.tokens.records()
        )
        if not known or not await run_to_completion(
            self._revoked(request.name, actor=context.principal.name)
        ):
            raise NotFound(f"there is no token named {request.name!r}")
        return pb.RevokeTokenResponse()

    async def _revoked(self, name: str, *, actor: str) -> bool:
        if not await self._operators.tokens.revoke(name, actor=actor):
            return False
        if self._bindings is not None:
            await self._bindings.forget(f"token/{name}", actor=actor)
        return True

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: CallContext
    ) -> pb.OpenSessionResponse:
        if not 0 <= request.life_seconds <= SESSION_LIMIT_SECONDS:
            raise InvalidArgument(
                f"a session lives up to {SESSION_LIMIT_SECONDS:g} seconds", field="life_seconds"
            )
        token = self._operators.session(
            OWNER,
            roles=self._known(request.roles),
            scope=_scope(request.tenant),
            life_seconds=request.life_seconds or SESSION_SECONDS,
        )
        if request.console_link and self._link is not None:
            code = await self._link(token, actor=context.principal.name)
            return pb.OpenSessionResponse(link_code=code, web_addresses=self.web_addresses)
        return pb.OpenSessionResponse(token=token, web_addresses=self.web_addresses)

    async def GetRevocationUptake(
        self, _request: pb.GetRevocationUptakeRequest, _context: CallContext
    ) -> pb.GetRevocationUptakeResponse:
        if self._lists is None:
            return pb.GetRevocationUptakeResponse()
        answer = pb.GetRevocationUptakeResponse(
            number=self._lists.number,
            entries=self._lists.entries,
            issued_at=timestamp(self._lists.issued_at_ns),
        )
        for uptake in self._lists.uptake():
            told = answer.agents.add(
                agent=uptake.agent, name=uptake.name, state=uptake.state, number=uptake.number
            )
            if uptake.heard_at_ns is not None:
                told.heard_at.CopyFrom(timestamp(uptake.heard_at_ns))
        return answer

    def _is_ours(self, record: TokenRecord) -> bool:
        """Other domains keep tokens of their own beside these, and list them themselves."""
        return bool(record.roles) and self._roles.issuperset(record.roles)

    def _known(self, roles: Collection[str]) -> frozenset[Role]:
        if not roles:
            raise InvalidArgument(f"at least one role is needed, of {self._words()}", field="roles")
        for role in roles:
            if role not in self._roles:
                raise InvalidArgument(f"there is no role {role!r}, only {self._words()}", field="roles")
        return frozenset(Role(role) for role in roles)

    def _words(self) -> str:
        return ", ".join(sorted(self._roles))


def _scope(tenant: str) -> str:
    if not tenant:
        return EVERYWHERE
    if not TENANT.fullmatch(tenant):
        raise InvalidArgument(
            "a tenant has 1 to 63 of a-z, 0-9 and -, and no - at either end", field="tenant"
        )
    return _PREFIX + tenant


def _told(record: TokenRecord) -> pb.Token:
    told = pb.Token(
        name=record.name,
        roles=record.roles,
        tenant=record.scope.removeprefix(_PREFIX),
        created_at=timestamp(record.created_at_ns),
    )
    if record.expires_at_ns is not None:
        told.expires_at.CopyFrom(timestamp(record.expires_at_ns))
    return told
