"""Keeping the certificate from running out.

When is decided in `certificates`; how is a `Renewal`. The protocol has no method for it, so ours
is asked for under a name of its own. Of a server that does not know it, and without one at all,
the agent says in its log, early and then louder, that someone must act.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final, Protocol

import grpc
import grpc.aio
import structlog

from fleetplane.domains.instances.agent import certificates, link
from fleetplane.domains.instances.agent.certificates import Age, Life
from fleetplane.domains.instances.agent.identity_folder import IdentityFolder
from fleetplane.gen.fleetplane.instances.v1 import renewal_pb2, renewal_pb2_grpc
from fleetplane.kernel.backoff import Backoff
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, Unimplemented

LOOK_AGAIN_SECONDS: Final = 6 * 3600.0
"""The longest sleep between two looks: the wall clock may be set meanwhile."""
RETRY: Final = Backoff(first_seconds=60.0, ceiling_seconds=1800.0)


class Renewal(Protocol):
    async def renew(self, channel: grpc.aio.Channel, public_key_pem: bytes) -> bytes:
        """A new certificate in PEM for the key that the channel's present one is for.

        Raises NoSuchMethod if this server has no way to renew.
        """
        ...


class NoSuchMethod(Unimplemented):
    """The server speaks the protocol as it was first written."""

    reason = "NO_RENEWAL"


class ServerRenewal:
    """Asks the server that the agent is connected to."""

    def __repr__(self) -> str:
        return "<ServerRenewal>"

    async def renew(self, channel: grpc.aio.Channel, public_key_pem: bytes) -> bytes:
        request = renewal_pb2.RenewCertificateRequest(public_key_pem=public_key_pem)
        stub = renewal_pb2_grpc.AgentRenewalStub(channel)
        try:
            answer = await stub.RenewCertificate(request, timeout=link.CALL_LIMIT_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NoSuchMethod("this server does not renew certificates") from error
            raise
        pem: bytes = answer.client_certificate_pem
        return pem


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateKeeper:
    folder: IdentityFolder
    instance_id: str
    clock: Clock
    log: structlog.typing.FilteringBoundLogger
    renewal: Renewal | None = None
    retry: Backoff = field(default=RETRY)

    async def until_renewed(self, channel: grpc.aio.Channel, life: Life) -> None:
        """Return once a newer certificate is on disk, which takes a new connection to use."""
        renewal = self.renewal
        renewal_at = life.renewal_at(self.clock.random())
        attempt = 0
        told = Age.FRESH
        while True:
            now = self.clock.now_ns() / 1e9
            age = life.age(now)
            if age is not told:
                told = age
                self._tell(age, life.end - now, renewing=renewal is not None)
            wait = min(life.seconds_to_next_age(now) or LOOK_AGAIN_SECONDS, LOOK_AGAIN_SECONDS)
            if renewal is not None and age is not Age.OVER:
                if now < renewal_at:
                    wait = min(wait, renewal_at - now)
                else:
                    try:
                        if await self._renewed(renewal, channel):
                            return
                    except NoSuchMethod as error:
                        self.log.warning("renewal_unknown", error=error.message)
                        renewal = None  # until the next connection, which may be to another server
                    wait = min(wait, self.retry.delay_seconds(attempt, jitter=self.clock.random()))
                    attempt += 1
            await self.clock.sleep(wait)

    async def _renewed(self, renewal: Renewal, channel: grpc.aio.Channel) -> bool:
        key = await asyncio.to_thread(self.folder.key)
        try:
            pem = await renewal.renew(channel, certificates.public_pem(key))
            await asyncio.to_thread(self.folder.store_certificate, pem, self.instance_id)
        except NoSuchMethod:
            raise
        except grpc.aio.AioRpcError as error:
            self.log.warning("renewal_failed", error=link.words(error))
            return False
        except (FleetplaneError, OSError) as error:
            self.log.warning("renewal_failed", error=str(error))
            return False
        self.log.info("certificate_renewed")
        return True

    def _tell(self, age: Age, seconds_left: float, *, renewing: bool) -> None:
        hours = round(seconds_left / 3600, 1)
        match age:
            case Age.FRESH:
                self.log.info("certificate_fresh", hours_left=hours)
            case Age.DUE:
                tell = self.log.info if renewing else self.log.warning
                tell("certificate_due", hours_left=hours, renewing=renewing)
            case Age.URGENT:
                self.log.warning("certificate_ends_soon", hours_left=hours)
            case Age.OVER:
                self.log.error("certificate_over", advice="give this instance a new nonce, or replace it")
