"""The certificate authority, and the one that follows or preceded it.

There are two of them: one for the fleet itself (`FLEET`: listeners, agents, operators) and one for what
workloads on instances show each other (`WORKLOAD`), which no listener of ours trusts. Keys that are made
here are ECDSA P-256; one that is imported may be Ed25519. A client's role and tenant stand in its
certificate, so that who presents it needs no look-up. One authority signs; while it is being
replaced another is trusted beside it, in the steps of `succession`. Knows no HTTP and no
listeners: whoever holds trust open subscribes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument
from fleetplane.kernel.identity.certificates import LeafProfile, LeafUsage, host_name, subject
from fleetplane.kernel.identity.master_key import NO_VERSION, HeldSecret, MasterKey, SealedSecret
from fleetplane.kernel.identity.roots import (
    BACKDATE,
    Succession,
    SuccessionPhase,
    authority_key_identifier,
    cross_signed,
    key_id_of,
    key_usage,
    make_root,
    may_sign_authorities,
    private_key,
    read_root,
    signature_hash,
    unpack,
    write_root,
)
from fleetplane.kernel.store import Store
from fleetplane.kernel.unbroken import run_to_completion

SERVER_LIFE = timedelta(days=397)  # the longest that browsers accept
ACTOR = "system/identity"
URI_ROLE = "fleetplane://role/"
URI_TENANT = "fleetplane://tenant/"

PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorityPurpose:
    """What an authority signs for; each has a key of its own."""

    secret: str
    """The name under which it is kept in the store."""
    title: str
    """Begins the common name of its certificate."""


FLEET = AuthorityPurpose(secret="authority", title="Fleetplane CA")  # noqa: S106  # a name, not a secret
WORKLOAD = AuthorityPurpose(
    secret="workload-authority",  # noqa: S106
    title="Fleetplane workload CA",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCertificate:
    """A certificate with its chain, and the private key where we made it."""

    certificate_pem: bytes
    key_pem: bytes | None
    not_after: datetime
    serial: int
    issuer_key_id: str
    """Of the authority that signed it."""

    @property
    def leaf_pem(self) -> bytes:
        """The certificate alone, without the authority's behind it."""
        end = b"-----END CERTIFICATE-----\n"
        return self.certificate_pem.partition(end)[0] + end


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedAuthority:
    """One authority that is trusted now."""

    key_id: str
    """As it stands in the certificates that it signs, in hexadecimal."""
    certificate: x509.Certificate
    signs: bool


class Authority:
    """See `load_or_create`; the constructor takes what has been loaded."""

    def __init__(
        self,
        succession: Succession,
        *,
        store: Store,
        master: MasterKey,
        clock: Clock,
        purpose: AuthorityPurpose = FLEET,
        version: str = NO_VERSION,
    ) -> None:
        self._purpose = purpose
        kept = SealedSecret(store, master, name=purpose.secret)
        self._held = HeldSecret(kept, version=version, use=lambda content: self._taken(unpack(content)))
        self._clock = clock
        self._subscribers: list[Callable[[], None]] = []
        self._use(succession)
        store.keep_fresh(self._held)

    def __repr__(self) -> str:
        subject = self._certificate.subject.rfc4514_string()
        return f"<Authority {subject} until {self._certificate.not_valid_after_utc:%F} {self.phase}>"

    @classmethod
    async def load_or_create(
        cls, store: Store, master: MasterKey, clock: Clock, *, purpose: AuthorityPurpose = FLEET
    ) -> Authority:
        """The authority kept in the store, made at first start: by one of all servers."""

        async def made() -> bytes:
            now_ns = clock.now_ns()
            current = make_root(_now(clock), title=purpose.title)
            return msgspec.msgpack.encode(
                Succession(current=current, trusted_since_ns=now_ns, signing_since_ns=now_ns)
            )

        found = await SealedSecret(store, master, name=purpose.secret).read_or_make(
            made, actor=ACTOR, action=f"identity.create-{purpose.secret}"
        )
        return cls(
            unpack(found.content),
            store=store,
            master=master,
            clock=clock,
            purpose=purpose,
            version=found.version,
        )

    def _use(self, succession: Succession) -> None:
        assert succession.current.private_der is not None
        self._succession = succession
        self._key = private_key(succession.current.private_der)
        self._members = tuple(
            TrustedAuthority(key_id=key_id_of(certificate), certificate=certificate, signs=index == 0)
            for index, certificate in enumerate(
                x509.load_der_x509_certificate(record.certificate_der) for record in succession.trusted
            )
        )
        self._certificate = self._members[0].certificate
        self._accepted = frozenset(member.key_id for member in self._members)
        self._trust_id = hashlib.sha256(" ".join(sorted(self._accepted)).encode()).hexdigest()[:16]

    # Trust.

    @property
    def certificate_pem(self) -> bytes:
        """Of the authority that signs now."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def _issuer_pem(self) -> bytes:
        """What stands behind a leaf: signed by the authority before, while some trust that one alone."""
        cross = self._succession.cross_der
        certificate = self._certificate if cross is None else x509.load_der_x509_certificate(cross)
        return certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_id(self) -> str:
        """Of the authority that signs now."""
        return self._members[0].key_id

    @property
    def members(self) -> Sequence[TrustedAuthority]:
        """All that are trusted now, the one that signs first."""
        return self._members

    @property
    def trust_pem(self) -> bytes:
        """The certificates of all that are trusted now: what others should believe in."""
        return b"".join(
            member.certificate.public_bytes(serialization.Encoding.PEM) for member in self._members
        )

    @property
    def trust_id(self) -> str:
        """A name for the set of those that are trusted, whatever their order."""
        return self._trust_id

    def accepts(self, key_id: str) -> bool:
        """Whether certificates by the authority with this key are still good."""
        return key_id in self._accepted

    # Succession.

    @property
    def phase(self) -> SuccessionPhase:
        return self._succession.phase

    @property
    def trusted_since_ns(self) -> int:
        """When the set of those that are trusted last changed; 0 if that was not written down."""
        return self._succession.trusted_since_ns

    @property
    def signing_since_ns(self) -> int:
        """When the authority that signs now began to; 0 if that was not written down."""
        return self._succession.signing_since_ns

    @property
    def changes(self) -> int:
        """How often the set of those that are trusted has changed."""
        return self._succession.changes

    async def announce(self, *, actor: str) -> None:
        """Make the next authority and trust it; it signs nothing yet."""
        async with self._held.changing:
            made = make_root(_now(self._clock), title=self._purpose.title)
            following = self._succession.announce(made, now_ns=self._clock.now_ns())
            await self._take(following, actor=actor, action=f"identity.announce-{self._purpose.secret}")

    def check(self, certificate_pem: bytes, key_pem: bytes) -> None:
        """Refuse what `adopt` would refuse."""
        brought = read_root(certificate_pem, key_pem, now=_now(self._clock))
        if any(record.certificate_der == brought.certificate_der for record in self._succession.trusted):
            raise FailedPrecondition(
                "this authority is trusted here already", hint="fleetplane instances ca status"
            )

    async def adopt(self, certificate_pem: bytes, key_pem: bytes, *, actor: str) -> None:
        """Announce an authority that exists elsewhere, such as an older fleet's or another server's."""
        brought = read_root(certificate_pem, key_pem, now=_now(self._clock))
        async with self._held.changing:
            self.check(certificate_pem, key_pem)
            following = self._succession.announce(brought, now_ns=self._clock.now_ns())
            await self._take(following, actor=actor, action=f"identity.adopt-{self._purpose.secret}")

    async def export(self, *, actor: str) -> bytes:
        """Certificate and private key of the newest authority, for another server of the same cluster."""
        async with self._held.changing:
            record = self._succession.following or self._succession.current
            # Written anew as it is, so that the audit log tells who has its key now.
            action = f"identity.export-{self._purpose.secret}"
            await self._held.replace(msgspec.msgpack.encode(self._succession), actor=actor, action=action)
            return write_root(record)

    @property
    def vouches(self) -> bool:
        """Whether the one that signs now can vouch for its successor to those who trust it alone."""
        return may_sign_authorities(self._certificate)

    async def switch(self, *, actor: str) -> None:
        """Sign with the announced authority; the key of the one before is destroyed.

        Before that it signs the certificate of its successor, where its own certificate allows it: who
        trusts the old one alone verifies what the new one signs through that.
        """
        async with self._held.changing:
            switched = self._succession.switch(now_ns=self._clock.now_ns(), cross_der=self._cross_der())
            await self._take(switched, actor=actor, action=f"identity.switch-{self._purpose.secret}")

    def _cross_der(self) -> bytes | None:
        following = self._succession.following
        if following is None or not self.vouches:
            return None
        successor = x509.load_der_x509_certificate(following.certificate_der)
        return cross_signed(successor, by=self._certificate, key=self._key, now=_now(self._clock))

    async def retire(self, *, actor: str) -> None:
        """Trust the authority before the present one no more."""
        async with self._held.changing:
            retired = self._succession.retire(now_ns=self._clock.now_ns())
            await self._take(retired, actor=actor, action=f"identity.retire-{self._purpose.secret}")

    async def _take(self, succession: Succession, *, actor: str, action: str) -> None:
        await run_to_completion(self._step(succession, actor=actor, action=action))

    async def _step(self, succession: Succession, *, actor: str, action: str) -> None:
        await self._held.replace(msgspec.msgpack.encode(succession), actor=actor, action=action)
        self._taken(succession)

    def _taken(self, succession: Succession) -> None:
        """Use what follows, of this server or of another."""
        self._use(succession)
        for subscriber in tuple(self._subscribers):
            subscriber()

    def subscribe(self, subscriber: Callable[[], None]) -> Callable[[], None]:
        """Be told after each step; returns how to stop that. Must neither block nor raise."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    # Issuing.

    def issue_server(self, names: Iterable[str]) -> IssuedCertificate:
        """A server's certificate for host names and addresses, with a key of its own."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [host_name(name) for name in names]
        name = subject([("name", NameOID.COMMON_NAME, ["fleetplane server"])])
        builder = self._builder(name, key.public_key(), SERVER_LIFE)
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([LeafUsage.SERVER.oid]), critical=False)
        return self._sign(builder, _key_pem(key))

    def issue_client(
        self,
        public_key: PublicKey,
        *,
        name: str,
        life: timedelta,
        role: str = "",
        tenant: str = "",
        organization: str | None = None,
        extensions: Iterable[x509.UnrecognizedExtension] = (),
        uris: bool = True,
        serial: int | None = None,
        backdate: timedelta = BACKDATE,
    ) -> IssuedCertificate:
        """A client's certificate for a key that never left it.

        Role and tenant stand in it as URIs; without `uris` it has no alternative names at all,
        for clients whose role is told by one of `extensions` and whose tenant by `organization`.
        """
        parts = [("organization", NameOID.ORGANIZATION_NAME, [organization] if organization else [])]
        parts.append(("name", NameOID.COMMON_NAME, [name]))
        builder = self._builder(subject(parts), public_key, life, serial=serial, backdate=backdate)
        builder = builder.add_extension(key_usage(digital_signature=True), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([LeafUsage.CLIENT.oid]), critical=False)
        if uris:
            names = [
                x509.UniformResourceIdentifier(URI_ROLE + role),
                x509.UniformResourceIdentifier(URI_TENANT + tenant),
            ]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return self._sign(builder, None)

    def issue_leaf(
        self, public_key: PublicKey, profile: LeafProfile, *, serial: int | None = None
    ) -> IssuedCertificate:
        """A certificate as someone configured it, for a key that never left its owner."""
        builder = self._builder(profile.name(), public_key, profile.life, serial=serial, backdate=BACKDATE)
        builder = builder.add_extension(key_usage(digital_signature=True), critical=True)
        usages = x509.ExtendedKeyUsage([usage.oid for usage in profile.usages])
        builder = builder.add_extension(usages, critical=False)
        if alternatives := profile.alternatives():
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        return self._sign(builder, None)

    def sign(self, content: bytes) -> bytes:
        """A signature by the authority itself, for what agents believe by it.

        The content must begin with the purpose it is for, and not as a certificate does.
        """
        assert content.startswith(b"fleetplane/"), "a signature is made for one purpose"
        if isinstance(self._key, ed25519.Ed25519PrivateKey):
            return self._key.sign(content)
        return self._key.sign(content, ec.ECDSA(hashes.SHA256()))

    def _builder(
        self,
        name: x509.Name,
        public_key: PublicKey,
        life: timedelta,
        *,
        serial: int | None = None,
        backdate: timedelta = BACKDATE,
    ) -> x509.CertificateBuilder:
        _check_key(public_key)
        now = _now(self._clock)
        not_after = min(now + life, self._certificate.not_valid_after_utc)
        if not_after <= now:
            raise InvalidArgument("a certificate must be valid for some time to come")
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._certificate.subject)
            .public_key(public_key)
            .serial_number(serial if serial is not None else x509.random_serial_number())
            .not_valid_before(now - backdate)
            .not_valid_after(not_after)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(authority_key_identifier(self._certificate), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        )

    def _sign(self, builder: x509.CertificateBuilder, key_pem: bytes | None) -> IssuedCertificate:
        certificate = builder.sign(self._key, signature_hash(self._key))
        chain = certificate.public_bytes(serialization.Encoding.PEM) + self._issuer_pem
        return IssuedCertificate(
            certificate_pem=chain,
            key_pem=key_pem,
            not_after=certificate.not_valid_after_utc,
            serial=certificate.serial_number,
            issuer_key_id=self.key_id,
        )


def _check_key(key: PublicKey) -> None:
    if isinstance(key, ec.EllipticCurvePublicKey) and not isinstance(key.curve, ec.SECP256R1):
        raise InvalidArgument(f"keys on {key.curve.name} are not accepted", hint="use P-256 or Ed25519")


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _now(clock: Clock) -> datetime:
    return datetime.fromtimestamp(clock.now_ns() // 1_000_000_000, UTC)
