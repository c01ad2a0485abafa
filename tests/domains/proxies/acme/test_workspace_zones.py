"""DNS zones of a workspace: they prove its names and no one else's, and their credentials never come out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.instances.certificates_rig import BOSS, desk
from support.proxies.dns_doubles import ZoneFile, powerdns
from support.proxies.pebble_lab import Pebble
from support.proxies.proxy_api import rest_api

from fleetplane.domains.blueprint import run_both
from fleetplane.domains.proxies.acme.assembly import AcmeOptions, CertificateSide
from fleetplane.domains.proxies.acme.orders import IssuanceFailed
from fleetplane.domains.proxies.kinds.values import CertificateState as S
from fleetplane.domains.proxies.serving.dns_zones import DnsZoneRecords
from fleetplane.web.rest.problems import Rejected

SECRET = "s3cr3t-of-the-zone"
GIVEN = {"zone": "Example.com.", "provider": "cloudflare", "credentials": {"auth_token": SECRET}}


async def test_credentials_go_in_over_rest_and_never_come_out(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        boss, operator = await api.person(organization, "admin"), await api.person(organization, "operator")
        stranger = await api.person((await api.workspace())[0], "owner")
        many = f"/workspaces/{workspace}/dns-zones"
        made = await boss.post(many, GIVEN)
        one = f"/dns-zones/{made['id']}"
        assert (made["zone"], made["provider"], made["workspace_id"]) == (
            "example.com",
            "cloudflare",
            workspace,
        )
        for answer in (
            await boss.call("GET", many),
            await operator.call("GET", one),
            await boss.call("PATCH", one, {"credentials": {"auth_token": f"{SECRET}-2"}}),
            await boss.call("GET", f"/organizations/{organization}/audit-log"),
        ):
            assert answer.status_code == 200
            assert SECRET not in answer.text
        assert (await boss.refused("POST", many, GIVEN))[0] == 409, "a workspace has a zone once"
        assert (await operator.refused("POST", many, GIVEN))[0] == 403
        assert (await operator.refused("DELETE", one))[0] == 403
        for method, path, body in (
            ("GET", many, None),
            ("GET", one, None),
            ("PATCH", one, {"credentials": {"auth_token": "mine"}}),
            ("DELETE", one, None),
        ):
            assert (await stranger.refused(method, path, body))[0] in (403, 404)
        sealed = await api.store.get_secret(f"proxies/dns-zone/{made['id']}")
        assert sealed is not None
        assert SECRET.encode() not in sealed
        assert (await boss.refused("DELETE", f"/workspaces/{workspace}"))[0] == 409, "it still has a zone"
        await boss.call("DELETE", one)
        assert await api.store.get_secret(f"proxies/dns-zone/{made['id']}") is None
        assert (await boss.get(many))["data"] == []


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("provider", {"provider": "powerdns", "credentials": {"pdns_server": "http://127.0.0.1"}}),
        ("provider", {"provider": "localzone", "credentials": {"filename": "/etc/passwd"}}),
        ("provider", {"provider": "auto"}),
        ("credentials", {"credentials": {}}),
        ("credentials", {"credentials": {"auth_token": "x", "zone_id": "y"}}),
        ("credentials.auth_token", {"credentials": {"auth_token": "a\nb"}}),
        ("credentials.auth_token", {"credentials": {"auth_token": "x" * 513}}),
        ("zone", {"zone": "*.example.com"}),
        ("zone", {"zone": "com"}),
        ("zone", {"zone": "exa mple.com"}),
    ],
)
async def test_what_would_make_the_server_speak_to_others_is_refused_by_its_field(
    tmp_path: Path, field: str, given: dict[str, object]
) -> None:
    async with desk(tmp_path) as at:
        zones = DnsZoneRecords(at.store, at.clock, at.workspaces, at.master)
        asked = {"zone": "example.com", "provider": "cloudflare", "credentials": {"auth_token": "x"}, **given}
        with pytest.raises(Rejected) as refused:
            await zones.create(at.scope, actor=BOSS, **asked)  # type: ignore[arg-type]  # what a caller sends
        assert field in {one.field for one in refused.value.problems}
        assert await at.store.secret_names("proxies/dns-zone/") == []


async def test_a_zone_proves_wildcards_of_its_workspace_and_of_no_other(
    tmp_path: Path, authority: Pebble
) -> None:
    zone = ZoneFile(authority)
    with powerdns(zone, "owned.test") as options:
        async with desk(tmp_path) as at:
            made = CertificateSide(
                at.store,
                at.clock,
                at.master,
                AcmeOptions(authority=authority.options, dns_servers=[("127.0.0.1", authority.dns_port)]),
                workspaces=at.workspaces,
                vault=at.vault,
                tenant_providers={"powerdns": frozenset(options)},
            )
            at.certificates = made.certificates
            other = await at.neighbour("other")
            with pytest.raises(Rejected):
                await at.request("*.owned.test")
            await made.zones.create(at.scope, "owned.test", "powerdns", options, actor=BOSS)
            with pytest.raises(Rejected):
                await other.request("*.owned.test")
            with pytest.raises(Rejected):
                await at.request("*.disowned.test")
            issuer = made.controller._issuers["letsencrypt"]
            for scope, domain in ((other.scope, "*.owned.test"), (at.scope, "*.disowned.test")):
                with pytest.raises(IssuanceFailed, match="no DNS provider is set up"):
                    await issuer.issue(domain, scope=scope)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(run_both(made))
                try:
                    status = await at.reached(await at.request("*.owned.test"), S.ACTIVE, S.FAILED)
                finally:
                    running.cancel()
            assert (status.error, set(status.names)) == ("", {"*.owned.test", "owned.test"})
            assert zone.names() == [], "nothing is left behind"
