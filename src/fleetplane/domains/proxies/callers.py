"""Who is calling: from the `Authorization` header to a caller, and on to what they may do."""

from __future__ import annotations

from collections.abc import Mapping

from fleetplane.domains.proxies.access import SYSTEM, Access, Caller, organization_of
from fleetplane.domains.proxies.accounts import Accounts
from fleetplane.domains.proxies.members import TOKEN_PREFIX, ApiTokens
from fleetplane.domains.proxies.sessions import Sessions
from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import PermissionDenied, Unauthenticated


class Gatekeeper:
    """Serves REST and whatever else takes a bearer token."""

    def __init__(self, access: Access, accounts: Accounts, sessions: Sessions, tokens: ApiTokens) -> None:
        self._access = access
        self._accounts = accounts
        self._sessions = sessions
        self._tokens = tokens

    def authenticate(self, authorization: str | None) -> Caller:
        if authorization is None:
            raise Unauthenticated("a bearer token is required")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthenticated("the Authorization header must be: Bearer <token>")
        return self.of_token(token.strip())

    def of_token(self, token: str) -> Caller:
        """By an access token or an API token."""
        if token.startswith(TOKEN_PREFIX):
            record = self._tokens.authenticate(token)
            return Caller(
                name=f"api-token/{record.name}",
                organization=organization_of(record.scope),
                role=record.spec.role,
            )
        verified = self._sessions.verify(token)
        user = self._accounts.find(verified.user)
        if user is None or user.spec.disabled:
            raise Unauthenticated("the user is gone or disabled")
        return Caller(
            name=f"user/{user.name}",
            user=user.name,
            session=verified.session,
            is_system_admin=user.spec.is_system_admin,
        )

    def admit(self, caller: Caller, permission: Permission | None, path: Mapping[str, str]) -> str:
        if permission == SYSTEM:
            if not caller.is_system_admin:
                raise PermissionDenied("only a system administrator may do this")
            return ""
        return self._access.admit(caller, permission, path)
