"""Enrollment tokens from the operators' side: issued, listed, taken back.

A token is written down when it is issued, by its id and never by its text, so that it can be seen
and revoked before anybody uses it. Using it is `enrolment`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from fleetplane.domains.edge.kinds import (
    ENROLLMENT,
    Enrollment,
    EnrollmentSpec,
    check_tenant,
    tenant_scope,
)
from fleetplane.domains.edge.tokens import NodeTokens
from fleetplane.kernel.actors import who
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, NotFound
from fleetplane.kernel.store import Draft, Store

KEPT_SECONDS = 7 * 86_400.0
"""How long a token that is of no more use stays listed."""
SWEEP_BATCH = 256
QR_SCHEME = "aegis-edge-enroll://"
COMMAND = "fleetplane agent edge enroll "
SHIPPED_COMMAND = "aegis edge enroll "
"""What the first command line wants to be shown, also as the QR code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """An enrollment token with everything that helps to use it. The only time its text is shown."""

    token: str
    jti: str
    expires_at_ns: int
    controller_endpoint: str

    @property
    def qr_payload(self) -> str:
        return QR_SCHEME + self.token

    @property
    def command_hint(self) -> str:
        return COMMAND + self.token

    @property
    def shipped_hint(self) -> str:
        return SHIPPED_COMMAND + self.token


class Enrollments:
    def __init__(self, store: Store, clock: Clock, tokens: NodeTokens, *, life_seconds: float) -> None:
        """`life_seconds` is how long a token lives unless its issuer says otherwise."""
        self._store = store
        self._clock = clock
        self._tokens = tokens
        self._life_seconds = life_seconds

    def __repr__(self) -> str:
        return f"<Enrollments {len(self._store.list(ENROLLMENT))}>"

    async def issue(
        self, tenant: str, issued_to: str = "", *, life_seconds: float | None = None, actor: str
    ) -> Invitation:
        """A token that lets one machine into a tenant, once."""
        scope = tenant_scope(check_tenant(tenant))
        life_seconds = self._life_seconds if life_seconds is None else life_seconds
        issued = self._tokens.issue_enrollment(tenant, issued_to, life_seconds=life_seconds)
        spec = EnrollmentSpec(
            issued_to=issued_to.strip(), issued_by=who(actor), issued_at_ns=issued.issued_at_ns,
            expires_at_ns=issued.expires_at_ns,
        )  # fmt: skip

        await self._store.transact(
            lambda draft: draft.put(ENROLLMENT, scope, issued.jti, spec=spec),
            actor=actor, action="edge.issue_enrollment",
            touches=[ENROLLMENT.key(scope, issued.jti)],
        )  # fmt: skip
        return Invitation(
            token=issued.token, jti=issued.jti, expires_at_ns=issued.expires_at_ns,
            controller_endpoint=self._tokens.endpoint,
        )  # fmt: skip

    def list(self, tenant: str) -> Sequence[Enrollment]:
        return self._store.list(ENROLLMENT, tenant_scope(tenant))

    async def revoke(self, tenant: str, jti: str, *, actor: str) -> Enrollment:
        """Refuse a token that was not used yet. Revoking again changes nothing."""
        scope = tenant_scope(tenant)

        def change(draft: Draft) -> Enrollment:
            found = draft.get(ENROLLMENT, scope, jti)
            if found is None:
                raise NotFound(f"there is no enrollment token {jti[:80]!r}")
            if found.spec.redeemed_at_ns is not None:
                raise FailedPrecondition(
                    "the token was used already", hint=f"revoke the node {found.spec.redeemed_by} instead"
                )
            return draft.put(ENROLLMENT, scope, jti, spec=msgspec.structs.replace(found.spec, revoked=True))

        done = await self._store.transact(
            change, actor=actor, action="edge.revoke_enrollment", touches=[ENROLLMENT.key(scope, jti)]
        )
        return done.value

    async def sweep(self, *, actor: str = "system/edge") -> int:
        """Forget tokens that have been of no use for long; how many."""
        before_ns = self._clock.now_ns() - round(KEPT_SECONDS * 1e9)
        ended = [found.key for found in self._store.list(ENROLLMENT) if found.spec.expires_at_ns < before_ns]
        for start in range(0, len(ended), SWEEP_BATCH):
            keys = ended[start : start + SWEEP_BATCH]
            await self._store.transact(
                partial(_forget, places=[(key.scope, key.name) for key in keys]),
                actor=actor, action="edge.sweep_enrollments", touches=keys,
            )  # fmt: skip
        return len(ended)


def is_open(enrollment: Enrollment, now_ns: int) -> bool:
    """Whether somebody could still use it."""
    spec = enrollment.spec
    return spec.redeemed_at_ns is None and not spec.revoked and spec.expires_at_ns > now_ns


def _forget(draft: Draft, places: list[tuple[str, str]]) -> None:
    for scope, name in places:
        if draft.get(ENROLLMENT, scope, name) is not None:
            draft.delete(ENROLLMENT, scope, name)
