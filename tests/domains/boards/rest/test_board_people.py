"""People who log in: how they get in, how they are kept out, and how it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jwt
import pytest
from support.boards.boards_rig import boards_rig
from support.boards.boards_web import BoardsWeb, Json, boards_web, good

from fleetplane.domains.boards.rest.users import ACCESS_SECONDS
from fleetplane.domains.boards.users import FAILURES_LIMIT
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.identity.passwords import PAUSE_SECONDS

PASSWORD = "correct horse battery"


class Moved(SystemClock):
    """The machine's clock, some time later."""

    def __init__(self) -> None:
        self.later_seconds = 0.0

    def now_ns(self) -> int:
        return super().now_ns() + round(self.later_seconds * 1e9)


async def person(web: BoardsWeb, name: str = "ann", role: str = "viewer", **more: Any) -> Json:
    body = {"username": name, "password": PASSWORD, "role": role, **more}
    made: Json = (await web.post("/auth/register", body))["user"]
    return made


async def login(web: BoardsWeb, name: str = "ann", password: str = PASSWORD) -> Json:
    return await web.post("/auth/login", {"username": name, "password": password}, status=200, role=None)


async def attempt(web: BoardsWeb, name: str, password: str) -> int:
    answer = await web.call("POST", "/auth/login", {"username": name, "password": password}, role=None)
    return answer.status_code


async def test_there_is_nobody_until_an_administrator_makes_someone(web: BoardsWeb) -> None:
    assert (await web.get("/users"))["users"] == []
    assert await attempt(web, "admin", "admin123") == 401
    body = {"username": "eve", "password": PASSWORD, "role": "admin"}
    assert await web.refused("POST", "/auth/register", body, role=None) == 401
    assert await web.refused("POST", "/auth/register", body, role="operator") == 403


async def test_a_login_is_answered_in_the_documented_words(web: BoardsWeb) -> None:
    made = await person(web, role="operator", email="Ann@Example.com", first_name="Ann", last_name="Lee")
    told = await login(web)
    assert (told["token_type"], told["expires_in"]) == ("Bearer", 900)
    assert set(told["user"]) == {
        "id",
        "username",
        "email",
        "role",
        "first_name",
        "last_name",
        "is_active",
        "last_login",
        "created_at",
    }
    assert told["user"]["last_login"] is not None
    claims = jwt.decode(told["access_token"], options={"verify_signature": False})
    assert (claims["user_id"], claims["role"], claims["token_type"]) == (made["id"], "operator", "access")

    assert (await login(web, "ann@example.COM"))["user"]["id"] == made["id"], "the address logs in too"
    body = {"email": "ann@example.com", "password": PASSWORD}
    await web.post("/auth/login", body, status=200, role=None)
    profile = await web.get("/auth/profile", token=told["access_token"])
    assert profile["username"] == "ann"


@pytest.mark.parametrize(
    ("role", "may"), [("viewer", (200, 403, 403)), ("operator", (200, 201, 403)), ("admin", (200, 201, 200))]
)
async def test_a_person_may_what_the_role_says(web: BoardsWeb, role: str, may: tuple[int, ...]) -> None:
    await person(web, role=role)
    token = (await login(web))["access_token"]
    asked = [("GET", "/nodes", None), ("POST", "/clusters", {"name": "c"}), ("GET", "/users", None)]
    answers = [(await web.call(method, path, body, token=token)).status_code for method, path, body in asked]
    assert tuple(answers) == may


async def test_what_they_do_is_written_down_under_their_name(web: BoardsWeb) -> None:
    await person(web, role="operator")
    token = (await login(web))["access_token"]
    await web.post("/clusters", {"name": "c"}, token=token)
    made = await web.post("/join-tokens", {}, token=token)
    assert made["created_by"] == "user/ann"


async def test_a_refresh_token_gives_access_and_is_none_itself(web: BoardsWeb) -> None:
    await person(web)
    pair = await login(web)
    told = await web.post("/auth/refresh", {"refresh_token": pair["refresh_token"]}, status=200, role=None)
    assert set(told) == {"access_token", "token_type", "expires_in"}
    await web.get("/nodes", token=told["access_token"])
    assert await web.refused("GET", "/nodes", token=pair["refresh_token"]) == 401
    wrong = {"refresh_token": pair["access_token"]}
    assert await web.refused("POST", "/auth/refresh", wrong, role=None) == 400
    assert await web.refused("POST", "/auth/refresh", {"refresh_token": "a.b.c"}, role=None) == 401


async def test_logging_out_ends_both_tokens_and_no_other_login(web: BoardsWeb) -> None:
    await person(web)
    one, two = await login(web), await login(web)
    await web.post("/auth/logout", status=200, token=one["access_token"])
    assert await web.refused("GET", "/nodes", token=one["access_token"]) == 401
    refresh = {"refresh_token": one["refresh_token"]}
    assert await web.refused("POST", "/auth/refresh", refresh, role=None) == 401
    await web.get("/nodes", token=two["access_token"])
    assert await web.refused("POST", "/auth/logout") == 400, "an operator's token is no login"


async def test_an_access_token_ends_after_a_quarter_of_an_hour(tmp_path: Path) -> None:
    clock = Moved()
    async with boards_rig(tmp_path, clock=clock) as rig, boards_web(rig) as web:
        await person(web)
        pair = await login(web)
        clock.later_seconds = ACCESS_SECONDS + 10
        assert await web.refused("GET", "/nodes", token=pair["access_token"]) == 401
        told = good(
            await web.call("POST", "/auth/refresh", {"refresh_token": pair["refresh_token"]}, role=None), 200
        )
        await web.get("/nodes", token=told["access_token"])


async def test_five_wrong_passwords_lock_an_account_for_a_quarter_of_an_hour(tmp_path: Path) -> None:
    clock = Moved()
    async with boards_rig(tmp_path, clock=clock) as rig, boards_web(rig) as web:
        await person(web)
        for _ in range(FAILURES_LIMIT):
            assert await attempt(web, "ann", "wrong") == 401
        answer = await web.call("POST", "/auth/login", {"username": "ANN", "password": PASSWORD}, role=None)
        assert answer.status_code == 429, "the right password does not help either"
        assert 0 < int(answer.headers["retry-after"]) <= PAUSE_SECONDS
        clock.later_seconds = PAUSE_SECONDS + 1
        assert await attempt(web, "ann", PASSWORD) == 200


async def test_a_name_that_nobody_has_is_locked_just_so(tmp_path: Path) -> None:
    async with boards_rig(tmp_path, clock=Moved()) as rig, boards_web(rig) as web:
        tried = [await attempt(web, "nobody", "wrong") for _ in range(FAILURES_LIMIT + 1)]
        assert tried == [401] * FAILURES_LIMIT + [429]


async def test_one_who_is_shut_out_is_out_at_once(web: BoardsWeb) -> None:
    made = await person(web)
    token = (await login(web))["access_token"]
    await web.put(f"/users/{made['id']}", {"is_active": False})
    assert await web.refused("GET", "/nodes", token=token) == 401
    assert await attempt(web, "ann", PASSWORD) == 403
    assert await attempt(web, "ann", "wrong") == 401, "only who knows the password learns of it"


async def test_another_password_ends_every_login(web: BoardsWeb) -> None:
    made = await person(web)
    token = (await login(web))["access_token"]
    await web.put(f"/users/{made['id']}", {"password": "another long password"})
    assert await web.refused("GET", "/nodes", token=token) == 401
    assert await attempt(web, "ann", PASSWORD) == 401
    await login(web, "ann", "another long password")


async def test_a_role_that_is_taken_away_is_gone_at_once(web: BoardsWeb) -> None:
    made = await person(web, role="operator")
    token = (await login(web))["access_token"]
    await web.put(f"/users/{made['id']}", {"role": "viewer"})
    assert await web.refused("POST", "/clusters", {"name": "c"}, token=token) == 403


async def test_the_last_administrator_stays(web: BoardsWeb) -> None:
    made = await person(web, role="admin")
    path = f"/users/{made['id']}"
    for body in ({"role": "viewer"}, {"is_active": False}):
        assert await web.refused("PUT", path, body) == 409
    assert await web.refused("DELETE", path) == 409
    await person(web, "bob", role="admin")
    await web.delete(path)
    assert await attempt(web, "ann", PASSWORD) == 401


async def test_names_and_addresses_are_nobody_elses(web: BoardsWeb) -> None:
    await person(web, email="ann@example.com")
    await person(web, "bob")
    for body in (
        {"username": "ANN"},
        {"username": "ann@example.com"},
        {"username": "c", "email": "ann@example.com"},
    ):
        answer = await web.call("POST", "/auth/register", {"password": PASSWORD, **body})
        assert answer.status_code in (400, 409), answer.text
    assert await web.refused("PUT", "/users/2", {"username": "ann"}) == 409


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"password": "short"}, "password"),
        ({"username": "a b"}, "username"),
        ({"role": "king"}, "role"),
        ({"email": "nobody"}, "email"),
        ({"first_name": "a\nb"}, "first_name"),
    ],
)
async def test_what_is_wrong_with_a_user_is_named(web: BoardsWeb, more: Json, field: str) -> None:
    body = {"username": "ann", "password": PASSWORD, **more}
    answer = await web.call("POST", "/auth/register", body)
    assert (answer.status_code, answer.json()["field"]) == (400, field)


async def test_passwords_and_tokens_are_nowhere_in_what_is_told(web: BoardsWeb) -> None:
    made = await person(web)
    told = await web.get("/users")
    assert "password" not in str(told)
    assert "password" not in str(made)
