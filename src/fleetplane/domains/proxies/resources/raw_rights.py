"""Who may bring back text of NGINX that somebody wrote."""

from __future__ import annotations

from fleetplane.domains.proxies import access
from fleetplane.domains.proxies.rules.raw_text import RawRight
from fleetplane.fleet.resources.declaration import ActionCall
from fleetplane.kernel.errors import PermissionDenied
from fleetplane.kernel.store import Draft


def raw_right(call: ActionCall) -> RawRight:
    def decide(_draft: Draft, reason: str) -> None:
        if not call.may(access.RAW):
            raise PermissionDenied(
                f"{call.actor} may not do this: {reason}", details={"permission": access.RAW}
            )

    return decide
