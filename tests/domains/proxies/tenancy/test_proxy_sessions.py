"""Logins: pairs, rotation, reuse, endings, and how guessing is slowed."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import time
from pathlib import Path

import httpx
import jwt
import pytest
import structlog
from support.proxies.proxy_api import ADMIN_EMAIL, ADMIN_PASSWORD, Api, rest_api

from fleetplane.domains.proxies.kinds.records import SESSION
from fleetplane.domains.proxies.tenancy import logins as proxy_logins
from fleetplane.domains.proxies.tenancy.users import FAILURES_LIMIT
from fleetplane.fleet.people.attempts.throttle import Guesses, ThrottleLimits
from fleetplane.kernel.identity.passwords import NOBODYS, PAUSE_SECONDS, LoginFailures, Passwords


async def login(api: Api, email: str = ADMIN_EMAIL, password: str = ADMIN_PASSWORD) -> httpx.Response:
    return await api.http.post("/v1/auth/login", json={"email": email, "password": password})


async def refresh(api: Api, token: str) -> httpx.Response:
    return await api.http.post("/v1/auth/refresh", json={"refresh_token": token})


async def me(api: Api, token: str) -> int:
    return (await api.http.get("/v1/auth/me", headers={"authorization": f"Bearer {token}"})).status_code


async def test_an_access_token_is_an_rs256_jwt_that_our_published_key_verifies(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        before = int(time.time())
        pair = (await login(api)).json()
        keys = jwt.PyJWKSet.from_dict((await api.http.get("/.well-known/jwks.json")).json())

        header = jwt.get_unverified_header(pair["access_token"])
        claims = jwt.decode(
            pair["access_token"], keys[header["kid"]].key, algorithms=["RS256"], audience="fleetplane/proxies"
        )

    assert (header["alg"], header["typ"]) == ("RS256", "JWT")
    assert {"iss", "aud", "sub", "iat", "nbf", "exp", "jti", "sid"} == set(claims)
    assert before + 3600 <= claims["exp"] <= time.time() + 3601


async def test_a_refresh_token_is_good_once_and_its_reuse_ends_the_session(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        first = (await login(api)).json()
        second = (await refresh(api, first["refresh_token"])).json()
        assert await me(api, second["access_token"]) == 200

        assert (await refresh(api, first["refresh_token"])).status_code == 401

        assert (await refresh(api, second["refresh_token"])).status_code == 401
        assert await me(api, second["access_token"]) == 401
        assert await me(api, api.admin.token) == 200, "another session of the same user goes on"


async def test_of_many_who_refresh_at_once_one_wins(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        pair = (await login(api)).json()
        answers = await asyncio.gather(*(refresh(api, pair["refresh_token"]) for _ in range(8)))

    assert sorted(answer.status_code for answer in answers) == [200] + [401] * 7


@pytest.mark.parametrize("change", ["flip", "short", "garbage", "empty", "other session"])
async def test_a_forged_refresh_token_is_refused_and_harms_nobody(tmp_path: Path, change: str) -> None:
    async with rest_api(tmp_path) as api:
        pair = (await login(api)).json()
        raw = bytearray(base64.urlsafe_b64decode(pair["refresh_token"] + "=="))
        match change:
            case "flip":
                raw[-1] ^= 1
            case "short":
                raw = raw[:30]
            case "garbage":
                raw = bytearray(b"\xff" * 52)
            case "empty":
                raw = bytearray()
            case "other session":
                raw[0] ^= 1
        forged = base64.urlsafe_b64encode(raw).rstrip(b"=").decode()

        assert (await refresh(api, forged)).status_code == 401
        assert (await refresh(api, pair["refresh_token"])).status_code == 200


async def test_nothing_that_opens_a_session_is_stored(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        pair = (await login(api)).json()
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("p.db*"))

    assert pair["refresh_token"].encode() not in stored
    assert ADMIN_PASSWORD.encode() not in stored
    assert b"argon2id" not in stored


async def test_logout_ends_the_access_token_too(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        assert (await api.admin.call("POST", "/auth/logout")).status_code == 204
        assert await me(api, api.admin.token) == 401


@pytest.mark.parametrize("taken_back", [{"password": "quite another one"}, {"disabled": True}, None])
async def test_who_is_being_let_in_while_that_is_taken_back_stays_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_back: dict[str, object] | None
) -> None:
    checked, go_on = asyncio.Event(), asyncio.Event()
    verify = Passwords.verify

    async def slowly(self: Passwords, user: str | None, password: str) -> str | None:
        found = await verify(self, user, password)
        checked.set()
        await go_on.wait()
        return found

    async with rest_api(tmp_path) as api:
        born = {"email": "late@example.com", "name": "Late", "password": "correct horse battery"}
        user = await api.admin.post("/users", born)
        monkeypatch.setattr(Passwords, "verify", slowly)
        login_ = asyncio.create_task(login(api, born["email"], born["password"]))
        await checked.wait()
        if taken_back is None:
            await api.admin.delete(f"/users/{user['id']}")
        else:
            await api.admin.patch(f"/users/{user['id']}", taken_back)
        go_on.set()
        assert (await login_).status_code == 401
        assert [one for one in api.store.list(SESSION) if one.spec.user == user["id"]] == []


async def test_a_new_password_ends_all_other_sessions(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        other = (await login(api)).json()
        wrong = {"current_password": "not this one", "new_password": "quite another one"}
        assert (await api.admin.call("POST", "/auth/password", wrong)).status_code == 401
        short = {"current_password": ADMIN_PASSWORD, "new_password": "short"}
        assert await api.admin.faults("POST", "/auth/password", short) == [("new_password", "OUT_OF_RANGE")]
        right = {"current_password": ADMIN_PASSWORD, "new_password": "quite another one"}
        assert (await api.admin.call("POST", "/auth/password", right)).status_code == 204

        assert await me(api, other["access_token"]) == 401
        assert await me(api, api.admin.token) == 200
        assert (await login(api)).status_code == 401
        assert (await login(api, password="quite another one")).status_code == 200


async def test_a_disabled_user_is_out_at_once(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        person = await api.person()
        await api.admin.patch(f"/users/{person.id}", {"disabled": True})

        assert await me(api, person.token) == 401
        assert await api.admin.refused("PATCH", f"/users/{api.admin.id}", {"disabled": True}) == (
            409,
            "CONFLICT",
        )


@pytest.mark.real_passwords
async def test_unknown_users_are_told_the_same_in_about_the_same_time(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        assert not api.rest._users._passwords.outdated(NOBODYS), "it must cost what every other costs"
        took: dict[str, list[float]] = {"known": [], "unknown": []}
        messages = set()
        for attempt in range(2):
            for name, email in (("known", ADMIN_EMAIL), ("unknown", f"nobody{attempt}@example.com")):
                began = time.process_time()
                answer = await login(api, email, "a wrong password")
                took[name].append(time.process_time() - began)
                error = answer.json()["error"]
                messages.add((answer.status_code, error["code"], error["message"]))

    assert len(messages) == 1
    # Hashing is tens of milliseconds; looking a user up is microseconds. Only the former may show.
    assert min(took["unknown"]) > min(took["known"]) / 3


async def test_attempts_from_one_address_are_limited_and_say_when_to_come_back(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        answers = [await login(api, password="a wrong password") for _ in range(FAILURES_LIMIT + 1)]

    assert [answer.status_code for answer in answers] == [401] * FAILURES_LIMIT + [429]
    assert int(answers[-1].headers["retry-after"]) >= 1


def test_an_account_pauses_after_too_many_failures_and_recovers() -> None:
    failures = LoginFailures(limit=FAILURES_LIMIT)
    for second in range(FAILURES_LIMIT):
        assert failures.pause_seconds("a", now=float(second)) == 0
        failures.failed("a", now=float(second))

    assert failures.pause_seconds("a", now=10.0) == PAUSE_SECONDS - 10
    assert failures.pause_seconds("b", now=10.0) == 0
    assert failures.pause_seconds("a", now=PAUSE_SECONDS + 1.0) == 0


async def test_an_account_that_pauses_stands_in_the_log_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rest_api(tmp_path) as api:
        guesses = Guesses(ThrottleLimits(per_address=100, failures=2))
        monkeypatch.setattr(api.rest._users._throttle, "_guesses", guesses)
        with structlog.testing.capture_logs() as logs:
            codes = [(await login(api, password="wrong password")).status_code for _ in range(3)]
    assert codes == [401, 401, 429]
    told = [(entry["account"], entry["seconds"]) for entry in logs if "login.paused" in entry["event"]]
    (found,) = told
    assert found[0] == ADMIN_EMAIL
    assert PAUSE_SECONDS - 60 < found[1] <= PAUSE_SECONDS


async def test_tokens_of_a_rotated_key_stay_good(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        await api.rest._logins.rotate_keys(actor="test")
        api.rest._logins._signed.clear()

        assert await me(api, api.admin.token) == 200
        assert len((await api.http.get("/.well-known/jwks.json")).json()["keys"]) == 2


@pytest.mark.parametrize("part", [0, 1, 2])
async def test_a_token_changed_anywhere_is_refused(tmp_path: Path, part: int) -> None:
    async with rest_api(tmp_path) as api:
        parts = api.admin.token.split(".")
        parts[part] = ("B" if parts[part][3] != "B" else "C").join((parts[part][:3], parts[part][4:]))
        assert await me(api, ".".join(parts)) == 401


async def test_an_unsigned_token_is_refused(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        claims = api.admin.token.split(".")[1]
        header = base64.urlsafe_b64encode(json.dumps({"alg": "none", "typ": "JWT"}).encode()).rstrip(b"=")
        assert await me(api, f"{header.decode()}.{claims}.") == 401


async def test_a_user_has_a_bounded_number_of_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_logins, "POLICY", dataclasses.replace(proxy_logins.POLICY, limit=3))
    async with rest_api(tmp_path) as api:
        user = api.rest._users.by_login(ADMIN_EMAIL)
        assert user is not None
        for _ in range(5):
            await api.rest._logins.open(user, actor="test")
        assert len(api.store.list(SESSION)) == 3
        assert await me(api, api.admin.token) == 401, "the oldest went first"


async def test_an_api_token_acts_in_its_organisation_until_it_is_revoked(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        made = await api.admin.post(
            "/api-tokens", {"organization_id": organization, "name": "ci", "role": "operator"}
        )
        program = type(api.admin)(api.http, made["token"])

        assert made["token"].startswith("nxmesh_pat_")
        assert "token" not in (await api.admin.get("/api-tokens"))["data"][0]
        assert (await program.get("/auth/me"))["organizations"] == [
            {"organization_id": organization, "role": "operator"}
        ]
        await program.post(f"/workspaces/{workspace}/agents/tokens", {"name": "a"})
        assert await program.refused("DELETE", f"/workspaces/{workspace}") == (403, "FORBIDDEN")
        assert await program.refused("POST", "/organizations", {"name": "x", "slug": "x"}) == (
            403,
            "FORBIDDEN",
        )
        await api.admin.delete(f"/api-tokens/{made['id']}")
        assert (await program.call("GET", "/auth/me")).status_code == 401


async def test_the_first_administrator_is_made_once_and_told_once(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        assert api.rest.notices == (), "a given password need not be shown"
        assert await api.rest._users.first_administrator("second@example.com", "") is None
        assert len((await api.admin.get("/users"))["data"]) == 1
