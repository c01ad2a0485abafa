from __future__ import annotations

import base64
import dataclasses
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from support.instances.certificates_rig import BOSS, desk, side, until
from support.proxies.dns_doubles import ZoneFile, powerdns
from support.proxies.pebble_lab import Pebble, pebble
from support.shared.free_ports import free_port

from fleetplane.domains.proxies.acme.dns_provider import ZoneOptions
from fleetplane.domains.proxies.acme.issuers import AccountVault, AcmeAccount
from fleetplane.domains.proxies.kinds.records import CertificateSpec, CertificateStatus, organization_of
from fleetplane.domains.proxies.kinds.values import CertificateState, RevocationReason
from fleetplane.web.rest.problems import Rejected

S = CertificateState
CUSTOMER_KEY = base64.urlsafe_b64encode(b"k" * 32).decode().rstrip("=")
OTHER_KEY = base64.urlsafe_b64encode(b"o" * 32).decode().rstrip("=")


def leaf(status: CertificateStatus) -> x509.Certificate:
    return x509.load_pem_x509_certificate(status.chain_pem.encode())


async def test_a_requested_certificate_is_proved_over_http_and_served(
    tmp_path: Path, authority: Pebble
) -> None:
    async with desk(tmp_path) as at, side(at, authority) as running:
        certificate = await at.request("api.example.test")
        status = await at.reached(certificate, S.ACTIVE, S.FAILED)
        assert (status.state, status.error) == (S.ACTIVE, "")
        assert status.names == ("api.example.test",)
        assert running.board.asked >= 1
        assert running.board.find("anything") is None
        assert "open=0" in repr(running.board)
        newest = at.workspaces.newest(at.scope)
        assert newest is not None
        assert certificate.name in newest.certificates, "agents get it with the next version"
        key = serialization.load_pem_private_key(
            await at.vault.private_key(certificate.name, status.fingerprint), password=None
        )
        assert key.public_key() == leaf(status).public_key()


async def test_a_wildcard_is_proved_over_dns_together_with_its_parent_and_leaves_nothing_behind(
    tmp_path: Path, authority: Pebble
) -> None:
    zone = ZoneFile(authority)
    with powerdns(zone, "wild.test") as options:
        zones = {"wild.test": ZoneOptions(provider="powerdns", options=options)}
        async with desk(tmp_path) as at, side(at, authority, zones=zones) as running:
            certificate = await at.request("*.wild.test")
            status = await at.reached(certificate, S.ACTIVE, S.FAILED)
            assert status.error == ""
            assert set(status.names) == {"*.wild.test", "wild.test"}
            assert zone.names() == []
            assert zone.writes == 4, "two records came and went"
            assert running.board.asked == running.board.unknown, "nobody was sent there"


async def test_a_wildcard_outside_of_every_zone_is_refused_at_once(tmp_path: Path, authority: Pebble) -> None:
    async with desk(tmp_path) as at, side(at, authority) as running:
        spec = CertificateSpec(domain="*.elsewhere.test", provider="letsencrypt", auto_renew=True)
        with pytest.raises(Rejected):
            await running.certificates.request(at.scope, spec, actor=BOSS)


async def test_a_failed_renewal_keeps_the_old_certificate_and_quotes_the_authority(
    tmp_path: Path, authority: Pebble
) -> None:
    async with desk(tmp_path) as at:
        async with side(at, authority):
            certificate = await at.request("keeps.example.test")
            old = await at.reached(certificate, S.ACTIVE)
        version = at.workspaces.newest(at.scope)
        async with side(at, authority, answers=False):
            await at.certificates.renew(at.scope, certificate.name, actor=BOSS)
            failed = await at.reached(certificate, S.FAILED)
        assert "keeps.example.test: urn:ietf:params:acme:error:unauthorized" in failed.error
        assert "404" in failed.error
        assert (failed.fingerprint, failed.chain_pem) == (old.fingerprint, old.chain_pem)
        assert at.workspaces.newest(at.scope) == version
        assert failed.next_attempt_at_ns is not None
        assert 3500 < (failed.next_attempt_at_ns - at.clock.now_ns()) / 1e9 <= 7200
        assert await at.vault.private_key(certificate.name, old.fingerprint)


async def test_one_account_serves_every_order_also_after_a_restart_and_its_key_is_sealed(
    tmp_path: Path, authority: Pebble
) -> None:
    accounts = []
    for domain in ("one.example.test", "two.example.test"):
        async with desk(tmp_path) as at, side(at, authority):
            await at.reached(await at.request(domain), S.ACTIVE)
            accounts.append(
                await AccountVault(at.store, at.master).load_or_create(
                    authority.directory_url, organization_of(at.scope)
                )
            )
            (name,) = await at.store.secret_names("proxies/acme/")
            sealed = await at.store.get_secret(name)
            assert sealed is not None
            assert b"PRIVATE KEY" not in sealed
    assert accounts[0] == accounts[1]
    assert accounts[0].uri.startswith("https://127.0.0.1:")


async def test_an_authority_that_lost_our_account_gets_it_again(tmp_path: Path, authority: Pebble) -> None:
    async with desk(tmp_path) as at:
        vault = AccountVault(at.store, at.master)
        organization = organization_of(at.scope)
        made = await vault.load_or_create(authority.directory_url, organization)
        lost = authority.directory_url.replace("/dir", "/my-account/999999")
        await vault.save(authority.directory_url, organization, AcmeAccount(key_pem=made.key_pem, uri=lost))
        async with side(at, authority):
            status = await at.reached(await at.request("lost.example.test"), S.ACTIVE, S.FAILED)
            assert status.error == ""
        assert (await vault.load_or_create(authority.directory_url, organization)).uri != lost


async def test_a_renewal_brings_another_key_and_a_new_version_and_the_old_one_can_be_revoked(
    tmp_path: Path, authority: Pebble
) -> None:
    async with desk(tmp_path) as at, side(at, authority) as running:
        certificate = await at.request("again.example.test")
        old = await at.reached(certificate, S.ACTIVE)
        version = at.workspaces.newest(at.scope)
        await at.certificates.renew(at.scope, certificate.name, actor=BOSS)
        new = await at.reached(certificate, S.ACTIVE)
        assert leaf(new).serial_number != leaf(old).serial_number
        assert leaf(new).public_key() != leaf(old).public_key()
        newest = at.workspaces.newest(at.scope)
        assert newest is not None
        assert version is not None
        assert newest.version == version.version + 1

        await running.revoke(at.scope, certificate.name, reason=RevocationReason.SUPERSEDED, actor=BOSS)
        assert at.status(certificate).state is S.REVOKED
        assert authority.status_of(leaf(new).serial_number) == "Revoked"
        assert authority.status_of(leaf(old).serial_number) == "Valid"


async def test_nothing_is_ordered_before_someone_agreed_to_the_terms(
    tmp_path: Path, authority: Pebble
) -> None:
    refusing = dataclasses.replace(authority.options, terms_agreed=False)
    async with desk(tmp_path) as at, side(at, authority, authority_options=refusing):
        status = await at.reached(await at.request("terms.example.test"), S.FAILED)
        assert "the terms of service are not accepted" in status.error


async def test_an_authority_that_cannot_be_reached_is_a_failure_like_any_other(
    tmp_path: Path, authority: Pebble
) -> None:
    gone = dataclasses.replace(authority.options, directory_url=f"https://127.0.0.1:{free_port()}/dir")
    async with desk(tmp_path) as at, side(at, authority, authority_options=gone):
        status = await at.reached(await at.request("gone.example.test"), S.FAILED)
        assert "cannot be reached" in status.error


async def test_an_authority_with_a_certificate_of_strangers_is_not_spoken_to(
    tmp_path: Path, authority: Pebble
) -> None:
    strangers = dataclasses.replace(authority.options, ca_file="")
    async with desk(tmp_path) as at, side(at, authority, authority_options=strangers):
        status = await at.reached(await at.request("stranger.example.test"), S.FAILED)
        assert "CERTIFICATE_VERIFY_FAILED" in status.error


async def test_an_authority_without_renewal_information_has_no_opinion(
    tmp_path: Path, authority: Pebble
) -> None:
    async with desk(tmp_path) as at, side(at, authority) as running:
        certificate = await at.request("ari.example.test")
        await at.reached(certificate, S.ACTIVE)
        found = await until(lambda: running.controller.reconciler.explain(certificate.name))
        assert found.reasons == (), "valid for long enough"
        assert found.failures == 0


async def test_an_authority_for_customers_is_shown_that_we_are_one(tmp_path: Path) -> None:
    (folder := tmp_path / "authority").mkdir()
    with pebble(folder, customers={"customer-1": CUSTOMER_KEY}) as strict:
        shown = {
            "unknown": strict,
            "wrong": dataclasses.replace(strict, eab_key_id="customer-1", eab_hmac_key=OTHER_KEY),
            "right": dataclasses.replace(strict, eab_key_id="customer-1", eab_hmac_key=CUSTOMER_KEY),
        }
        told = {}
        for name, authority in shown.items():
            (place := tmp_path / name).mkdir()
            async with desk(place) as at, side(at, authority):
                certificate = await at.request(f"{name}.example.test")
                status = await at.reached(certificate, S.ACTIVE, S.FAILED)
                told[name] = (status.state, status.error)
    assert told["unknown"] == (S.FAILED, "the authority wants an external account binding")
    assert told["wrong"][0] is S.FAILED
    assert told["right"] == (S.ACTIVE, "")


async def test_a_self_signed_certificate_needs_nobody(tmp_path: Path, authority: Pebble) -> None:
    async with desk(tmp_path) as at, side(at, authority) as running:
        certificate = await at.request("*.dev.test", provider="selfsigned")
        status = await at.reached(certificate, S.ACTIVE)
        assert set(status.names) == {"*.dev.test", "dev.test"}
        made = leaf(status)
        made.verify_directly_issued_by(made)
        assert running.board.asked == running.board.unknown, "nobody was sent there"
        assert await at.store.secret_names("proxies/acme/") == []
