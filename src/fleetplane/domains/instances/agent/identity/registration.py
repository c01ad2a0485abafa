"""Becoming known to the server: from a folder with a nonce to a folder with a certificate.

Follows the table in `enrolment` step by step, each step durable before the next begins, so
that a crash anywhere is answered by starting again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final, assert_never

import grpc
import grpc.aio
import structlog

from fleetplane.domains.instances.agent.identity import steps as enrolment
from fleetplane.domains.instances.agent.identity.folder import IdentityFolder
from fleetplane.domains.instances.agent.identity.nonce import BadNonce, Nonce, read_nonce
from fleetplane.domains.instances.agent.identity.steps import IdentityStep
from fleetplane.domains.instances.agent.transport import CALL_LIMIT_SECONDS, InstanceTransport
from fleetplane.gen.nstance.v1 import registration_pb2, registration_pb2_grpc
from fleetplane.kernel.clock import Backoff, Clock
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.node import link

FINAL_CODES: Final = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Answers that asking again does not change. All others may pass: a new leader, a full disk, a limit."""


class RegistrationRefused(Unauthenticated):
    reason = "REGISTRATION_REFUSED"
    hint = "the nonce may have been used with another key, or be for another cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSelf:
    """What the agent tells about its machine."""

    instance_id: str
    hostname: str = ""
    private_ipv4: str = ""
    private_ipv6: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRegistrar:
    folder: IdentityFolder
    transport: InstanceTransport
    me: InstanceSelf
    clock: Clock
    log: structlog.typing.FilteringBoundLogger
    backoff: Backoff = field(default_factory=Backoff)

    async def enrol(self) -> None:
        """Return when the folder holds a certificate that works; raise when it never will."""
        step, why = await asyncio.to_thread(self._decide)
        self.log.debug("enrolment", step=step.value)
        match step:
            case IdentityStep.CONNECT:
                return
            case IdentityStep.DROP_NONCE:
                await asyncio.to_thread(self._drop_left_over)
            case IdentityStep.REGISTER:
                await self._register()
            case IdentityStep.GIVE_UP:
                raise BadNonce(f"cannot connect and cannot register: {why}, and there is no nonce")
            case _:
                assert_never(step)

    def _decide(self) -> tuple[IdentityStep, str]:
        self.folder.authority_pem()
        self.folder.public_key_pem()
        state, why = self.folder.certificate_state(self.me.instance_id, now=self._now())
        return enrolment.next_step(self.folder.nonce_state(), state), why

    def _drop_left_over(self) -> None:
        """A crash came between certificate and nonce. The hash was written before either."""
        self.folder.drop_nonce()
        self.log.info("nonce_dropped", reason="its certificate is here already")

    async def _register(self) -> None:
        nonce = await asyncio.to_thread(self._begin)
        attempt = 0
        while True:
            try:
                answer = await self._ask(nonce)
                break
            except grpc.aio.AioRpcError as error:
                if error.code() in FINAL_CODES:
                    raise RegistrationRefused(f"registration refused: {link.words(error)}") from error
                self.transport.learn(link.words(error))
                delay = self.backoff.delay_seconds(attempt, jitter=self.clock.random())
                self.log.warning(
                    "registration_failed", error=link.words(error), retry_in_seconds=round(delay, 2)
                )
            await self.clock.sleep(delay)
            attempt += 1
            read_nonce(nonce.token.encode(), now=self._now())  # it may have run out meanwhile
        await asyncio.to_thread(self._finish, answer.client_certificate_pem, answer.authority_pem)
        self.log.info("registered", expires=answer.expires_at.ToJsonString())

    def _begin(self) -> Nonce:
        """Read the nonce and take over the configuration it was made under."""
        raw = self.folder.nonce()
        if raw is None:
            raise BadNonce("the nonce vanished")
        nonce = read_nonce(raw, now=self._now())
        if nonce.subject and nonce.subject != self.me.instance_id:
            raise BadNonce(f"the nonce is for {nonce.subject}, and this is {self.me.instance_id}")
        if nonce.config_hash:
            self.folder.store_config_hash(nonce.config_hash)
        return nonce

    async def _ask(self, nonce: Nonce) -> registration_pb2.RegisterClientResponse:
        authority_pem = await asyncio.to_thread(self.folder.authority_pem)
        public_key_pem = await asyncio.to_thread(self.folder.public_key_pem)
        request = registration_pb2.RegisterClientRequest(
            registration_nonce_jwt=nonce.token,
            public_key_pem=public_key_pem,
            private_ipv4=self.me.private_ipv4,
            private_ipv6=self.me.private_ipv6,
            hostname=self.me.hostname,
        )
        # A channel for each attempt: addresses are looked up anew, and no back-off but ours.
        async with self.transport.registration_channel(authority_pem) as channel:
            stub = registration_pb2_grpc.RegistrationServiceStub(channel)
            answer: registration_pb2.RegisterClientResponse = await stub.RegisterAgent(
                request, timeout=CALL_LIMIT_SECONDS
            )
            return answer

    def _finish(self, certificate_pem: bytes, authority_pem: bytes) -> None:
        self.folder.store_certificate(certificate_pem, self.me.instance_id, authority_pem)
        self.folder.drop_nonce()

    def _now(self) -> float:
        return self.clock.now_ns() / 1e9
