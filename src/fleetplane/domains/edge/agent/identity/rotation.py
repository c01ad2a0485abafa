"""A new token for the key we have, or a new key: asked for with proof of the old one and of the new.

Whatever the moment of a crash, the next start finds its way back. A new key is on disk, as the next
one, before the server hears of it; if the answer was lost, asking for a token with the next key tells
whether the server took it. Key and token are changed by one process at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetplane.domains.edge.agent import endpoint as link
from fleetplane.domains.edge.agent.config.document import DaemonConfig
from fleetplane.domains.edge.agent.identity import keyring as claims
from fleetplane.domains.edge.agent.identity import keyring as identity
from fleetplane.domains.edge.agent.identity.keyring import DaemonIdentity, Keyring
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder, new_key, public_bytes
from fleetplane.domains.edge.wire import envelope
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2_grpc
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import IntegrityError, Unavailable
from fleetplane.node.link import ServerRefused
from fleetplane.node.tasks import in_thread

KEEP_OLD_SECONDS: Final = 24 * 3600.0
PATIENCE_SECONDS: Final = 4 * link.CALL_LIMIT_SECONDS
"""For another process to finish: it asks the server a few times at most."""
PATIENCE_STEP_SECONDS: Final = 0.1
DIALECT: Final = (("x-aegis-edge-dialect", "documented"),)


class ProofForm(StrEnum):
    """Over which bytes the new key proves itself."""

    DIGEST = "digest"
    """Bound to this one request by its nonce."""
    PLAIN = "plain"
    """The node's id and the new key, as the contract's words have it."""


def request(
    who: DaemonIdentity,
    key: Ed25519PrivateKey,
    *,
    nonce: bytes,
    issued_at_ms: int,
    form: ProofForm = ProofForm.DIGEST,
    with_token: bool = True,
) -> pb.RotateEdgeKeyRequest:
    """Pure."""
    public = public_bytes(key)
    inner = pb.RotateEdgeKeyInner(
        node_id=who.node_id, new_public_key=public, nonce=nonce, issued_at_ms=issued_at_ms
    ).SerializeToString()
    proven = who.node_id.encode() + public
    if form is ProofForm.DIGEST:
        proven = envelope.rotation_digest(who.node_id, public, nonce)
    return pb.RotateEdgeKeyRequest(
        current_envelope=pb.SealNodeEnvelope(
            node_security_token=who.token if with_token else "",
            signature=envelope.sign(who.key, inner),
            payload=inner,
        ),
        new_public_key=public,
        signature_with_new_key=envelope.sign(key, proven),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedKey:
    identity: DaemonIdentity
    archived: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotator:
    folder: StateFolder
    config: Callable[[], DaemonConfig]
    connect: Callable[[], grpc.aio.Channel]
    clock: Clock
    log: structlog.typing.FilteringBoundLogger
    keyring: Keyring | None = None
    """Gets the new identity as soon as it is in force."""

    async def refresh(self) -> RotatedKey:
        """A new token for the key we have. Raises LinkLost or Refused."""
        async with self._alone():
            who = await self._identity()
            token = await self._ask(who, who.key)
            await in_thread(lambda: self.folder.store_token(token))
            return self._hold(replace(who, token=token))

    async def rotate(self, *, keep_old_seconds: float = KEEP_OLD_SECONDS) -> RotatedKey:
        """A new key, and a token for it. Raises LinkLost or Refused; then the old key stays."""
        async with self._alone():
            await self._settle_next()
            who, key = await self._identity(), new_key()
            await in_thread(lambda: self.folder.store_next_key(key))
            try:
                token = await self._ask(who, key)
            except ServerRefused:
                await in_thread(self.folder.drop_next_key)  # the server did not take it
                raise
            archived = await in_thread(lambda: self._promote(key, token))
            removed = await in_thread(
                lambda: self.folder.prune_archive(keep_seconds=keep_old_seconds, now=self._now())
            )
            self.log.info("key_rotated", archived=archived.name, pruned=removed)
            return self._hold(replace(who, key=key, token=token), archived)

    async def recover(self) -> None:
        """Settle what a crash in the middle of a rotation left open."""
        async with self._alone():
            await self._settle_next()

    async def _settle_next(self) -> None:
        key = await in_thread(self.folder.load_next_key)
        if key is None:
            return
        who = replace(await self._identity(), key=key)
        try:
            token = await self._ask(who, key)
        except ServerRefused as error:
            await in_thread(self.folder.drop_next_key)
            self.log.info("next_key_dropped", reason=error.message)
            return
        await in_thread(lambda: self._promote(key, token))
        self._hold(replace(who, token=token))
        self.log.info("next_key_adopted")

    def _promote(self, key: Ed25519PrivateKey, token: str) -> Path:
        # A crash in between leaves the new key with the old token, which a refresh mends.
        archived = self.folder.promote_next_key(key, now=self._now())
        self.folder.store_token(token)
        return archived

    async def _ask(self, who: DaemonIdentity, key: Ed25519PrivateKey) -> str:
        """The token for `key`, in whichever form this server understands."""
        last: ServerRefused | None = None
        for form, with_token in (
            (ProofForm.DIGEST, True),
            (ProofForm.DIGEST, False),
            (ProofForm.PLAIN, True),
        ):
            try:
                return await self._call(who, key, form=form, with_token=with_token)
            except ServerRefused as error:
                last = last or error
                # Anything but a proof that was not understood is the server's last word.
                if error.code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT):
                    raise
        assert last is not None
        raise last

    async def _call(
        self, who: DaemonIdentity, key: Ed25519PrivateKey, *, form: ProofForm, with_token: bool
    ) -> str:
        nonce = self.clock.token_bytes(envelope.NONCE_BYTES)
        now_ms = self.clock.now_ns() // 1_000_000
        asked = request(who, key, nonce=nonce, issued_at_ms=now_ms, form=form, with_token=with_token)
        async with self.connect() as channel:
            stub = cluster_pb2_grpc.NodeClusterServiceStub(channel)
            try:
                answer = await stub.RotateEdgeKey(asked, timeout=link.CALL_LIMIT_SECONDS, metadata=DIALECT)
            except grpc.aio.AioRpcError as error:
                raise link.translated(error) from error
        token: str = answer.node_security_token
        if claims.node(token).sub != who.node_id:
            raise IntegrityError("the server answered with a token of another node")
        return token

    async def _identity(self) -> DaemonIdentity:
        return await in_thread(lambda: identity.load(self.folder, self.config()))

    def _hold(self, who: DaemonIdentity, archived: Path | None = None) -> RotatedKey:
        if self.keyring is not None:
            self.keyring.current = who
            self.keyring.seen = self.folder.signature()
        return RotatedKey(identity=who, archived=archived)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self.clock.now_ns() / 1e9, tz=UTC)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        with ExitStack() as held:
            give_up_at = self.clock.monotonic() + PATIENCE_SECONDS
            while True:
                try:
                    held.enter_context(self.folder.changing_identity())
                    break
                except Unavailable:
                    if self.clock.monotonic() > give_up_at:
                        raise
                await self.clock.sleep(PATIENCE_STEP_SECONDS)
            yield
