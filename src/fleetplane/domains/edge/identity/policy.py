"""What this server is to its daemons: its role, the bounds of identity, and the key they know it by.

The key is Ed25519, made once and kept sealed; its public half is told at enrolment, so that a daemon can
pin it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetplane.domains.edge.settings import EdgeSettings
from fleetplane.domains.edge.workers.forwarding import check_entry
from fleetplane.kernel.errors import FailedPrecondition
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.master_key import SealedSecret
from fleetplane.kernel.store import Store

SECRET = "edge/server-key"  # noqa: S105  # the name it is kept under
ACTOR = "system/edge"


class ServerKey:
    """See `load_or_create`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"<ServerKey {self.public_key.hex()[:16]}>"

    @classmethod
    async def load_or_create(cls, store: Store, master: MasterKey) -> ServerKey:

        async def made() -> bytes:
            return Ed25519PrivateKey.generate().private_bytes_raw()

        found = await SealedSecret(store, master, name=SECRET).read_or_make(made, actor=ACTOR)
        return cls(Ed25519PrivateKey.from_private_bytes(found.content))

    def sign(self, payload: bytes) -> bytes:
        return self._key.sign(payload)


class ServerRole(StrEnum):
    CONTROLLER = "controller"
    HYBRID = "hybrid"
    RELAY_COORDINATOR = "relay-coordinator"
    WORKER = "worker"

    @property
    def takes_edges(self) -> bool:
        return self is not ServerRole.WORKER

    @property
    def forwards(self) -> bool:
        """A relay holds daemons' streams and nothing else: executions pass it by."""
        return self is not ServerRole.RELAY_COORDINATOR

    @property
    def issuer(self) -> str:
        """The issuer of enrolment tokens where no public name is configured."""
        relay = self is ServerRole.RELAY_COORDINATOR
        return "aegis-relay-coordinator" if relay else "aegis-controller"

    def require_edges(self) -> None:
        if not self.takes_edges:
            raise FailedPrecondition("edge mode disabled on this node", hint="dial a controller or a relay")


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityPolicy:
    role: ServerRole = ServerRole.CONTROLLER
    node_token_seconds: float = 30 * 86_400.0
    """Daemons in the field do not renew theirs by themselves, so it outlives a long holiday."""
    worker_token_seconds: float = 3600.0
    enrollment_seconds: float = 900.0
    overlap_seconds: float = 60.0
    """How long the stream that is open at a rotation may go on under the former key."""
    challenge_seconds: float = 300.0
    attests_per_minute: int = 5
    """Of edge daemons, per address; 0 for no limit."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks whose `x-forwarded-for` is trusted."""
    skew_seconds: float = 300.0
    """How far the time in a signed request may be off."""
    forward_to: tuple[str, ...] = ()
    """Hosts, `*.domain`s and networks, with a port or not, to which executions may be forwarded."""
    worker_stale_seconds: float = 90.0
    worker_fresh_seconds: float = 60.0
    """Nothing is routed to a worker that was not heard of for this long."""

    @classmethod
    def of(cls, settings: EdgeSettings) -> IdentityPolicy:
        return cls(
            role=ServerRole(settings.role),
            node_token_seconds=settings.node_token_days * 86_400.0,
            enrollment_seconds=settings.enrollment_token_seconds,
            overlap_seconds=settings.overlap_seconds,
            attests_per_minute=settings.attests_per_minute,
            trusted_proxies=settings.trusted_proxies,
            forward_to=tuple(map(check_entry, settings.forward_to)),
            skew_seconds=settings.skew_seconds,
        )
