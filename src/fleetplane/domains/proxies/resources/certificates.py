"""Certificates that proxies present."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetplane.domains.proxies import access
from fleetplane.domains.proxies.kinds.records import CERTIFICATE, Certificate, CertificateStatus
from fleetplane.domains.proxies.kinds.values import CertificateState, RevocationReason
from fleetplane.domains.proxies.resources.places import place
from fleetplane.fleet.resources.declaration import (
    READING,
    ActionCall,
    Begun,
    Column,
    PublicResource,
    ResourceAction,
    ResourceShape,
    ResourceVerb,
    ResourceView,
    Secret,
    ViewReader,
)
from fleetplane.kernel.values.times import spelled_or_null


class ProxyCertificateSpecView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    provider: str
    """Who issues it; `imported` if its owner brings it."""
    domain: str = ""
    """Its name, which need not be said twice."""
    auto_renew: bool | None = None
    """Unless given, whatever somebody else than its owner issues is renewed."""
    private_key: Secret = Secret(set=False)
    """Imported through the proxies' own API, never here, and never shown."""


class ProxyCertificateStatusView(ResourceShape, frozen=True):
    state: str
    names: Sequence[str]
    fingerprint: str
    issued_at: str | None
    expires_at: str | None
    error: str
    failures: int
    next_attempt_at: str | None
    alarm: str


def certificate_view(
    certificate: Certificate, _reading: ViewReader
) -> ResourceView[ProxyCertificateSpecView, ProxyCertificateStatusView]:
    """What is shown of a certificate; of its key, whether there is one."""
    spec, status = certificate.spec, certificate.status or CertificateStatus(state=CertificateState.PENDING)
    return ResourceView(
        spec=ProxyCertificateSpecView(
            domain=spec.domain,
            provider=spec.provider,
            auto_renew=spec.auto_renew,
            private_key=Secret(set=bool(status.fingerprint)),
        ),
        status=ProxyCertificateStatusView(
            state=status.state,
            names=status.names,
            fingerprint=status.fingerprint,
            issued_at=spelled_or_null(status.issued_at_ns),
            expires_at=spelled_or_null(status.expires_at_ns),
            error=status.error,
            failures=status.failures,
            next_attempt_at=spelled_or_null(status.next_attempt_at_ns),
            alarm=status.alarm,
        ),
    )


class RevokeCertificateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    reason: RevocationReason = RevocationReason.UNSPECIFIED


async def _renew(call: ActionCall) -> Begun | None:
    begun = Begun(resource="certificates", name=call.stored.spec.domain, scope=call.scope)
    actor = call.promise(lambda _: begun)
    await call.domain.certificates.renew(call.stored.scope, call.stored.name, actor=actor)
    return begun


async def _revoke(call: ActionCall) -> Begun | None:
    await call.domain.revoker.revoke(
        call.stored.scope, call.stored.name, reason=call.body.reason, actor=call.actor
    )
    return None


CERTIFICATES = PublicResource(
    name="certificate",
    plural="certificates",
    short=("cert", "certs"),
    summary="A certificate that proxies present",
    kind=CERTIFICATE,
    spec=ProxyCertificateSpecView,
    status=ProxyCertificateStatusView,
    view=certificate_view,
    place=place,
    moves=True,
    permission=access.READ,
    named=lambda certificate, _reading: certificate.spec.domain,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="STATE", value=".status.state"),
        Column(title="PROVIDER", value=".spec.provider"),
        Column(title="EXPIRES", value=".status.expiresAt", type="age"),
        Column(title="ERROR", value=".status.error"),
        Column(title="NAMES", value=".status.names", wide=True),
    ),
    verbs=READING | {ResourceVerb.EXPLAIN},
    actions=(
        ResourceAction(
            name="rotate",
            summary="Order another certificate for the same names",
            permission=access.OPERATE,
            run=_renew,
            anywhere=True,
            takes_time=True,
        ),
        ResourceAction(
            name="revoke",
            summary="Tell the authority that it must not be trusted any more",
            permission=access.OPERATE,
            run=_revoke,
            anywhere=True,
            body=RevokeCertificateBody,
        ),
    ),
    explain="certificate",
    search=(".metadata.name", ".status.names", ".status.fingerprint"),
)
