"""A POST with a key happens once, whatever becomes of the server that was asked."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.proxies.proxy_api import HOST, UPSTREAM, Api, rest_api
from support.proxies.proxy_once_victim import DIED, Crash, dies_after_writing

from fleetplane.kernel.errors import Unavailable
from fleetplane.web.rest import idempotency

KEY = {"idempotency-key": "k1"}
VICTIM = Path(__file__).parents[3] / "support" / "proxies" / "proxy_once_victim.py"

Places = tuple[str, str]
"""An organisation and a workspace in it."""
MAKING: dict[str, Callable[[Places], tuple[str, Any, str]]] = {
    "organization": lambda _: ("/organizations", {"name": "n", "slug": "new"}, "/organizations"),
    "workspace": lambda at: (
        f"/organizations/{at[0]}/workspaces",
        {"name": "n", "slug": "new"},
        f"/organizations/{at[0]}/workspaces",
    ),
    "agent": lambda at: (f"/workspaces/{at[1]}/agents/tokens", {"name": "a"}, f"/workspaces/{at[1]}/agents"),
    "virtual host": lambda at: (
        f"/workspaces/{at[1]}/virtual-hosts",
        HOST,
        f"/workspaces/{at[1]}/virtual-hosts",
    ),
    "upstream": lambda at: (f"/workspaces/{at[1]}/upstreams", UPSTREAM, f"/workspaces/{at[1]}/upstreams"),
    "certificate": lambda at: (
        f"/workspaces/{at[1]}/certificates",
        {"domain": "a.example"},
        f"/workspaces/{at[1]}/certificates",
    ),
    "API token": lambda at: ("/api-tokens", {"organization_id": at[0], "name": "t"}, "/api-tokens"),
    "user": lambda _: ("/users", {"email": "x@example.com", "password": "a long password"}, "/users"),
}
"""For each thing that can be made: where, with what, and where they are listed."""


async def total(api: Api, path: str) -> int:
    return int((await api.admin.get(path))["meta"]["total"])


@pytest.mark.parametrize("thing", MAKING)
async def test_what_was_made_before_a_crash_is_not_made_again_and_answered_as_it_would_have_been(
    tmp_path: Path, thing: str
) -> None:
    async with rest_api(tmp_path) as api:
        path, body, listed = MAKING[thing](await api.workspace())
        before = await total(api, listed)
        dies_after_writing(api)
        with pytest.raises(Crash):
            await api.admin.call("POST", path, body, headers=KEY)

    async with rest_api(tmp_path) as api:
        assert await total(api, listed) == before + 1, "it was done"
        again = await api.admin.call("POST", path, body, headers=KEY)
        assert (again.status_code, again.headers["idempotency-replayed"]) == (201, "true"), again.text
        assert await total(api, listed) == before + 1, "and is not done again"
        other = await api.admin.call("POST", path, {**body, next(iter(body)): "other"}, headers=KEY)
        assert other.status_code == 409
        told = again.json()
        identity = told.get("agent_id") or told["id"]
        assert again.headers["location"].endswith(f"/{identity}")
        rows = (await api.admin.get(listed))["data"]
        assert identity in {row["id"] for row in rows}


async def test_a_token_that_nobody_has_seen_when_the_server_died_lets_its_program_in(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        body = {"organization_id": organization, "name": "t"}
        dies_after_writing(api)
        with pytest.raises(Crash):
            await api.admin.call("POST", "/api-tokens", body, headers=KEY)

    async with rest_api(tmp_path) as api:
        token = (await api.admin.call("POST", "/api-tokens", body, headers=KEY)).json()["token"]
        answer = await api.http.get(
            f"/v1/workspaces/{workspace}", headers={"authorization": f"Bearer {token}"}
        )
    assert answer.status_code == 200


async def test_a_process_that_is_killed_between_the_two_leaves_both_or_neither(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        path, body, listed = MAKING["virtual host"](await api.workspace())
    command = [sys.executable, str(VICTIM), str(tmp_path), path, json.dumps(body), "k1"]
    died = await asyncio.to_thread(subprocess.run, command, timeout=60, check=False)
    assert died.returncode == DIED

    async with rest_api(tmp_path) as api:
        again = await api.admin.call("POST", path, body, headers=KEY)
        assert (again.status_code, again.headers.get("idempotency-replayed")) == (201, "true")
        assert await total(api, listed) == 1


async def test_a_caller_who_leaves_before_the_answer_finds_it_when_asking_again(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        path, body, listed = MAKING["upstream"](await api.workspace())
        transact, written = api.store.transact, asyncio.Event()

        async def lingering(change: Any, **said: Any) -> Any:
            done = await transact(change, **said)
            written.set()
            await asyncio.sleep(3600)
            return done

        api.store.transact = lingering  # type: ignore[method-assign]
        asking = asyncio.create_task(api.admin.call("POST", path, body, headers=KEY))
        await asyncio.wait_for(written.wait(), 60)
        asking.cancel()
        await asyncio.wait([asking])
        api.store.transact = transact  # type: ignore[method-assign]

        again = await api.admin.call("POST", path, body, headers=KEY)
        assert (again.status_code, again.headers.get("idempotency-replayed")) == (201, "true")
        assert await total(api, listed) == 1


async def test_what_failed_and_left_nothing_is_done_when_asked_again(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        path, body, listed = MAKING["upstream"](await api.workspace())
        transact = api.store.transact

        async def failing(_change: Any, **_said: Any) -> Any:
            raise Unavailable("the disk is away")

        api.store.transact = failing  # type: ignore[assignment, method-assign]
        refused = await api.admin.call("POST", path, body, headers=KEY)
        api.store.transact = transact  # type: ignore[method-assign]
        again = await api.admin.call("POST", path, body, headers=KEY)
        assert (refused.status_code, again.status_code) == (503, 201)
        assert "idempotency-replayed" not in again.headers
        assert await total(api, listed) == 1


async def test_what_is_answered_from_more_than_was_written_is_said_to_be_done_after_a_crash(
    tmp_path: Path,
) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        await api.admin.post(f"/workspaces/{workspace}/upstreams", UPSTREAM)
        path, body = f"/workspaces/{workspace}/rollback", {"version": 1}
        dies_after_writing(api)
        with pytest.raises(Crash):
            await api.admin.call("POST", path, body, headers=KEY)

    async with rest_api(tmp_path) as api:
        newest = (await api.admin.get(f"/workspaces/{workspace}/configs"))["data"][0]["version"]
        again = await api.admin.call("POST", path, body, headers=KEY)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "CONFLICT")
        assert "its outcome is unknown" in again.json()["error"]["message"]
        assert (await api.admin.get(f"/workspaces/{workspace}/configs"))["data"][0]["version"] == newest == 3


async def test_an_answer_that_was_written_with_its_effect_costs_no_transaction_of_its_own(
    tmp_path: Path,
) -> None:
    async with rest_api(tmp_path) as api:
        path, body, _ = MAKING["upstream"](await api.workspace())

        async def transactions(headers: dict[str, str], name: str) -> int:
            before = api.store.statistics().transactions
            answer = await api.admin.call("POST", path, {**body, "name": name}, headers=headers)
            assert answer.status_code == 201
            return api.store.statistics().transactions - before

        assert await transactions(KEY, "one") == await transactions({}, "two") == 1


async def test_an_answer_too_long_to_keep_is_not_given_twice_and_neither_is_it_done_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "BODY_LIMIT_BYTES", 10)
    async with rest_api(tmp_path) as api:
        path, body, listed = MAKING["upstream"](await api.workspace())
        answers: list[httpx.Response] = [
            await api.admin.call("POST", path, body, headers=KEY) for _ in range(2)
        ]
        assert [answer.status_code for answer in answers] == [201, 409]
        assert await total(api, listed) == 1


async def test_a_caller_cannot_sign_with_anothers_key(tmp_path: Path) -> None:
    """What a request says of itself is quoted where it is written down."""
    async with rest_api(tmp_path) as api:
        organization, _ = await api.workspace()
        forged = {"user-agent": "x&once=" + "0" * 64, "x-request-id": "y&ip=6.6.6.6&once=1"}
        made = await api.admin.call(
            "POST", f"/organizations/{organization}/workspaces", {"name": "n", "slug": "n"}, headers=forged
        )
        (entry, *_) = (await api.admin.get(f"/organizations/{organization}/audit-log"))["data"]
    assert made.status_code == 201
    assert entry["user_agent"] == forged["user-agent"]
    assert (entry["request_id"], entry["ip"]) == ("y&ip=6.6.6.6&once=1", "127.0.0.1")


@pytest.mark.parametrize("agent", [b"\xe9" * 500, b"%" * 500, b"plain " * 100])
async def test_a_long_user_agent_is_cut_and_never_in_the_way(tmp_path: Path, agent: bytes) -> None:
    async with rest_api(tmp_path) as api:
        organization, _ = await api.workspace()
        made = await api.admin.call(
            "POST",
            f"/organizations/{organization}/workspaces",
            {"name": "n", "slug": "n"},
            headers={**KEY, "user-agent": agent, "x-request-id": "%" * 64},  # type: ignore[dict-item]
        )
        (entry, *_) = (await api.admin.get(f"/organizations/{organization}/audit-log"))["data"]
    assert made.status_code == 201, made.text
    assert agent.decode("latin-1").startswith(entry["user_agent"])
    assert len(entry["user_agent"]) >= 50
