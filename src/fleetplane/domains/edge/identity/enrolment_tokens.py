"""Enrollment tokens from the operators' side: issued, listed, taken back.

A token is written down when it is issued, by its id and never by its text, so that it can be seen
and revoked before anybody uses it. Using it is `enrolment`'s business.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import msgspec

from fleetplane.domains.edge.identity.tokens import NodeTokens
from fleetplane.domains.edge.kinds import (
    EDGE_NODE,
    ENROLLMENT,
    Enrollment,
    EnrollmentSpec,
    check_tenant,
    tenant_scope,
)
from fleetplane.kernel.access import who
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.ids import check_uuid

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


class EnrolmentTokens:
    def __init__(self, store: Store, clock: Clock, tokens: NodeTokens, *, life_seconds: float) -> None:
        """`life_seconds` is how long a token lives unless its issuer says otherwise."""
        self._store = store
        self._clock = clock
        self._tokens = tokens
        self._life_seconds = life_seconds

    def __repr__(self) -> str:
        return f"<Enrollments {len(self._store.list(ENROLLMENT))}>"

    async def issue(
        self,
        tenant: str,
        issued_to: str = "",
        *,
        life_seconds: float | None = None,
        node_id: str = "",
        replace: bool = False,
        actor: str,
    ) -> Invitation:
        """A token that lets one machine into a tenant, once: a new one, or the one that is named."""
        scope = tenant_scope(check_tenant(tenant))
        node_id = check_uuid(node_id, field="node_id") if node_id else ""
        self._check_node(scope, node_id, replace=replace)
        check_reachable(self._tokens.endpoint)
        life_seconds = self._life_seconds if life_seconds is None else life_seconds
        issued = self._tokens.issue_enrollment(
            tenant, issued_to, life_seconds=life_seconds, node_id=node_id, replace=replace
        )
        spec = EnrollmentSpec(
            issued_to=issued_to.strip(),
            issued_by=who(actor),
            issued_at_ns=issued.issued_at_ns,
            expires_at_ns=issued.expires_at_ns,
            node_id=node_id,
            replace=replace,
        )

        await self._store.transact(
            lambda draft: draft.put(ENROLLMENT, scope, issued.jti, spec=spec),
            actor=actor,
            action="edge.issue_enrollment",
            touches=[ENROLLMENT.key(scope, issued.jti)],
        )
        return Invitation(
            token=issued.token,
            jti=issued.jti,
            expires_at_ns=issued.expires_at_ns,
            controller_endpoint=self._tokens.endpoint,
        )

    def _check_node(self, scope: str, node_id: str, *, replace: bool) -> None:
        """Refuse to make a token that could not be used."""
        if not node_id:
            if replace:
                raise InvalidArgument("is required with replace; name the node to replace", field="node_id")
            return
        node = self._store.get(EDGE_NODE, scope, node_id)
        if node is None:
            return
        if node.spec.revoked_at_ns is not None:
            raise FailedPrecondition(
                f"node {node_id} was revoked", hint=f"`fleetplane edge readmit {node_id}` first"
            )
        if node.spec.public_key and not replace:
            raise AlreadyExists(
                f"node {node_id} exists; its place is taken only by a token made to replace it",
                hint="--replace, or `replace` in REST",
            )

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
                actor=actor,
                action="edge.sweep_enrollments",
                touches=keys,
            )
        return len(ended)


def check_reachable(endpoint: str) -> None:
    """Refuse an endpoint that no other machine could dial. Pure."""
    host = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}").hostname or ""
    try:
        nowhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        nowhere = not host
    if nowhere:
        raise FailedPrecondition(
            f"a token would send daemons to {endpoint or 'no address'!r}, which daemons cannot reach",
            hint="set edge.public_endpoint to the name and port at which daemons reach this server",
        )


def is_open(enrollment: Enrollment, now_ns: int) -> bool:
    """Whether somebody could still use it."""
    spec = enrollment.spec
    return spec.redeemed_at_ns is None and not spec.revoked and spec.expires_at_ns > now_ns


def _forget(draft: Draft, places: list[tuple[str, str]]) -> None:
    for scope, name in places:
        if draft.get(ENROLLMENT, scope, name) is not None:
            draft.delete(ENROLLMENT, scope, name)
