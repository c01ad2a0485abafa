"""Which roles of this domain a caller holds who was given built-in roles at scopes.

Apart from `access`, which a board's agent loads too: only the server knows where boards lie in its store.
"""

from __future__ import annotations

from dataclasses import replace

from fleetplane.domains.boards.access import ADMIN, OPERATOR, VIEWER
from fleetplane.domains.boards.kinds import SCOPE
from fleetplane.kernel import access as built_in
from fleetplane.kernel.access import Principal

_SAME = {
    built_in.VIEWER: VIEWER,
    built_in.OPERATOR: OPERATOR,
    built_in.ADMIN: ADMIN,
    built_in.OWNER: ADMIN,
}
"""What the built-in roles are with boards."""


def as_board_caller(principal: Principal) -> Principal:
    """A principal with the roles that it holds where boards lie, in the words of this domain."""
    here = principal.at(SCOPE)
    return replace(here, roles=here.roles | {_SAME[role] for role in here.roles if role in _SAME})
