"""Our own authority: for internal names at once, for others never, and for each organisation its own."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from support.instances.certificates_rig import BOSS, Desk, desk

from fleetplane.domains.blueprint import run_both
from fleetplane.domains.proxies.acme.assembly import AcmeOptions, CertificateSide
from fleetplane.domains.proxies.acme.internal import InternalAuthority, is_internal, suffix_faults
from fleetplane.domains.proxies.acme.orders import IssuanceFailed
from fleetplane.domains.proxies.kinds.records import CERTIFICATE, CertificateSpec
from fleetplane.domains.proxies.kinds.values import CertificateState as S
from fleetplane.web.rest.problems import Rejected

SUFFIXES = ("internal", "corp.example.com")


@asynccontextmanager
async def issuing(folder: Path, suffixes: tuple[str, ...] = SUFFIXES) -> AsyncIterator[Desk]:
    """A workspace on a server that issues for internal names."""
    async with desk(folder) as at:
        options = AcmeOptions(internal_suffixes=suffixes)
        made = CertificateSide(
            at.store, at.clock, at.master, options, workspaces=at.workspaces, vault=at.vault
        )
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run_both(made))
            try:
                yield replace(at, certificates=made.certificates)
            finally:
                running.cancel()


def verified(folder: Path, leaf: bytes, root: bytes, name: str, *, asked: str = "-verify_hostname") -> str:
    """What OpenSSL says of a server's certificate, as a client that trusts the root."""
    (folder / "leaf.pem").write_bytes(leaf)
    (folder / "root.pem").write_bytes(root)
    command = ["openssl", "verify", "-purpose", "sslserver", asked, name]
    done = subprocess.run(
        [*command, "-CAfile", "root.pem", "leaf.pem"], cwd=folder, capture_output=True, text=True, check=False
    )
    return "OK" if done.returncode == 0 else done.stderr


async def test_internal_names_get_certificates_that_hold_for_nothing_else(tmp_path: Path) -> None:
    async with issuing(tmp_path) as at:
        for domain, host in (
            ("db.corp.example.com", "db.corp.example.com"),
            ("*.svc.internal", "a.svc.internal"),
        ):
            status = await at.reached(await at.request(domain, provider="internal"), S.ACTIVE, S.FAILED)
            assert status.error == ""
            leaf, root = (
                one.public_bytes(serialization.Encoding.PEM)
                for one in x509.load_pem_x509_certificates(status.chain_pem.encode())
            )
            assert verified(tmp_path, leaf, root, host) == "OK"
            usage = x509.load_pem_x509_certificate(leaf).extensions.get_extension_for_class(
                x509.ExtendedKeyUsage
            )
            assert list(usage.value) == [ExtendedKeyUsageOID.SERVER_AUTH], "nobody logs in with it"
        (secret,) = await at.store.secret_names("proxies/internal-authority/")
        sealed = await at.store.get_secret(secret)
        assert sealed is not None
        assert b"PRIVATE KEY" not in sealed
        key_pem = msgspec.msgpack.decode(at.master.open(sealed, purpose=secret))["key_pem"]
    forged = _forged(key_pem, root, x509.DNSName("www.example.com"))
    assert "permitted subtree violation" in verified(tmp_path, forged, root, "www.example.com")
    for address in ("192.0.2.1", "2001:db8::1"):
        forged = _forged(key_pem, root, x509.IPAddress(ipaddress.ip_address(address)))
        found = verified(tmp_path, forged, root, address, asked="-verify_ip")
        assert "excluded subtree violation" in found


def _forged(key_pem: bytes, root_pem: bytes, name: x509.GeneralName) -> bytes:
    """What somebody who stole the authority's key would make for a public name."""
    key = serialization.load_pem_private_key(key_pem, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate(root_pem)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(issuer.subject)
        .public_key(ec.generate_private_key(ec.SECP256R1()).public_key())
        .serial_number(7)
        .not_valid_before(issuer.not_valid_before_utc)
        .not_valid_after(issuer.not_valid_before_utc + dt.timedelta(days=9))
        .add_extension(x509.SubjectAlternativeName([name]), critical=True)
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


async def test_a_public_name_is_refused_by_its_field_and_by_the_authority_itself(tmp_path: Path) -> None:
    async with issuing(tmp_path) as at:
        for domain in ("www.example.com", "*.example.com", "evilcorp.example.com", "internal.example.org"):
            spec = CertificateSpec(domain=domain, provider="internal", auto_renew=True)
            with pytest.raises(Rejected) as refused:
                await at.certificates.request(at.scope, spec, actor=BOSS)
            assert "domain" in {one.field for one in refused.value.problems}
            with pytest.raises(IssuanceFailed):
                await InternalAuthority(at.store, at.clock, at.master, SUFFIXES).issue(domain, scope=at.scope)
        assert not at.store.list(CERTIFICATE, at.scope)
        assert await at.store.secret_names("proxies/internal-authority/") == []


async def test_organisations_do_not_share_an_authority_and_other_suffixes_are_another_one(
    tmp_path: Path,
) -> None:
    async with issuing(tmp_path) as at:
        other = await at.neighbour("other")
        ours = InternalAuthority(at.store, at.clock, at.master, SUFFIXES)
        wider = InternalAuthority(at.store, at.clock, at.master, (*SUFFIXES, "lan"))
        found = await asyncio.gather(
            ours.issue("a.internal", scope=at.scope),
            ours.issue("b.internal", scope=at.scope),
            ours.issue("a.internal", scope=other.scope),
            wider.issue("a.internal", scope=at.scope),
        )
        roots = [x509.load_pem_x509_certificates(one.chain_pem.encode())[-1] for one in found]
        assert roots[0] == roots[1]
        assert len({one.fingerprint(hashes.SHA256()) for one in roots}) == 3


async def test_without_suffixes_nothing_is_offered(tmp_path: Path) -> None:
    async with issuing(tmp_path, ()) as at:
        with pytest.raises(Rejected) as refused:
            await at.request("a.internal", provider="internal")
        assert "provider" in {one.field for one in refused.value.problems}


@pytest.mark.parametrize(
    "suffix", ["com", "Corp.example.com", "*.example.com", "", "a..b", ".internal", "-x.de"]
)
def test_a_suffix_that_is_not_the_operators_own_is_refused(suffix: str) -> None:
    assert list(suffix_faults([suffix])) != []
    assert list(suffix_faults(SUFFIXES)) == []


def test_a_name_is_internal_by_whole_labels() -> None:
    assert is_internal("internal.corp.example.com", SUFFIXES)
    assert is_internal("*.corp.example.com", SUFFIXES)
    assert is_internal("A.INTERNAL", SUFFIXES)
    assert not is_internal("xinternal", SUFFIXES)
    assert not is_internal("internal.com", SUFFIXES)
