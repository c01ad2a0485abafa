from __future__ import annotations

import pytest

from fleetplane.kernel.access import AccessTable, Grant, Permission, Principal, Role, covers
from fleetplane.kernel.errors import PermissionDenied, SettingsError

READ, WRITE = Permission("things.read"), Permission("things.write")
READER, OWNER = Role("reader"), Role("owner")
TABLE = AccessTable({READER: [Grant(permission=READ)], OWNER: [Grant(permission=WRITE, scope="org/acme")]})


def someone(*roles: Role, scope: str = "") -> Principal:
    return Principal(name="someone", roles=frozenset(roles), scope=scope)


@pytest.mark.parametrize(
    ("prefix", "scope", "expected"),
    [
        ("", "org/acme", True),
        ("org/acme", "org/acme", True),
        ("org/acme", "org/acme/ws/prod", True),
        ("org/acme", "org/acmeevil", False),
        ("org/acme/ws", "org/acme", False),
    ],
)
def test_a_scope_covers_what_lies_below_it_by_whole_segments(prefix: str, scope: str, expected: bool) -> None:
    assert covers(prefix, scope) is expected


def test_a_role_grants_only_its_own_permissions() -> None:
    TABLE.check(someone(READER), READ)
    with pytest.raises(PermissionDenied, match=r"someone may not things\.write"):
        TABLE.check(someone(READER), WRITE)


def test_a_grant_ends_at_its_scope() -> None:
    TABLE.check(someone(OWNER), WRITE, "org/acme/ws/prod")
    with pytest.raises(PermissionDenied):
        TABLE.check(someone(OWNER), WRITE, "org/other")


def test_a_principal_never_acts_outside_its_own_scope() -> None:
    assert not TABLE.allows(someone(READER, scope="org/acme"), READ, "org/other")


def test_nobody_without_a_role_may_do_anything() -> None:
    assert not TABLE.allows(someone(), READ)


def test_a_permission_that_no_role_grants_stops_the_start() -> None:
    TABLE.require_complete([READ, WRITE])
    with pytest.raises(SettingsError, match=r"no role grants things\.delete"):
        TABLE.require_complete([READ, Permission("things.delete")])
