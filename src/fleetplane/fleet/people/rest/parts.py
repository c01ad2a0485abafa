"""What the rooms of `/apis/v1/people` share: the gate, what they are made of, and the checks of rights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleetplane.fleet.people.door import Authenticators
from fleetplane.fleet.people.own_accounts import OwnAccounts, OwnLogins
from fleetplane.fleet.people.rights import GRANTS, MANAGE, READ, SELF, Rights
from fleetplane.fleet.resources import scopes
from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.identity.bindings import Bindings
from fleetplane.kernel.identity.operators import Operators
from fleetplane.web.rest.gate import OperatorCaller, operator_gate
from fleetplane.web.rest.routes import Call, Headers

PeopleCall = Call[OperatorCaller]


class PeopleGate:
    """Whoever the door knows may ask about themselves; the rest goes by roles."""

    def __init__(self, door: Authenticators) -> None:
        self._roles = operator_gate(door, GRANTS)

    def authenticate(self, headers: Headers) -> OperatorCaller:
        return self._roles.authenticate(headers)

    def admit(self, caller: OperatorCaller, permission: Permission | None, path: Mapping[str, str]) -> str:
        return "" if permission == SELF else self._roles.admit(caller, permission, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeopleParts:
    door: Authenticators
    rights: Rights
    bindings: Bindings
    operators: Operators
    accounts: OwnAccounts
    logins: OwnLogins

    def may(self, call: PeopleCall, permission: Permission, path: str) -> bool:
        return self.rights.may(call.caller.principal, permission, path)

    def check_at(self, call: PeopleCall, path: str, missing: str) -> None:
        """As if it were not there, for those who may not know of it; refused to those who only read."""
        if not self.may(call, READ, path):
            raise NotFound(missing)
        self.rights.check(call.caller.principal, MANAGE, path)

    def check_root(self, call: PeopleCall) -> None:
        """Accounts and sessions belong to the installation, not to a tenant."""
        self.rights.check(call.caller.principal, MANAGE, scopes.ROOT)

    def check_above(self, call: PeopleCall, subject: str) -> None:
        """Whoever sets a password or makes a token can act as that subject, and must hold what it holds."""
        for one in self.bindings.of((subject,)):
            self.rights.check_give(call.caller.principal, one.spec.role, one.spec.scope)
        for held in self.door.by_profiles(subject):
            self.rights.check_holds(call.caller.principal, held)
