"""One tenant can have only so much, is told before, and is told which setting it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.proxies.proxy_api import Api, Person, rest_api

from fleetplane.domains.proxies.kinds.records import QUOTA_NOTE, organization_scope
from fleetplane.domains.proxies.live.events import events_of
from fleetplane.domains.proxies.tenancy.quotas import QuotaOptions

SMALL = QuotaOptions(
    organizations=4,
    users=6,
    workspaces_per_organization=5,
    members_per_organization=4,
    api_tokens_per_organization=5,
    agents_per_organization=5,
    certificates_per_workspace=5,
)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with rest_api(tmp_path, quotas=SMALL) as api:
        yield api


async def refusal(person: Person, path: str, body: Any) -> str:
    answer = await person.call("POST", path, body)
    assert answer.status_code == 422, answer.text
    (problem,) = answer.json()["error"]["details"]
    assert problem["code"] == "TOO_MANY"
    return str(problem["message"])


def place(number: int) -> dict[str, str]:
    return {"name": f"Place {number}", "slug": f"place-{number}"}


async def test_everything_that_a_tenant_makes_is_bounded_and_the_refusal_names_the_setting(api: Api) -> None:
    organization, workspace = await api.workspace()
    made: list[tuple[str, Any, int, str]] = [
        ("/organizations", place, 4, "proxies.organizations"),
        (
            f"/organizations/{organization}/workspaces",
            place,
            5,
            "proxies.workspaces_per_organization",
        ),
        (
            "/api-tokens",
            lambda number: {"organization_id": organization, "name": f"t{number}", "role": "viewer"},
            5,
            "proxies.api_tokens_per_organization",
        ),
        (
            f"/workspaces/{workspace}/agents/tokens",
            lambda number: {"name": f"web-{number}"},
            5,
            "proxies.agents_per_organization",
        ),
        (
            f"/workspaces/{workspace}/certificates",
            lambda number: {"domain": f"{number}.example.com"},
            5,
            "proxies.certificates_per_workspace",
        ),
        (
            "/users",
            lambda number: {"email": f"u{number}@example.com", "password": "long enough password"},
            6,
            "proxies.users",
        ),
    ]
    for path, body, limit, setting in made:
        codes: list[int] = []
        while len(codes) <= limit:
            answer = await api.admin.call("POST", path, body(len(codes)))
            codes.append(answer.status_code)
            if answer.status_code != 201:
                break
        message = await refusal(api.admin, path, body(99))
        assert f"the most there may be; see the setting {setting}" in message
        assert f" {limit} " in message


async def test_many_at_once_do_not_slip_through_together(api: Api) -> None:
    organization, _ = await api.workspace()
    path = f"/organizations/{organization}/workspaces"
    answers = await asyncio.gather(*(api.admin.call("POST", path, place(number)) for number in range(20)))
    assert sorted(answer.status_code for answer in answers) == [201] * 4 + [422] * 16
    assert len((await api.admin.get(path))["data"]) == 5


async def test_a_tenant_is_warned_before_told_when_it_is_full_and_told_when_it_is_not(api: Api) -> None:
    organization, _ = await api.workspace()
    heard: list[str] = []

    async def listen() -> None:
        async with api.store.watch(QUOTA_NOTE, organization_scope(organization)) as watch:
            async for batch in watch:
                heard.extend(one.type for event in batch.events for one in events_of(event, None))  # type: ignore[arg-type]

    async with asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(listen())
        await asyncio.sleep(0)
        path = f"/organizations/{organization}/workspaces"
        made = [await api.admin.post(path, place(number)) for number in range(4)]
        for one in made:
            await api.admin.delete(f"/workspaces/{one['id']}")
        async with asyncio.timeout(60):
            while len(heard) < 4:
                await asyncio.sleep(0.01)
        listening.cancel()
    assert heard == ["quota.warning", "quota.reached", "quota.warning", "quota.resolved"]


async def test_members_see_what_their_organisation_uses_and_strangers_do_not(api: Api) -> None:
    organization, workspace = await api.workspace()
    viewer = await api.person(organization)
    shown = await viewer.call("GET", f"/organizations/{organization}/quotas")
    assert shown.status_code == 200
    found = {(one["quota"], one["workspace_id"]): (one["used"], one["limit"]) for one in shown.json()}
    assert found["workspaces_per_organization", None] == (1, 5)
    assert found["members_per_organization", None] == (2, 4)
    assert found["virtual_hosts_per_workspace", workspace] == (0, 500)
    stranger = await api.person()
    assert await stranger.refused("GET", f"/organizations/{organization}/quotas") == (404, "NOT_FOUND")


async def test_one_tenants_full_quota_is_not_anothers(api: Api) -> None:
    full, _ = await api.workspace()
    other, _ = await api.workspace()
    for number in range(4):
        await api.admin.post(f"/organizations/{full}/workspaces", place(number))
    await refusal(api.admin, f"/organizations/{full}/workspaces", place(9))
    await api.admin.post(f"/organizations/{other}/workspaces", place(9))
