"""Who we are right now: key and token together, replaced together.

Whatever signs asks here each time, so that a renewed token or a rotated key is used from the next
message on, on the stream that is open.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetplane.domains.edge.agent.config.document import DaemonConfig
from fleetplane.domains.edge.agent.identity import claims
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.kernel.errors import FailedPrecondition

LEAST_MARGIN_SECONDS: Final = 120.0
MARGIN_SHARE: Final = 0.25
"""A token is renewed in the last quarter of its life: one of an hour has 15 minutes to find its server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonIdentity:
    node_id: str
    tenant: str
    key: Ed25519PrivateKey = field(repr=False)
    token: str = field(repr=False)

    @property
    def expires_at(self) -> float | None:
        """Seconds since the Unix epoch; None for a token that does not say."""
        return claims.node(self.token).exp

    def renew_at(self) -> float | None:
        said = claims.node(self.token)
        if said.exp is None:
            return None
        margin = LEAST_MARGIN_SECONDS
        if said.iat is not None and said.exp > said.iat:
            life = said.exp - said.iat
            margin = min(
                max(margin, life * MARGIN_SHARE), life / 2
            )  # a token of seconds is not renewed at once
        return said.exp - margin


def load(folder: StateFolder, config: DaemonConfig) -> DaemonIdentity:
    """Blocking."""
    token = folder.load_token()
    said = claims.node(token)
    tenant = said.tid or config.edge.tenant_id
    if config.spec.node.id and said.sub != config.spec.node.id.lower():
        raise FailedPrecondition(
            f"{folder.token} is of node {said.sub}, and spec.node.id is {config.spec.node.id}",
            hint="enrol this machine anew",
        )
    if (stated := config.edge.tenant_id) and tenant != stated:
        raise FailedPrecondition(
            f"{folder.token} is of tenant {tenant!r}, and spec.cluster.edge.tenant_id is {stated!r}",
            hint="enrol this machine anew",
        )
    return DaemonIdentity(node_id=said.sub, tenant=tenant, key=folder.load_key(), token=token)


class Keyring:
    """The identity in force."""

    def __init__(self, current: DaemonIdentity, seen: tuple[tuple[int, int], ...] = ()) -> None:
        self.current = current
        self.seen = seen
        """Of the files it was read from."""

    def __repr__(self) -> str:
        return f"<Keyring of {self.current.node_id}>"
