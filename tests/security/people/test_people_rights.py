"""What people may do ends when it is taken from them, and nobody is drawn into what they did not agree to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.proxies.proxy_api import Api, Person, rest_api

SECRETS = ("hunter2", "s3cr3t-header", "basic-secret", "db-password")


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with rest_api(tmp_path) as api:
        yield api


async def remove(api: Api, organization: str, person: Person) -> None:
    await api.admin.delete(f"/organizations/{organization}/members/{person.id}")


# Answers that are given twice.


async def test_a_kept_answer_is_not_given_to_one_who_lost_the_right_to_ask(api: Api) -> None:
    organization, _ = await api.workspace()
    member = await api.person(organization, "admin")
    body = {"organization_id": organization, "name": "ci", "role": "operator"}
    once = {"Idempotency-Key": "the-token"}
    first = await member.call("POST", "/api-tokens", body, headers=once)
    assert first.status_code == 201
    again = await member.call("POST", "/api-tokens", body, headers=once)
    assert again.headers["idempotency-replayed"] == "true"
    await remove(api, organization, member)
    refused = await member.call("POST", "/api-tokens", body, headers=once)
    assert refused.status_code == 404
    assert first.json()["token"] not in refused.text


async def test_raw_text_is_not_shown_again_to_one_who_may_write_none_any_more(api: Api) -> None:
    organization, workspace = await api.workspace()
    member = await api.person(organization, "admin")
    body = {
        "name": "Site",
        "server_name": "example.com",
        "listen_port": 80,
        "locations": [{"path": "/", "proxy_pass": "http://127.0.0.1:9000"}],
        "custom_directives": {"client_max_body_size": "10m"},
    }
    path, once = f"/workspaces/{workspace}/virtual-hosts", {"Idempotency-Key": "the-host"}
    assert (await member.call("POST", path, body, headers=once)).status_code == 201
    await api.admin.patch(f"/organizations/{organization}/members/{member.id}", {"role": "operator"})
    assert (await member.call("POST", path, body, headers=once)).status_code == 403


# Tokens of programs.


async def program(api: Api, maker: Person, organization: str, role: str = "operator") -> Person:
    made = await maker.post(
        "/api-tokens", {"organization_id": organization, "name": "ci", "role": role}, status=201
    )
    return Person(api.http, made["token"])


@pytest.mark.parametrize("end", ["removed", "disabled", "deleted"])
async def test_api_tokens_end_with_their_makers_access(api: Api, end: str) -> None:
    organization, workspace = await api.workspace()
    maker = await api.person(organization, "admin")
    token = await program(api, maker, organization, "admin")
    child = await program(api, token, organization)
    path = f"/workspaces/{workspace}/upstreams"
    for one in (token, child):
        await one.get(path)
    if end == "removed":
        await remove(api, organization, maker)
    elif end == "disabled":
        await api.admin.patch(f"/users/{maker.id}", {"disabled": True})
    else:
        await api.admin.delete(f"/users/{maker.id}")
    for one in (token, child):
        assert await one.refused("GET", path) == (401, "UNAUTHORIZED")


async def test_an_api_token_may_do_no_more_than_its_maker_may_by_now(api: Api) -> None:
    organization, workspace = await api.workspace()
    maker = await api.person(organization, "admin")
    token = await program(api, maker, organization, "admin")
    path, body = f"/workspaces/{workspace}/upstreams", {"name": "u", "servers": [{"address": "127.0.0.1:1"}]}
    await token.post(path, body)
    await api.admin.patch(f"/organizations/{organization}/members/{maker.id}", {"role": "viewer"})
    assert await token.refused("POST", path, {**body, "name": "v"}) == (403, "FORBIDDEN")
    await token.get(path)


# Consent.


async def test_nobody_belongs_to_an_organisation_before_they_agree(api: Api) -> None:
    organization, workspace = await api.workspace()
    owner = await api.person(organization, "owner")
    victim = await api.person()
    email = (await victim.get("/auth/me"))["user"]["email"]
    answer = await owner.post(
        f"/organizations/{organization}/members", {"email": email, "role": "owner"}, status=201
    )
    assert (answer["user_id"], answer["role"], answer["status"]) == (victim.id, "owner", "invited")
    assert (await victim.get("/organizations"))["data"] == []
    assert (await victim.get("/auth/me"))["organizations"] == []
    assert await victim.refused("GET", f"/workspaces/{workspace}") == (404, "NOT_FOUND")

    (invited,) = (await victim.get("/invitations"))["data"]
    assert (invited["organization_id"], invited["role"]) == (organization, "owner")
    other = await api.person()
    body = {"organization_id": organization}
    assert await other.refused("POST", "/invitations/accept", body) == (404, "NOT_FOUND")
    assert (await victim.call("POST", "/invitations/accept", body)).status_code == 204
    await victim.get(f"/workspaces/{workspace}")
    assert await victim.refused("POST", "/invitations/accept", body) == (404, "NOT_FOUND")


async def test_an_invitation_can_be_declined_and_gives_no_rights_whatever_is_changed_about_it(
    api: Api,
) -> None:
    organization, workspace = await api.workspace()
    owner, victim = await api.person(organization, "owner"), await api.person()
    email = (await victim.get("/auth/me"))["user"]["email"]
    path = f"/organizations/{organization}/members"
    await owner.post(path, {"email": email, "role": "viewer"})
    await owner.patch(f"{path}/{victim.id}", {"role": "admin"})
    assert await victim.refused("GET", f"/workspaces/{workspace}") == (404, "NOT_FOUND")
    body = {"organization_id": organization}
    assert (await victim.call("POST", "/invitations/decline", body)).status_code == 204
    assert (await victim.get("/invitations"))["data"] == []
    assert victim.id not in {one["user_id"] for one in (await owner.get(path))["data"]}


async def test_an_invited_owner_does_not_count_as_one(api: Api) -> None:
    organization, _ = await api.workspace()
    owner, invited = await api.person(organization, "owner"), await api.person()
    email = (await invited.get("/auth/me"))["user"]["email"]
    path = f"/organizations/{organization}/members"
    await owner.post(path, {"email": email, "role": "owner"})
    me = (await api.admin.get("/auth/me"))["user"]["id"]
    await owner.delete(f"{path}/{me}")
    assert await owner.refused("DELETE", f"{path}/{owner.id}") == (409, "CONFLICT")


async def test_a_system_administrators_addition_is_a_membership_at_once_as_documented(api: Api) -> None:
    organization, workspace = await api.workspace()
    user = await api.person()
    email = (await user.get("/auth/me"))["user"]["email"]
    made = await api.admin.post(f"/organizations/{organization}/members", {"email": email, "role": "viewer"})
    assert made["status"] == "active"
    await user.get(f"/workspaces/{workspace}")


# Deleting people.


async def test_an_administrator_can_always_delete_a_user(api: Api) -> None:
    organization, workspace = await api.workspace()
    user = await api.person(organization, "viewer")
    await api.admin.delete(f"/users/{user.id}")
    assert await user.refused("GET", f"/workspaces/{workspace}") == (401, "UNAUTHORIZED")
    members = (await api.admin.get(f"/organizations/{organization}/members"))["data"]
    assert user.id not in {one["user_id"] for one in members}


async def test_the_organisation_of_a_deleted_last_owner_falls_to_the_administrator(api: Api) -> None:
    founder = await api.person()
    organization, workspace = await api.workspace(founder)
    assert await api.admin.refused("GET", f"/workspaces/{workspace}") == (404, "NOT_FOUND")
    await api.admin.delete(f"/users/{founder.id}")
    await api.admin.get(f"/workspaces/{workspace}")
    (member,) = (await api.admin.get(f"/organizations/{organization}/members"))["data"]
    assert member["role"] == "owner"


# Founding.


async def test_only_administrators_found_organisations_unless_the_setting_says_otherwise(
    tmp_path: Path,
) -> None:
    async with rest_api(tmp_path, anyone_may_found=False) as api:
        user, body = await api.person(), {"name": "Mine", "slug": "mine"}
        assert await user.refused("POST", "/organizations", body) == (403, "FORBIDDEN")
        await api.admin.post("/organizations", body)


def test_founding_is_the_administrators_by_default() -> None:
    from fleetplane.domains.proxies.settings import ProxySettings

    assert ProxySettings().open_organizations is False


# Secrets in what is read.


async def secretive(api: Api) -> tuple[str, str, str, str]:
    organization, workspace = await api.workspace()
    settings = {"nginx_directives": {"client_max_body_size": "10m"}, "env_vars": {"DB": "db-password"}}
    assert (await api.admin.call("PUT", f"/workspaces/{workspace}/settings", settings)).status_code == 200
    host = await api.admin.post(
        f"/workspaces/{workspace}/virtual-hosts",
        {
            "name": "Site",
            "server_name": "example.com",
            "listen_port": 80,
            "locations": [
                {
                    "path": "/",
                    "proxy_pass": "http://127.0.0.1:9000/?token=hunter2",
                    "custom_headers": [
                        {"name": "X-Api-Key", "value": "s3cr3t-header"},
                        {"name": "X-Forwarded-For", "value": "Basic basic-secret"},
                    ],
                }
            ],
        },
    )
    agent = await api.admin.post(f"/workspaces/{workspace}/agents/tokens", {"name": "web-01"})
    return organization, workspace, host["id"], agent["agent_id"]


def paths(workspace: str, host: str, agent: str) -> tuple[str, ...]:
    return (
        f"/workspaces/{workspace}/settings",
        f"/workspaces/{workspace}/export",
        f"/workspaces/{workspace}/configs/diff?from=1",
        f"/workspaces/{workspace}/virtual-hosts",
        f"/virtual-hosts/{host}",
        f"/agents/{agent}/configs/3",
    )


async def test_viewers_read_no_secrets_in_settings_exports_versions_or_hosts(api: Api) -> None:
    organization, workspace, host, agent = await secretive(api)
    viewer = await api.person(organization, "viewer")
    operator = await api.person(organization, "operator")
    for path in paths(workspace, host, agent):
        shown = (await viewer.call("GET", path)).text
        assert [secret for secret in SECRETS if secret in shown] == [], path
        for person in (viewer, operator, api.admin):
            answer = await person.call("GET", path)
            assert answer.status_code == 200, answer.text
            assert ("db-password" in answer.text) == (person is api.admin and "virtual-hosts" not in path), (
                path
            )
    whole = (await api.admin.call("GET", f"/workspaces/{workspace}/export")).text
    assert [secret for secret in SECRETS if secret not in whole] == [], "who may change them may read them"
    edited = (await operator.call("GET", f"/virtual-hosts/{host}")).text
    assert "s3cr3t-header" in edited


async def test_a_masked_export_is_not_imported_over_the_real_values(api: Api) -> None:
    organization, workspace, _, _ = await secretive(api)
    viewer = await api.person(organization, "viewer")
    exported: dict[str, Any] = await viewer.get(f"/workspaces/{workspace}/export")
    faults = await api.admin.faults("POST", f"/workspaces/{workspace}/import", exported)
    assert ("settings.env_vars.DB", "INVALID_FORMAT") in faults
    settings = await api.admin.get(f"/workspaces/{workspace}/settings")
    assert settings["env_vars"] == {"DB": "db-password"}
