"""Keeping the certificate from running out.

When is decided in `certificates`; how is a `Renewal`, for which the protocol has no method of
its own. Without one the agent says in its log, early and then louder, that someone must act.
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
from fleetplane.kernel.backoff import Backoff
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError

LOOK_AGAIN_SECONDS: Final = 6 * 3600.0
"""The longest sleep between two looks: the wall clock may be set meanwhile."""
RETRY: Final = Backoff(first_seconds=60.0, ceiling_seconds=1800.0)


class Renewal(Protocol):
    async def renew(self, channel: grpc.aio.Channel, public_key_pem: bytes) -> bytes:
        """A new certificate in PEM for the key that the channel's present one is for."""
        ...


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
        attempt = 0
        told = Age.FRESH
        while True:
            now = self.clock.now_ns() / 1e9
            age = life.age(now)
            if age is not told:
                told = age
                self._tell(age, life.end - now)
            wait = min(life.seconds_to_next_age(now) or LOOK_AGAIN_SECONDS, LOOK_AGAIN_SECONDS)
            if self.renewal is not None and age in (Age.DUE, Age.URGENT):
                if await self._renewed(self.renewal, channel):
                    return
                wait = min(wait, self.retry.delay_seconds(attempt, jitter=self.clock.random()))
                attempt += 1
            await self.clock.sleep(wait)

    async def _renewed(self, renewal: Renewal, channel: grpc.aio.Channel) -> bool:
        key = await asyncio.to_thread(self.folder.key)
        try:
            pem = await renewal.renew(channel, certificates.public_pem(key))
            await asyncio.to_thread(self.folder.store_certificate, pem, self.instance_id)
        except grpc.aio.AioRpcError as error:
            self.log.warning("renewal_failed", error=link.words(error))
            return False
        except (FleetplaneError, OSError) as error:
            self.log.warning("renewal_failed", error=str(error))
            return False
        self.log.info("certificate_renewed")
        return True

    def _tell(self, age: Age, seconds_left: float) -> None:
        hours = round(seconds_left / 3600, 1)
        match age:
            case Age.FRESH:
                self.log.info("certificate_fresh", hours_left=hours)
            case Age.DUE:
                tell = self.log.warning if self.renewal is None else self.log.info
                tell("certificate_due", hours_left=hours, renewing=self.renewal is not None)
            case Age.URGENT:
                self.log.warning("certificate_ends_soon", hours_left=hours)
            case Age.OVER:
                self.log.error("certificate_over", advice="give this instance a new nonce, or replace it")
