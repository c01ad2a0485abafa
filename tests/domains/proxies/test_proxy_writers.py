"""Organisations, access lists, certificates and settings of proxies, written through the resource API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fleet.plans_rig import PlansRig, another, plans_rig, steps

from fleetplane.domains.proxies.acme.issuers import SelfSigned
from fleetplane.domains.proxies.kinds.passwords import LOCKED, hashed
from fleetplane.domains.proxies.kinds.records import (
    ACCESS_LIST,
    CERTIFICATE,
    CONFIG_VERSION,
    ORGANIZATION,
    SETTINGS,
    UPSTREAM,
    VIRTUAL_HOST,
    AccessListSpec,
)
from fleetplane.domains.proxies.server import BLUEPRINT as PROXIES
from fleetplane.domains.proxies.typed_options import BasicUser
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import AlreadyExists

ACME, PROD = "/tenants/acme", "/tenants/acme/workspaces/prod"
ANY = {"if-match": "*"}


def made(kind: str, name: str, scope: str = PROD, **spec: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name, "scope": scope}, "spec": spec}


ORG = made("organization", "acme", ACME, displayName="Acme Inc.")
SPACE = made("workspace", "prod", ACME, displayName="Production")
CERT = made("certificate", "shop.example", provider="selfsigned", autoRenew=True)
CLIENTS = made("certificate", "clients.example", provider="imported")
LIST = made(
    "access-list",
    "office",
    rules=[{"action": "allow", "network": "10.0.0.0/8"}, {"action": "deny", "network": "all"}],
    banned=["192.0.2.0/24"],
    users=[{"name": "ann"}],
)
SITE = [
    made(
        "virtual-host",
        "shop",
        serverName="shop.example",
        listenPort=443,
        sslEnabled=True,
        certificate="shop.example",
        tls={"clientCertificates": {"authority": "clients.example"}},
        access={"accessLists": ["office"], "users": [{"name": "bob"}]},
        locations=[
            {
                "path": "/",
                "upstream": "app",
                "canaries": {"to": [{"upstream": "next", "percent": 5}], "key": "address"},
            }
        ],
    ),
    made(
        "workspace-settings", "global", nginxDirectives={"client_max_body_size": "8m"}, envVars={"A": "one"}
    ),
    made(
        "upstream",
        "app",
        algorithm="round_robin",
        servers=[{"address": "127.0.0.1:8443"}],
        protocol="https",
        tls={"authority": "clients.example", "clientCertificate": "shop.example"},
    ),
    made("upstream", "next", algorithm="round_robin", servers=[{"address": "127.0.0.1:8081"}]),
    LIST,
    CERT,
    CLIENTS,
    SPACE,
    ORG,
]


async def exported(rig: PlansRig) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await rig.call("GET", "/export")).json()["objects"]
    return found


async def test_a_whole_tenant_is_one_plan_is_exported_by_names_and_applies_elsewhere(tmp_path: Path) -> None:
    async with plans_rig(tmp_path / "one", (PROXIES,), roles=("proxies.owner",)) as rig:
        plan = await rig.plan(*SITE, owner="site")
        assert [(kind, name) for _, kind, name in steps(plan)][:2] == [
            ("organization", "acme"),
            ("workspace", "prod"),
        ]
        warned = {one["name"]: one["warnings"] for one in plan["steps"] if one["warnings"]}
        assert set(warned) == {"office", "shop", "clients.example"}
        assert not rig.store.list(ORGANIZATION)
        done = await rig.apply(plan)
        assert done.status_code == 200, done.text
        (host,) = rig.store.list(VIRTUAL_HOST)
        by_domain = {one.spec.domain: one.name for one in rig.store.list(CERTIFICATE)}
        assert host.spec.ssl_certificate_id == by_domain["shop.example"]
        assert host.spec.tls
        assert host.spec.tls.client_certificates
        assert host.spec.tls.client_certificates.authority_id == by_domain["clients.example"]
        (listed,) = rig.store.list(ACCESS_LIST)
        assert host.spec.access
        assert host.spec.access.list_ids == (listed.name,)
        upstreams = {one.spec.name: one for one in rig.store.list(UPSTREAM)}
        canaries = host.spec.locations[0].canaries
        assert canaries
        assert canaries.to[0].upstream_id == upstreams["next"].name
        tls = upstreams["app"].spec.tls
        assert tls
        assert tls.client_certificate_id == by_domain["shop.example"]
        assert [one.spec.cause for one in rig.store.list(CONFIG_VERSION)] == [
            "workspace.create",
            "config.apply",
        ]
        again = await rig.plan(*SITE, owner="site")
        assert again["summary"] == {"create": 0, "change": 0, "nothing": 9, "delete": 0}
        objects = await exported(rig)
        assert "'one'" not in str(objects)
        assert "$6$" not in str(objects)
        gone = await rig.applied(owner="site", prune=True)
        assert gone["summary"]["delete"] == 9
        assert await exported(rig) == []
        back = await rig.applied(*objects)
        assert back["summary"]["create"] == 9
        assert await exported(rig) == objects
        # What is not in the export is a secret, and only that.
        assert rig.store.list(SETTINGS)[0].spec.env_vars == {}


async def test_secrets_stay_what_they_are_and_are_set_where_they_are_taken(tmp_path: Path) -> None:
    async with plans_rig(tmp_path, (PROXIES,), roles=("proxies.owner",)) as rig:
        await rig.applied(*SITE)
        (listed,) = rig.store.list(ACCESS_LIST)
        assert [one.password_hash for one in listed.spec.users] == [LOCKED]
        known = hashed("open sesame")
        spec = AccessListSpec(name="office", users=(BasicUser(name="ann", password_hash=known),))
        await rig.rig.put(ACCESS_LIST, listed.scope, listed.name, spec=spec)
        read = await rig.call("GET", "/access-lists/office")
        assert read.json()["spec"]["users"] == [{"name": "ann", "password": {"set": True}}]
        assert known not in read.text
        more = {"spec": {"users": [{"name": "ann"}, {"name": "eve"}]}}
        patched = await rig.call("PATCH", "/access-lists/office", more, headers=ANY)
        assert patched.status_code == 200, patched.text
        (listed,) = rig.store.list(ACCESS_LIST)
        assert [one.password_hash for one in listed.spec.users] == [known, LOCKED]
        plain = {"spec": {"users": [{"name": "ann", "password": "hunter2"}]}}
        refused = await rig.call("PATCH", "/access-lists/office", plain, headers=ANY)
        assert (refused.status_code, refused.json()["field"]) == (400, "spec.users.0.password")

        settings = "/workspace-settings/global"
        for given, left in (
            ({"envVars": {"B": "two"}}, {"A": "one", "B": "two"}),
            ({"envVars": {"A": {"set": True}}}, {"A": "one", "B": "two"}),
            ({"envVars": {"A": {"set": False}}}, {"B": "two"}),
        ):
            answer = await rig.call("PATCH", settings, {"spec": given}, headers=ANY)
            assert answer.status_code == 200, answer.text
            assert "two" not in answer.text
            assert rig.store.list(SETTINGS)[0].spec.env_vars == left
        assert (await rig.call("DELETE", settings)).status_code == 204
        assert not rig.store.list(SETTINGS)
        assert rig.store.list(CONFIG_VERSION)[-1].spec.settings == ""


async def test_what_is_wrong_is_refused_with_its_field_and_nothing_is_done(tmp_path: Path) -> None:
    async with plans_rig(tmp_path, (PROXIES,), roles=("proxies.owner",)) as rig:
        await rig.applied(*SITE)
        before = rig.store.revision
        asking = [{"action": "ask", "network": "all"}]
        own = {"provider": "selfsigned"}
        for plural, body, field in (
            ("organizations", made("organization", "other", ACME), "name"),
            ("organizations", made("organization", "Bad", "/tenants/Bad"), "spec.slug"),
            ("access-lists", made("access-list", "x", rules=asking), "spec.rules.0.action"),
            ("access-lists", made("access-list", "x", banned=["nowhere"]), "spec.banned.0"),
            ("access-lists", made("access-list", "x", ruels=[]), "spec.ruels"),
            ("certificates", made("certificate", "a.example"), "spec.provider"),
            ("certificates", made("certificate", "a.example", provider="me"), "spec.provider"),
            ("certificates", made("certificate", "a.example", **own, domain="b.example"), "spec"),
            ("certificates", made("certificate", "a.example", **own, privateKey="PEM"), "spec.privateKey"),
            ("certificates", made("certificate", "*.example", provider="letsencrypt"), "spec.domain"),
            (
                "certificates",
                made("certificate", "a.example", provider="imported", autoRenew=True),
                "spec.auto_renew",
            ),
            ("workspace-settings", made("workspace-settings", "local"), "name"),
            (
                "workspace-settings",
                made("workspace-settings", "global", nginxDirectives={"no_such": "1;"}),
                "spec.nginx_directives.no_such",
            ),
        ):
            path = f"/{plural}/{body['metadata']['name']}"
            seen = ANY if body["metadata"]["name"] == "global" else {}
            answer = await rig.call("PUT", path, body, headers=seen)
            assert (answer.status_code, answer.json()["field"]) == (400, field), (path, answer.text)
        provider = {"spec": {"provider": "imported", "autoRenew": None}}
        other = await rig.call("PATCH", "/certificates/shop.example", provider, headers=ANY)
        assert other.status_code == 412 or other.status_code == 409, other.text
        for path in (
            "/certificates/shop.example",
            "/access-lists/office",
            "/workspaces/prod",
            "/organizations/acme",
        ):
            assert (await rig.call("DELETE", path)).status_code == 409, path
        assert rig.store.revision == before


async def test_tenants_are_kept_apart_and_each_change_needs_its_right(tmp_path: Path) -> None:
    async with plans_rig(tmp_path, (PROXIES,), roles=("proxies.owner",)) as rig:
        await rig.applied(*SITE)
        stranger = await another(rig, "stranger", "proxies.owner", tenant="elsewhere")
        for kind, one in (("organizations", ORG), ("access-lists", LIST), ("certificates", CERT)):
            path = f"/{kind}/{one['metadata']['name']}"
            for method in ("PUT", "DELETE"):
                body = one if method == "PUT" else None
                answer = await stranger.call(method, path, body, headers=ANY, scope=one["metadata"]["scope"])
                assert answer.status_code == 404, answer.text
        operator = await another(rig, "op", "proxies.operator", tenant="acme")
        settings = made("workspace-settings", "global", envVars={"A": "mine"})
        assert (
            await operator.call("PUT", "/workspace-settings/global", settings, headers=ANY)
        ).status_code == 403
        assert (await operator.call("PUT", "/organizations/acme", ORG, headers=ANY)).status_code == 403
        more = made("access-list", "more", rules=[{"action": "deny", "network": "all"}])
        assert (await operator.call("PUT", "/access-lists/more", more)).status_code == 201
        admin = await another(rig, "admin", "proxies.admin", tenant="acme")
        assert (await admin.call("DELETE", "/organizations/acme")).status_code == 403
        plan = await operator.plan({**more, "spec": {}})
        assert (await rig.apply(plan)).status_code == 404
        assert (await stranger.apply(plan)).status_code == 404


async def test_a_declared_certificate_is_completed_when_its_owner_imports_it(tmp_path: Path) -> None:
    async with plans_rig(tmp_path, (PROXIES,), roles=("proxies.owner",)) as rig:
        await rig.applied(ORG, SPACE, CLIENTS)
        (declared,) = rig.store.list(CERTIFICATE)
        shown = (await rig.call("GET", "/certificates/clients.example")).json()
        assert (shown["spec"]["privateKey"], shown["status"]["state"]) == ({"set": False}, "pending")
        certificates = rig.rig.api.catalogue.named("certificate").members[0].running.certificates
        material = await SelfSigned(SystemClock()).issue("clients.example")
        key = material.key_pem.decode()
        await certificates.bring(declared.scope, None, material.chain_pem, key, actor="owner")
        (completed,) = rig.store.list(CERTIFICATE)
        assert completed.name == declared.name
        answer = await rig.call("GET", "/certificates/clients.example")
        assert answer.json()["spec"]["privateKey"] == {"set": True}
        assert answer.json()["status"]["state"] == "active"
        assert rig.store.list(CONFIG_VERSION)[-1].spec.certificates.keys() == {declared.name}
        assert "PRIVATE" not in answer.text
        assert "PRIVATE" not in str(await exported(rig))
        assert (await rig.plan(CLIENTS))["summary"]["nothing"] == 1
        # Another import is another certificate, which there is already.
        with pytest.raises(AlreadyExists):
            await certificates.bring(declared.scope, None, material.chain_pem, key, actor="owner")
        assert (await rig.call("DELETE", "/certificates/clients.example")).status_code == 204
        secret = f"proxies/certificate/{declared.name}/{material.fingerprint}"
        assert await rig.store.get_secret(secret) is None


async def test_what_another_tenant_has_cannot_be_referred_to_nor_taken(tmp_path: Path) -> None:
    async with plans_rig(tmp_path, (PROXIES,), roles=("proxies.owner",)) as rig:
        await rig.applied(*SITE)
        theirs = "/tenants/other/workspaces/w"
        await rig.applied(
            made("organization", "other", "/tenants/other"),
            made("workspace", "w", "/tenants/other"),
            made("certificate", "secret.example", theirs, provider="selfsigned"),
            made("access-list", "private", theirs),
            made("upstream", "inside", theirs, algorithm="round_robin", servers=[{"address": "10.0.0.1:1"}]),
        )
        hidden = {
            "certificate": next(
                one.name for one in rig.store.list(CERTIFICATE) if one.spec.domain == "secret.example"
            ),
            "list": next(one.name for one in rig.store.list(ACCESS_LIST) if one.spec.name == "private"),
            "upstream": next(one.name for one in rig.store.list(UPSTREAM) if one.spec.name == "inside"),
        }
        owner = await another(rig, "acme", "proxies.owner", tenant="acme")
        before = rig.store.revision
        plain: dict[str, Any] = {"serverName": "x.example", "listenPort": 80}
        for spec in (
            {"listenPort": 443, "sslEnabled": True, "certificate": hidden["certificate"]},
            {"access": {"accessLists": [hidden["list"]]}},
            {"locations": [{"path": "/", "upstream": hidden["upstream"]}]},
            {"locations": [{"path": "/", "upstream": "inside"}]},
        ):
            answer = await owner.call(
                "PUT", "/virtual-hosts/x", made("virtual-host", "x", **{**plain, **spec})
            )
            assert answer.status_code == 400, answer.text
            assert "secret" not in answer.text
        # Neither there, nor from there, nor by a plan that hides it among others.
        stolen = made("certificate", "secret.example", theirs, provider="selfsigned", autoRenew=False)
        refused = await owner.call("POST", "/plans", {"objects": [LIST, stolen]})
        assert refused.status_code == 404, refused.text
        twice = await owner.call("POST", "/plans", {"objects": [LIST, LIST]})
        assert twice.status_code == 400, twice.text
        rules = [{"action": "deny", "network": "all"}] * 2000
        many = await owner.call("PUT", "/access-lists/x", made("access-list", "x", rules=rules))
        assert (many.status_code, many.json()["field"]) == (400, "spec.rules"), many.text
        huge = made("access-list", "x", banned=["10.0.0.0/8" + " " * 2_000_000])
        refused = await owner.call("PUT", "/access-lists/x", huge)
        assert (refused.status_code, len(refused.text) < 1000) == (400, True), refused.text[:500]
        assert "bytes" in refused.json()["detail"], refused.text[:500]
        assert rig.store.revision == before
