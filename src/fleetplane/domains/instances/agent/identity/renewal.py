"""Keeping the certificate from running out.

When is decided in `certificates`; how is a `CertificateRenewal`. The protocol has no method for it, so ours
is asked for under a name of its own. Of a server that does not know it, and without one at all,
the agent says in its log, early and then louder, that someone must act. Beside that the agent asks
now and then whom to trust: while the server's authority is being replaced, it learns of the next one
and renews before its time.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

import grpc
import grpc.aio
import structlog
from google.protobuf.message import Message

from fleetplane.domains.instances.agent.identity.folder import IdentityFolder
from fleetplane.domains.instances.agent.transport import CALL_LIMIT_SECONDS
from fleetplane.gen.fleetplane.instances.v1 import renewal_pb2, renewal_pb2_grpc
from fleetplane.kernel.clock import Backoff, Clock
from fleetplane.kernel.errors import FleetplaneError, Unimplemented
from fleetplane.node import link
from fleetplane.node.certificates import Age, Life

LOOK_AGAIN_SECONDS: Final = 6 * 3600.0
"""The longest sleep between two looks: the wall clock may be set meanwhile."""
TRUST_SECONDS: Final = 3600.0
"""Seconds between two fetches of trusted authorities, with up to half as much random jitter."""
RETRY: Final = Backoff(first_seconds=60.0, ceiling_seconds=1800.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    certificate_pem: bytes
    authority_pem: bytes = b""
    """The authorities to trust from now on; empty if the server sends none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalTrust:
    authority_pem: bytes
    renew: bool
    """Whether our certificate is of an authority that is being replaced."""


class CertificateStanding(StrEnum):
    """What the server says of our certificate, and of whom we trust."""

    GOOD = "good"
    OUTDATED = "outdated"
    """Another authority signs now."""
    TRUST_CHANGED = "trust changed"


class CertificateRenewal(Protocol):
    """Both raise NoSuchMethod if this server has no way to do so."""

    async def renew(self, channel: grpc.aio.Channel, public_key_pem: bytes) -> Renewed:
        """A new certificate for the key that the channel's present one is for."""
        ...

    async def trust(self, channel: grpc.aio.Channel, holding: str) -> RenewalTrust:
        """Fetch the authorities to trust; `holding` is the SHA-256 of the present ones, in hexadecimal."""
        ...


class NoSuchMethod(Unimplemented):
    """The server speaks the protocol as it was first written."""

    reason = "NO_RENEWAL"


class ServerRenewal:
    """Asks the server that the agent is connected to."""

    def __repr__(self) -> str:
        return "<ServerRenewal>"

    async def renew(self, channel: grpc.aio.Channel, public_key_pem: bytes) -> Renewed:
        request = renewal_pb2.RenewCertificateRequest(public_key_pem=public_key_pem)
        answer = await _asked(renewal_pb2_grpc.AgentRenewalStub(channel).RenewCertificate, request)
        return Renewed(certificate_pem=answer.client_certificate_pem, authority_pem=answer.authority_pem)

    async def trust(self, channel: grpc.aio.Channel, holding: str) -> RenewalTrust:
        request = renewal_pb2.GetTrustRequest(holding=holding)
        answer = await _asked(renewal_pb2_grpc.AgentRenewalStub(channel).GetTrust, request)
        return RenewalTrust(authority_pem=answer.authority_pem, renew=answer.renew)


async def _asked(method: Any, request: Message) -> Any:
    try:
        return await method(request, timeout=CALL_LIMIT_SECONDS)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise NoSuchMethod("this server does not renew certificates") from error
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateKeeper:
    folder: IdentityFolder
    instance_id: str
    clock: Clock
    log: structlog.typing.FilteringBoundLogger
    renewal: CertificateRenewal | None = None
    retry: Backoff = field(default=RETRY)
    trust_seconds: float = TRUST_SECONDS

    async def until_renewed(self, channel: grpc.aio.Channel, life: Life) -> None:
        """Return once there is something new on disk that takes a new connection to use.

        That is a certificate, or whom to trust: a connection goes on trusting those whom it was made
        with, and would not find a server again whose authority was replaced.
        """
        renewal = self.renewal
        renewal_at = life.renewal_at(self.clock.random())
        trust_at = 0.0
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
                try:
                    if now >= trust_at:
                        trust_at = now + self.trust_seconds * (0.5 + self.clock.random())
                        match await self._standing(renewal, channel):
                            case CertificateStanding.TRUST_CHANGED:
                                return
                            case CertificateStanding.OUTDATED:
                                renewal_at = min(renewal_at, now)
                    if now >= renewal_at:
                        if await self._renewed(renewal, channel):
                            return
                        wait = min(wait, self.retry.delay_seconds(attempt, jitter=self.clock.random()))
                        attempt += 1
                    else:
                        wait = min(wait, renewal_at - now)
                    wait = min(wait, trust_at - now)
                except NoSuchMethod as error:
                    self.log.warning("renewal_unknown", error=error.message)
                    renewal = None  # until the next connection, which may be to another server
            await self.clock.sleep(wait)

    async def _standing(self, renewal: CertificateRenewal, channel: grpc.aio.Channel) -> CertificateStanding:
        """Take up whom the server says is to be trusted, and learn how our certificate stands."""
        try:
            held = await asyncio.to_thread(self.folder.authority_pem)
            found = await renewal.trust(channel, hashlib.sha256(held).hexdigest())
            if await asyncio.to_thread(self.folder.trust, found.authority_pem):
                self.log.info("trust_changed")
                return CertificateStanding.TRUST_CHANGED
            return CertificateStanding.OUTDATED if found.renew else CertificateStanding.GOOD
        except NoSuchMethod:
            self.log.debug("trust_not_told")  # by a server that never replaces its authority
        except grpc.aio.AioRpcError as error:
            self.log.warning("trust_unknown", error=link.words(error))
        except (FleetplaneError, OSError) as error:
            self.log.warning("trust_refused", error=str(error))
        return CertificateStanding.GOOD

    async def _renewed(self, renewal: CertificateRenewal, channel: grpc.aio.Channel) -> bool:
        public_key_pem = await asyncio.to_thread(self.folder.public_key_pem)
        try:
            answer = await renewal.renew(channel, public_key_pem)
            await asyncio.to_thread(
                self.folder.store_certificate, answer.certificate_pem, self.instance_id, answer.authority_pem
            )
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
