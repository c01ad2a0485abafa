"""`nstance.v1.RegistrationService`: a nonce and a public key for a certificate.

Checking the nonce, using it up and recording what was issued are one transaction: of any
number who present the same nonce one key gets in, and that key may ask again if the answer was
lost. The order of the checks and their codes are what clients of the original know.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from fleetplane.domains.instances import credentials
from fleetplane.domains.instances.configuration import InstancesDocument
from fleetplane.domains.instances.credentials import ClientRole, PublicKey
from fleetplane.domains.instances.kinds import (
    INSTANCE,
    OPERATOR,
    InstanceStatus,
    OperatorRecord,
    tenant_scope,
)
from fleetplane.domains.instances.records.groups import Groups
from fleetplane.domains.instances.records.instances import put_status
from fleetplane.domains.instances.rules.names import named_by_agent
from fleetplane.gen.nstance.v1 import registration_pb2
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, Unauthenticated
from fleetplane.kernel.identity import Authority, IssuedCertificate
from fleetplane.kernel.identity.enrolment import digest, redeem
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store
from fleetplane.rpc import CallContext

ADDRESS_LIMIT = 64
HOSTNAME_LIMIT = 253
NONCE_LIMIT_BYTES = 8192


class RegistrationService:
    def __init__(
        self, store: Store, authority: Authority, nonces: SigningKeys, groups: Groups, clock: Clock
    ) -> None:
        self._store = store
        self._authority = authority
        self._nonces = nonces
        self._groups = groups
        self._clock = clock

    async def RegisterAgent(
        self, request: registration_pb2.RegisterClientRequest, _context: CallContext
    ) -> registration_pb2.RegisterClientResponse:
        nonce = _bounded(request.registration_nonce_jwt, "registration_nonce_jwt", NONCE_LIMIT_BYTES)
        claims = credentials.read_nonce(self._nonces, nonce, role=ClientRole.AGENT)
        configuration = self._configuration()
        if claims["cluster_id"] != configuration.cluster.id:
            raise InvalidArgument("cluster_id mismatch", field="registration_nonce_jwt")
        if claims.get("shard") != configuration.shard.id:
            raise InvalidArgument("shard mismatch", field="registration_nonce_jwt")
        tenant, name = claims["tenant"], claims["sub"]
        instance = self._store.get(INSTANCE, tenant_scope(tenant), name)
        if instance is None or not _waits(instance.status, nonce, claims):
            raise Unauthenticated("nonce validation failed: no instance is waiting for it")
        key = credentials.load_public_key(request.public_key_pem, field="public_key_pem")
        details = {
            "private_ipv4": _bounded(request.private_ipv4, "private_ipv4", ADDRESS_LIMIT),
            "private_ipv6": _bounded(request.private_ipv6, "private_ipv6", ADDRESS_LIMIT),
            "hostname": _bounded(request.hostname, "hostname", HOSTNAME_LIMIT),
        }
        issued = self._issue(key, ClientRole.AGENT, tenant, name)
        await self._admit_agent(claims, nonce, key, issued, details)
        return self._answer(issued)

    async def RegisterOperator(
        self, request: registration_pb2.RegisterClientRequest, _context: CallContext
    ) -> registration_pb2.RegisterClientResponse:
        nonce = _bounded(request.registration_nonce_jwt, "registration_nonce_jwt", NONCE_LIMIT_BYTES)
        claims = credentials.read_nonce(self._nonces, nonce, role=ClientRole.OPERATOR)
        configuration = self._configuration()
        if claims["cluster_id"] != configuration.cluster.id:
            raise InvalidArgument("cluster_id mismatch", field="registration_nonce_jwt")
        if claims["sub"] != claims["cluster_id"]:
            raise InvalidArgument("subject and cluster_id mismatch", field="registration_nonce_jwt")
        key = credentials.load_public_key(request.public_key_pem, field="public_key_pem")
        tenant, client = claims["tenant"], claims["sub"]
        issued = self._issue(key, ClientRole.OPERATOR, tenant, client)
        await self._admit_operator(tenant, client, nonce, key, issued)
        return self._answer(issued)

    def _configuration(self) -> InstancesDocument:
        configuration = self._groups.configuration
        if configuration is None:
            raise FleetplaneError("config not loaded")
        return configuration

    def _issue(self, key: PublicKey, role: ClientRole, tenant: str, client: str) -> IssuedCertificate:
        return credentials.issue(
            self._authority,
            key,
            role=role,
            tenant=tenant,
            client=client,
            life_hours=self._groups.certificate_hours(role),
            serial=self._clock.now_ns(),
        )

    async def _admit_agent(
        self,
        claims: Mapping[str, str],
        nonce: str,
        key: PublicKey,
        issued: IssuedCertificate,
        details: dict[str, str],
    ) -> None:
        tenant, name = claims["tenant"], claims["sub"]
        key_digest = credentials.key_digest(key)

        def change(draft: Draft) -> None:
            instance = draft.get(INSTANCE, tenant_scope(tenant), name)
            status = instance.status if instance is not None else None
            if instance is None or status is None or not _waits(status, nonce, claims):
                raise Unauthenticated("nonce validation failed: no instance is waiting for it")
            if status.deleting_at_ns is not None:
                raise Unauthenticated("nonce validation failed: the instance is being deleted")
            # By the record's digest: whichever key has signed it, it is one nonce and used once.
            _redeem(draft, "instances/agent", status.nonce_digest, key_digest, status.nonce_expires_at_ns)
            registered = msgspec.structs.replace(
                named_by_agent(status, details),
                registered_at_ns=status.registered_at_ns or draft.now_ns,
                key_digest=key_digest,
                certificate_serial=str(issued.serial),
                certificate_expires_at_ns=round(issued.not_after.timestamp() * 1e9),
                certificate_authority=issued.issuer_key_id,
            )
            put_status(draft, instance, registered)

        await self._store.transact(
            change,
            actor=credentials.principal_name(ClientRole.AGENT, tenant, name),
            action="instances.register",
            touches=[Key(INSTANCE.name, tenant_scope(tenant), name)],
        )

    async def _admit_operator(
        self, tenant: str, client: str, nonce: str, key: PublicKey, issued: IssuedCertificate
    ) -> None:
        key_digest = credentials.key_digest(key)
        record = f"{client}/{key_digest[:16]}"

        def change(draft: Draft) -> None:
            _redeem(draft, "instances/operator", digest(nonce), key_digest, 0)
            spec = OperatorRecord(
                client=client,
                key_digest=key_digest,
                certificate_serial=str(issued.serial),
                registered_at_ns=draft.now_ns,
                expires_at_ns=round(issued.not_after.timestamp() * 1e9),
                authority=issued.issuer_key_id,
            )
            draft.put(OPERATOR, tenant_scope(tenant), record, spec=spec)

        await self._store.transact(
            change,
            actor=credentials.principal_name(ClientRole.OPERATOR, tenant, client),
            action="instances.register_operator",
            touches=[Key(OPERATOR.name, tenant_scope(tenant), record)],
        )

    def _answer(self, issued: IssuedCertificate) -> registration_pb2.RegisterClientResponse:
        response = registration_pb2.RegisterClientResponse(
            client_certificate_pem=issued.leaf_pem, authority_pem=self._authority.trust_pem
        )
        response.expires_at.FromDatetime(issued.not_after)
        return response


def _waits(status: InstanceStatus | None, nonce: str, claims: Mapping[str, str]) -> bool:
    """Whether the instance with this status is the one that the nonce was made for."""
    return status is not None and credentials.nonce_fits(
        nonce, claims, nonce_id=status.nonce_id, nonce_digest=status.nonce_digest
    )


def _redeem(draft: Draft, purpose: str, nonce_digest: str, key_digest: str, expires_at_ns: int) -> None:
    try:
        redeem(
            draft,
            purpose=purpose,
            token_digest=nonce_digest,
            key_digest=key_digest,
            expires_at_ns=expires_at_ns,
        )
    except Unauthenticated as error:
        raise Unauthenticated("nonce already used", details=error.details) from error


def _bounded(text: str, field: str, limit: int) -> str:
    if len(text) > limit:
        raise InvalidArgument(f"{field} is longer than {limit} characters", field=field)
    return text
