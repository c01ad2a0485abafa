"""On whose behalf a board is asked for something, from who is calling this server."""

from __future__ import annotations

from fleetplane.domains.boards.access import ADMIN, OPERATOR, VIEWER
from fleetplane.domains.boards.calls.channels import CallOrigin
from fleetplane.kernel.access import Principal


def asked_by(principal: Principal) -> CallOrigin:
    """With the widest of the roles that a board tells apart; another server may only look."""
    role = next((role for role in (ADMIN, OPERATOR) if role in principal.roles), VIEWER)
    return CallOrigin(actor=principal.name, role=role)
