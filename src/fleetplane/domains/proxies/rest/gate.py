"""The gate of REST: from the headers of a request to a caller, and on to what they may do."""

from __future__ import annotations

from collections.abc import Mapping

from fleetplane.domains.proxies.access import SYSTEM, Access, ProxyCaller
from fleetplane.domains.proxies.tenancy.logins import ProxyBearers
from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import PermissionDenied
from fleetplane.web.rest.routes import Headers


class Gatekeeper:
    def __init__(self, access: Access, bearers: ProxyBearers) -> None:
        self._access = access
        self._bearers = bearers

    def authenticate(self, headers: Headers) -> ProxyCaller:
        return self._bearers.of_header(headers.credential)

    def of_token(self, token: str) -> ProxyCaller:
        """The caller of a bearer token, for whatever else takes one."""
        return self._bearers.of_token(token)

    def admit(self, caller: ProxyCaller, permission: Permission | None, path: Mapping[str, str]) -> str:
        if permission == SYSTEM:
            if not caller.is_system_admin:
                raise PermissionDenied("only a system administrator may do this")
            return ""
        return self._access.admit(caller, permission, path)
