"""Certificates that were issued in the name of this domain, as records: numbered, listed, revoked.

A record is written in the transaction that hands its certificate out. Whether one is still good is
decided by the kernel's revocations and the clock; the record says so for those who list them.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fleetplane.domains.boards.inventory.numbers import Numbers
from fleetplane.domains.boards.kinds import (
    CERTIFICATE,
    SCOPE,
    BoardCertificateSpec,
    BoardCertificateStatus,
    Certificate,
    number_of,
)
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.identity import IssuedCertificate
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import ABSENT, Draft, Store

_USAGES = {
    ExtendedKeyUsageOID.SERVER_AUTH: "server_auth",
    ExtendedKeyUsageOID.CLIENT_AUTH: "client_auth",
}


class IssuedCertificates:
    def __init__(self, store: Store, revocations: Revocations) -> None:
        self._store = store
        self._revocations = revocations
        self.numbers = Numbers(store, "certificate")

    def __repr__(self) -> str:
        return f"<Certificates {len(self._store.list(CERTIFICATE, SCOPE))}>"

    def get(self, number: int) -> Certificate | None:
        return self._store.get(CERTIFICATE, SCOPE, str(number))

    def by_serial(self, serial: str) -> Certificate | None:
        """`serial` in hexadecimal."""
        owner = self._store.claimed_by(CERTIFICATE, SCOPE, "serial", serial.lower())
        return self.get(int(owner)) if owner is not None else None

    def all(self) -> Sequence[Certificate]:
        return sorted(self._store.list(CERTIFICATE, SCOPE), key=number_of)

    def touches(self, number: int) -> list[Key]:
        """What a transaction that records one must announce."""
        return [CERTIFICATE.key(SCOPE, str(number)), self.numbers.key]

    def record(self, draft: Draft, number: int, spec: BoardCertificateSpec) -> Certificate:
        """Inside the transaction that hands it out; the number was taken before."""
        self.numbers.record(draft, number)
        draft.claim(CERTIFICATE, SCOPE, "serial", spec.serial, str(number))
        return draft.put(
            CERTIFICATE, SCOPE, str(number), spec=spec, status=BoardCertificateStatus(), expect=ABSENT
        )

    async def revoke(self, number: int, *, reason: str, actor: str) -> Certificate:
        """Refuse it, and every other of the same key, from now on and on every listener.

        What is open with it is closed. Agents that accept callers learn of it with their next heartbeat.
        """
        kept = self.get(number)
        if kept is None:
            raise NotFound(f"certificate {number} is not known", field="id")
        for other in self._of_same_key(kept):
            await self._revoke(other, reason=reason, actor=actor)
        return await self._revoke(kept, reason=reason, actor=actor)

    def _of_same_key(self, kept: Certificate) -> list[Certificate]:
        """What its holder got by renewing it, or had before: one who is kept out is kept out with all."""
        key = _key_of(kept)
        return [
            other
            for other in self.all()
            if other.name != kept.name
            and other.spec.common_name == kept.spec.common_name
            and is_standing(other)
            and _key_of(other) == key
        ]

    async def _revoke(self, kept: Certificate, *, reason: str, actor: str) -> Certificate:
        number = number_of(kept)
        await self._revocations.revoke(
            serial=int(kept.spec.serial, 16),
            reason=reason,
            actor=actor,
            expires_at_ns=kept.spec.not_after_ns,
        )

        def change(draft: Draft) -> Certificate:
            found = draft.get(CERTIFICATE, SCOPE, str(number))
            if found is None:
                raise NotFound(f"certificate {number} is not known", field="id")
            if found.status is not None and found.status.revoked_at_ns is not None:
                return found
            status = BoardCertificateStatus(revoked_at_ns=draft.now_ns, revoked_reason=reason)
            return draft.put(CERTIFICATE, SCOPE, found.name, spec=found.spec, status=status)

        done = await self._store.transact(
            change,
            actor=actor,
            action="boards.revoke_certificate",
            touches=[CERTIFICATE.key(SCOPE, str(number))],
        )
        return done.value

    async def revoke_of_board(self, board: int, *, but: str = "", reason: str, actor: str) -> None:
        """All of a board's certificates, except the one with the serial `but`."""
        for kept in self.all():
            if kept.spec.board == board and kept.spec.serial != but and is_standing(kept):
                await self._revoke(kept, reason=reason, actor=actor)


def _key_of(kept: Certificate) -> bytes:
    key = x509.load_pem_x509_certificate(kept.spec.pem.encode()).public_key()
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def is_standing(kept: Certificate) -> bool:
    return kept.status is None or kept.status.revoked_at_ns is None


def described(
    issued: IssuedCertificate,
    *,
    board: int | None = None,
    cluster_id: int | None = None,
    auto_renew: bool = False,
) -> BoardCertificateSpec:
    """What is kept of a certificate, read from the certificate itself."""
    leaf = x509.load_pem_x509_certificate(issued.leaf_pem)
    names = leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    usages = _extended(leaf)
    return BoardCertificateSpec(
        serial=f"{leaf.serial_number:x}",
        common_name=str(names[0].value) if names else "",
        subject=leaf.subject.rfc4514_string(),
        issuer=leaf.issuer.rfc4514_string(),
        pem=issued.leaf_pem.decode(),
        not_before_ns=round(leaf.not_valid_before_utc.timestamp() * 1e9),
        not_after_ns=round(leaf.not_valid_after_utc.timestamp() * 1e9),
        purpose="client" if "client_auth" in usages else "server",
        sans=_alternatives(leaf),
        key_usage=("digital_signature",),
        ext_key_usage=usages,
        board=board,
        cluster_id=cluster_id,
        auto_renew=auto_renew,
    )


def _extended(leaf: x509.Certificate) -> tuple[str, ...]:
    try:
        found = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(_USAGES.get(oid, oid.dotted_string) for oid in found)


def _alternatives(leaf: x509.Certificate) -> tuple[str, ...]:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(name.value) for name in names)
