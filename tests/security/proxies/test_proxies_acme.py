"""An authority that remembers proofs must not turn one tenant's into another tenant's certificate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.instances.certificates_rig import BOSS, desk, side
from support.proxies.dns_doubles import ZoneFile, powerdns
from support.proxies.pebble_lab import Pebble, pebble

from fleetplane.domains.proxies.acme.dns_provider import ZoneOptions
from fleetplane.domains.proxies.acme.issuers import AccountVault
from fleetplane.domains.proxies.kinds.records import VirtualHostSpec, organization_of, workspace_of
from fleetplane.domains.proxies.kinds.values import CertificateState
from fleetplane.domains.proxies.serving.hosts import Hosts

S = CertificateState


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pebble]:
    """Asks for no proof of anything that the account has proved before."""
    with pebble(tmp_path_factory.mktemp("pebble"), authorizations_reused_percent=100) as found:
        yield found


async def test_a_name_that_one_tenant_proved_is_never_certified_for_another(
    tmp_path: Path, authority: Pebble
) -> None:
    async with desk(tmp_path) as a, side(a, authority) as running:
        mine = await a.request("shop.tenant-a.test")
        assert (await a.reached(mine, S.ACTIVE, S.FAILED)).error == ""
        b = await a.neighbour("tenant-b")
        asked = running.board.asked
        theirs = await b.request("shop.tenant-a.test")
        refused = await b.reached(theirs, S.ACTIVE, S.FAILED)
        assert refused.state is S.FAILED
        assert refused.fingerprint == ""
        assert "belongs to another workspace" in refused.error
        assert running.board.asked == asked, "nothing was ordered"


async def test_each_organisation_has_an_account_of_its_own(tmp_path: Path, authority: Pebble) -> None:
    async with desk(tmp_path) as a, side(a, authority):
        b = await a.neighbour("tenant-b")
        for one, domain in ((a, "one.accounts.test"), (b, "two.accounts.test")):
            assert (await one.reached(await one.request(domain), S.ACTIVE, S.FAILED)).error == ""
        vault = AccountVault(a.store, a.master)
        found = [
            await vault.load_or_create(authority.directory_url, organization_of(one.scope)) for one in (a, b)
        ]
        assert found[0].uri != found[1].uri
        assert found[0].key_pem != found[1].key_pem


async def test_what_a_workspace_proved_has_to_be_proved_again_by_the_next_one(
    tmp_path: Path, authority: Pebble
) -> None:
    """Workspaces of one organisation share an account, and so what the authority remembers."""
    async with desk(tmp_path) as first:
        second = await first.neighbour("second", organization=organization_of(first.scope))
        async with side(first, authority):
            certificate = await first.request("moves.tenant-a.test")
            assert (await first.reached(certificate, S.ACTIVE, S.FAILED)).error == ""
            await first.certificates.delete(first.scope, certificate.name, if_match=None, actor=BOSS)
        async with side(first, authority, answers=False):
            refused = await second.reached(await second.request("moves.tenant-a.test"), S.ACTIVE, S.FAILED)
            assert refused.state is S.FAILED, "no challenge was answered, so nothing was proved"
            assert "unauthorized" in refused.error
        async with side(first, authority) as running:
            proved = await second.reached(await second.request("also.tenant-a.test"), S.ACTIVE, S.FAILED)
            assert proved.error == ""
            assert running.board.asked >= 1


async def test_a_renewal_is_proved_afresh(tmp_path: Path, authority: Pebble) -> None:
    async with desk(tmp_path) as at, side(at, authority) as running:
        certificate = await at.request("renewed.tenant-a.test")
        old = await at.reached(certificate, S.ACTIVE)
        asked = running.board.asked
        await at.certificates.renew(at.scope, certificate.name, actor=BOSS)
        new = await at.reached(certificate, S.ACTIVE, S.FAILED)
        assert (new.error, new.fingerprint != old.fingerprint) == ("", True)
        assert running.board.asked > asked


async def test_wildcards_and_what_they_cover_stay_with_the_tenant_that_proved_them(
    tmp_path: Path, authority: Pebble
) -> None:
    zone = ZoneFile(authority)
    with powerdns(zone, "wild-a.test") as options:
        zones = {"wild-a.test": ZoneOptions(provider="powerdns", options=options)}  # everyone's
        async with desk(tmp_path) as a, side(a, authority, zones=zones) as running:
            mine = await a.request("*.wild-a.test")
            assert (await a.reached(mine, S.ACTIVE, S.FAILED)).error == ""
            b = await a.neighbour("tenant-b")
            writes, asked = zone.writes, running.board.asked
            for domain in ("*.wild-a.test", "wild-a.test", "any.wild-a.test"):
                refused = await b.reached(await b.request(domain), S.ACTIVE, S.FAILED)
                assert (refused.state, refused.fingerprint) == (S.FAILED, ""), domain
                assert "belongs to another workspace" in refused.error
            assert (zone.writes, running.board.asked) == (writes, asked), "nothing was ordered"


async def test_a_wildcard_never_covers_a_name_of_another_tenant(tmp_path: Path, authority: Pebble) -> None:
    zone = ZoneFile(authority)
    with powerdns(zone, "wild-c.test") as options:
        zones = {"wild-c.test": ZoneOptions(provider="powerdns", options=options)}
        async with desk(tmp_path) as a, side(a, authority, zones=zones):
            assert (await a.reached(await a.request("shop.wild-c.test"), S.ACTIVE, S.FAILED)).error == ""
            b = await a.neighbour("tenant-b")
            refused = await b.reached(await b.request("*.wild-c.test"), S.ACTIVE, S.FAILED)
            assert (refused.state, refused.fingerprint) == (S.FAILED, "")
            assert zone.writes == 0


async def test_a_zone_of_other_workspaces_is_refused_before_anything_is_ordered(
    tmp_path: Path, authority: Pebble
) -> None:
    zone = ZoneFile(authority)
    async with desk(tmp_path) as a:
        second = await a.neighbour("second", organization=organization_of(a.scope))
        with powerdns(zone, "wild-d.test") as options:
            only = ZoneOptions(
                provider="powerdns", options=options, workspaces=frozenset({workspace_of(a.scope)})
            )
            async with side(a, authority, zones={"wild-d.test": only}):
                mine = await a.request("*.wild-d.test")
                assert (await a.reached(mine, S.ACTIVE, S.FAILED)).error == ""
                await a.certificates.delete(a.scope, mine.name, if_match=None, actor=BOSS)
                refused = await second.reached(await second.request("*.wild-d.test"), S.ACTIVE, S.FAILED)
                assert (refused.state, refused.fingerprint) == (S.FAILED, "")
                assert "no DNS provider is set up" in refused.error


@pytest.mark.parametrize("server_name", ["shop.served-a.test", "other.test .served-a.test"])
async def test_a_name_that_anothers_host_serves_is_not_proved_through_agents_that_do_not_say_whose_they_are(
    tmp_path: Path, authority: Pebble, server_name: str
) -> None:
    async with desk(tmp_path) as a, side(a, authority) as running:
        spec = VirtualHostSpec(name="shop", server_name=server_name, listen_port=80)
        await Hosts(a.store, a.clock, a.workspaces).create(a.scope, spec, actor=BOSS)
        b = await a.neighbour("tenant-b")
        refused = await b.reached(await b.request("shop.served-a.test"), S.ACTIVE, S.FAILED)
        assert (refused.state, refused.fingerprint) == (S.FAILED, "")
        assert "proxies.challenge_address" in refused.error
        assert running.board.asked == 0, "nothing was ordered"
        assert (await a.reached(await a.request("shop.served-a.test"), S.ACTIVE, S.FAILED)).error == ""
