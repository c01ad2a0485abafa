"""Roles at scopes hold at every surface, and nobody gives more than they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fleet.one_door import PASSWORD, SECONDS, SURFACES, Site


@pytest.mark.parametrize("directory", ["proxies", "boards", "people"])
def test_one_login_opens_every_surface_once_it_was_given_a_role(
    site: Site, owner: str, directory: str, tmp_path: Path
) -> None:
    if directory == "proxies":
        token = site.log_in()
    elif directory == "people":
        token = site.account(owner, "everywhere")
    else:
        (tmp_path / "password").write_text(PASSWORD)
        site.run("boards", "user", "add", "bea", "--password-file", str(tmp_path / "password"))
        body = {"username": "bea", "password": PASSWORD}
        login = site.http.post(f"{site.server.web}/api/v1/auth/login", json=body)
        token = login.json()["access_token"]
    subject = site.people("GET", "/whoami", token).json()["subject"]

    before = {name: ask(site, token) for name, ask in SURFACES.items()}
    given = site.give(owner, subject, "admin", "/")
    assert given.status_code == 201, given.text
    after = {name: ask(site, token) for name, ask in SURFACES.items()}
    taken = site.people("DELETE", f"/bindings/{given.json()['id']}", owner)

    assert after == dict.fromkeys(SURFACES, 200)
    assert taken.status_code == 204
    assert {name: ask(site, token) for name, ask in SURFACES.items()} == before, "it ended with the binding"


def test_one_name_and_password_is_one_person_at_the_login_of_every_family(site: Site, owner: str) -> None:
    site.account(owner, "one@example.com")
    assert site.give(owner, "account/one@example.com", "admin", "/").status_code == 201

    def log_in(path: str, field: str) -> str:
        body = {field: "one@example.com", "password": PASSWORD}
        answer = site.http.post(site.server.web + path, json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json().get("access_token") or answer.json()["accessToken"])

    tokens = (
        log_in("/apis/v1/people/login", "name"),
        log_in("/v1/auth/login", "email"),
        log_in("/api/v1/auth/login", "username"),
    )
    for token in tokens:
        assert site.people("GET", "/whoami", token).json()["subject"] == "account/one@example.com"
        assert {name: ask(site, token) for name, ask in SURFACES.items()} == dict.fromkeys(SURFACES, 200)
    listed = site.people("GET", "/accounts", owner).json()["items"]
    found = [one for one in listed if one["name"] == "one@example.com"]
    assert [sorted(one["users"]) for one in found] == [["boards", "proxies"]], "listed once"
    reset = site.people("PATCH", "/accounts/one@example.com", owner, {"password": f"{PASSWORD} 2"})
    assert reset.status_code == 200, reset.text
    assert {site.people("GET", "/whoami", token).status_code for token in tokens} == {401}


def test_a_role_at_a_tenant_holds_there_in_every_domain_and_nowhere_else(site: Site, owner: str) -> None:
    slugs = {}
    for slug in ("acme", "other"):
        made = site.ask("POST", "/v1/organizations", owner, {"name": slug, "slug": slug})
        slugs[slug] = made.json()["id"]
    token = site.account(owner, "ann")
    assert site.give(owner, "account/ann", "operator", "/tenants/acme").status_code == 201

    def status(path: str, tenant: str = "acme") -> int:
        headers = {"authorization": f"Bearer {token}", "x-tenant-id": tenant}
        return site.http.get(site.server.web + path, headers=headers).status_code

    assert status("/v1/instances/groups") == status("/v1/edge/hosts") == 200
    assert status("/v1/instances/groups", "other") == status("/v1/edge/hosts", "other") == 403
    assert status(f"/v1/organizations/{slugs['acme']}") == 200
    assert status(f"/v1/organizations/{slugs['other']}") == 404, "a stranger is told that it is not there"
    assert status("/api/v1/nodes") == 403, "boards lie in another tenant"
    assert status("/apis/v1/scopes/tenants/acme/edge-nodes") == 200
    assert status("/apis/v1/scopes/tenants/other/edge-nodes") == 404
    listed = site.ask("GET", "/v1/organizations", token).json()["data"]
    assert [one["id"] for one in listed] == [slugs["acme"]]

    site.give(owner, "account/ann", "viewer", "/tenants/default")
    assert status("/api/v1/nodes") == 200, "boards lie in the tenant default"
    assert status("/v1/edge/hosts", "default") == 200
    assert status("/v1/edge/hosts", "other") == 403
    no_tenant = site.http.get(
        f"{site.server.web}/v1/edge/hosts", headers={"authorization": f"Bearer {token}"}, timeout=SECONDS
    )
    assert no_tenant.status_code == 403, "roles of two tenants are never added up"


def test_whoami_and_can_i_tell_which_binding_gives_what(site: Site, owner: str) -> None:
    token = site.account(owner, "why")
    site.give(owner, "account/why", "operator", "/tenants/acme")

    told = site.people("GET", "/whoami", token).json()
    assert (told["name"], told["subject"]) == ("account/why", "account/why")
    origin = "account/why is bound to operator at /tenants/acme"
    assert told["roles"] == [{"role": "operator", "scope": "/tenants/acme", "origin": origin}]

    may = site.people("GET", "/can-i?verb=list&kind=edge-nodes&scope=/tenants/acme", token).json()
    assert may["allowed"] is True
    assert may["because"] == told["roles"]
    there = site.people("GET", "/can-i?verb=list&kind=edge-nodes&scope=/tenants/other", token).json()
    assert (there["allowed"], there["because"]) == (False, [])
    manages = site.people("GET", "/can-i?permission=people.manage&scope=/tenants/acme", token).json()
    assert manages["allowed"] is False
    for query in ("", "?permission=nope", "?verb=list&kind=nope", "?permission=people.read&scope=acme"):
        assert site.people("GET", f"/can-i{query}", token).status_code in (400, 404), query


def test_nobody_gives_or_takes_more_than_they_hold(site: Site, owner: str) -> None:
    admin, viewer = site.account(owner, "tenant-admin"), site.account(owner, "mere-viewer")
    site.give(owner, "account/tenant-admin", "admin", "/tenants/acme")
    site.give(owner, "account/mere-viewer", "viewer", "/tenants/acme")
    above = site.give(owner, "account/mere-viewer", "owner", "/tenants/acme").json()["id"]
    site.people("DELETE", f"/bindings/{above}", owner)
    foreign = site.give(owner, "account/someone", "viewer", "/tenants/other").json()["id"]
    owners = site.give(owner, "account/someone", "owner", "/tenants/acme").json()["id"]

    assert site.give(admin, "account/mere-viewer", "operator", "/tenants/acme").status_code == 201
    assert site.give(admin, "account/tenant-admin", "owner", "/tenants/acme").status_code == 403
    assert site.give(admin, "account/tenant-admin", "admin", "/").status_code == 403
    assert site.give(admin, "account/tenant-admin", "viewer", "/tenants/other").status_code == 404
    assert site.give(viewer, "account/mere-viewer", "admin", "/tenants/acme").status_code == 403
    assert site.people("DELETE", f"/bindings/{foreign}", admin).status_code == 404
    assert site.people("DELETE", f"/bindings/{owners}", admin).status_code == 403
    seen = site.people("GET", "/bindings", admin).json()["items"]
    assert {one["scope"] for one in seen} == {"/tenants/acme"}
    assert site.people("GET", "/bindings", viewer).status_code == 403
    for body in (("nobody", "viewer", "/"), ("account/x", "emperor", "/"), ("account/x", "viewer", "/x")):
        assert site.give(owner, *body).status_code == 400
    # Accounts belong to the installation; and a password is as good as the roles of its account.
    assert site.people("GET", "/accounts", admin).status_code == 403
    assert site.people("PATCH", "/accounts/why", admin, {"password": PASSWORD}).status_code == 403
    site.give(owner, "account/tenant-admin", "admin", "/")
    site.account(owner, "an-owner")
    site.give(owner, "account/an-owner", "owner", "/")
    refused = site.people("PATCH", "/accounts/an-owner", admin, {"password": "stolen by an admin"})
    assert refused.status_code == 403


def test_a_token_made_over_rest_ends_holds_no_more_than_its_maker_and_leaves_nothing_to_a_namesake(
    site: Site, owner: str
) -> None:
    admin = site.account(owner, "token-maker")
    site.give(owner, "account/token-maker", "admin", "/tenants/acme")
    body = {"name": "made", "roles": ["operator"], "scope": "/tenants/acme", "expiresInSeconds": 3600}
    made = site.people("POST", "/tokens", admin, body)
    assert made.status_code == 201, made.text
    token = made.json()["token"]
    assert made.json()["expiresAt"] is not None
    assert site.ask("GET", "/v1/edge/hosts", token).status_code == 200
    listed = {one["name"]: one for one in site.people("GET", "/tokens", admin).json()["items"]}
    assert "made" in listed
    assert {(one["token"], one["scope"]) for one in listed.values()} == {("", "/tenants/acme")}

    changes: tuple[dict[str, object], ...] = (
        {"roles": ["owner"]},
        {"scope": "/"},
        {"scope": "/tenants/other"},
        {"roles": []},
        {"roles": ["viewer"] * 65},
    )
    for change in changes:
        assert site.people("POST", "/tokens", admin, {**body, "name": "more", **change}).status_code in (
            400,
            403,
            404,
        )
    assert site.people("POST", "/tokens", admin, {**body, "expiresInSeconds": 0}).status_code == 400
    assert site.people("DELETE", "/tokens/everything", admin).status_code == 404, "another scope's"

    site.give(owner, "token/made", "viewer", "/tenants/default")
    assert site.people("DELETE", "/tokens/made", admin).status_code == 204
    assert site.ask("GET", "/v1/edge/hosts", token).status_code == 401
    again = site.people("POST", "/tokens", admin, body).json()["token"]
    assert [one["scope"] for one in site.people("GET", "/whoami", again).json()["roles"]] == ["/tenants/acme"]


def test_an_administrator_does_not_revoke_the_token_of_an_owner(site: Site, owner: str) -> None:
    admin = site.account(owner, "revoker")
    site.give(owner, "account/revoker", "admin", "/tenants/acme")
    body = {"roles": ["owner"], "scope": "/tenants/acme", "expiresInSeconds": 3600}
    token = site.people("POST", "/tokens", owner, {**body, "name": "owners"}).json()["token"]
    lifted = site.people("POST", "/tokens", owner, {**body, "name": "lifted", "roles": ["viewer"]}).json()
    site.give(owner, "token/lifted", "owner", "/tenants/acme")
    path = "/apis/v1/scopes/tenants/acme/tokens"
    for name in ("owners", "lifted"):
        assert site.people("DELETE", f"/tokens/{name}", admin).status_code == 403
        assert site.ask("POST", f"{path}/{name}/actions/revoke", admin).status_code == 403
    assert site.ask("GET", "/v1/edge/hosts", token).status_code == 200
    assert site.people("DELETE", "/tokens/owners", owner).status_code == 204
    assert site.ask("POST", f"{path}/lifted/actions/revoke", owner).status_code == 200
    assert site.ask("GET", "/v1/edge/hosts", lifted["token"]).status_code == 401


def test_what_was_given_at_a_place_ends_with_it_and_is_not_left_to_another_of_its_name(
    site: Site, owner: str
) -> None:
    def scopes(token: str) -> list[str]:
        return [one["scope"] for one in site.people("GET", "/whoami", token).json()["roles"]]

    def organization(slug: str) -> str:
        made = site.ask("POST", "/v1/organizations", owner, {"name": slug, "slug": slug})
        assert made.status_code == 201, made.text
        return str(made.json()["id"])

    token = site.account(owner, "former-member")
    site.give(owner, "account/former-member", "viewer", "/tenants/reused")  # at a name, before there is one
    before = site.token("before-reused", "viewer", tenant="reused")
    first = organization("reused")
    during = site.token("during-reused", "admin", tenant="reused")
    assert site.ask("GET", f"/v1/organizations/{first}", during).status_code == 200
    made = site.ask("POST", f"/v1/organizations/{first}/workspaces", owner, {"name": "p", "slug": "prod"})
    assert made.status_code == 201, made.text
    site.give(owner, "account/former-member", "admin", "/tenants/reused")
    site.give(owner, "account/former-member", "operator", "/tenants/reused/workspaces/prod")
    site.give(owner, "account/former-member", "operator", "/tenants/reused-too")
    assert len(scopes(token)) == 4

    workspace = f"/v1/workspaces/{made.json()['id']}"
    assert site.ask("PATCH", workspace, owner, {"slug": "stage"}).status_code == 200
    assert scopes(token) == ["/tenants/reused", "/tenants/reused", "/tenants/reused-too"]
    assert site.ask("DELETE", workspace, owner).status_code == 204
    assert site.ask("DELETE", f"/v1/organizations/{first}", owner).status_code == 204
    assert scopes(token) == ["/tenants/reused", "/tenants/reused-too"], "what came before it is the tenant's"
    second = organization("reused")
    assert site.ask("GET", f"/v1/organizations/{second}", during).status_code == 401
    assert "ended with the tenant" in site.people("GET", "/whoami", during).text
    after = site.token("after-reused", "admin", tenant="reused")
    for one in (before, after):
        assert site.ask("GET", f"/v1/organizations/{second}", one).status_code == 200
    path = f"/v1/organizations/{second}"
    assert site.ask("PATCH", path, token, {"name": "mine"}).status_code == 403, "it is a viewer as before"

    site.give(owner, "account/former-member", "admin", "/tenants/reused")
    assert site.ask("PATCH", path, token, {"name": "mine"}).status_code == 200
    assert site.ask("PATCH", path, owner, {"slug": "renamed"}).status_code == 200
    organization("reused")
    assert site.ask("PATCH", path, token, {"name": "again"}).status_code == 404
    assert scopes(token) == ["/tenants/reused", "/tenants/reused-too"]

    # The same through the resource API, and for clusters of boards.
    url = "/apis/v1/organizations/written"
    metadata = {"name": "written", "scope": "/tenants/written"}
    put = site.ask("PUT", url, owner, {"kind": "organization", "metadata": metadata, "spec": {}})
    assert put.status_code in (200, 201), put.text
    site.give(owner, "account/former-member", "admin", "/tenants/written")
    cluster = site.ask("POST", "/api/v1/clusters", owner, {"name": "attic"})
    assert cluster.status_code == 201, cluster.text
    site.give(owner, "account/former-member", "admin", "/tenants/default/clusters/attic")
    assert len(scopes(token)) == 4
    deleted = site.ask("DELETE", url, owner)
    assert deleted.status_code in (200, 204), deleted.text
    number = cluster.json().get("id") or cluster.json()["data"]["id"]
    assert site.ask("DELETE", f"/api/v1/clusters/{number}", owner).status_code in (200, 204)
    assert scopes(token) == ["/tenants/reused", "/tenants/reused-too"]
