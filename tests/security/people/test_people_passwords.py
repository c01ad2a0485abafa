"""A domain's administrator does not become more than that by another account's password."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.shared.server_process import ServerProcess, running_server

from fleetplane.cli.main import run

EMAIL, PASSWORD, STOLEN = "boss@example.com", "correct horse battery", "chosen by somebody else"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ServerProcess, httpx.Client]]:
    folder = tmp_path_factory.mktemp("d")
    with (
        running_server(folder, "--set", f"proxies.admin_email={EMAIL}", admin_password=PASSWORD) as server,
        httpx.Client(timeout=60.0, base_url=server.web) as http,
    ):
        yield folder, server, http


def test_the_password_of_one_who_holds_more_is_not_a_domains_administrators_to_set(
    server: tuple[Path, ServerProcess, httpx.Client], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, http = server

    def token(name: str, role: str) -> str:
        assert run(["tokens", "create", name, "--role", role, "--data-dir", str(folder)]) == 0
        return capsys.readouterr().out.split()[-1]

    def ask(method: str, path: str, by: str, body: object = None) -> httpx.Response:
        return http.request(method, path, json=body, headers={"authorization": f"Bearer {by}"})

    def give(subject: str, role: str) -> None:
        body = {"subject": subject, "role": role, "scope": "/"}
        assert ask("POST", "/apis/v1/people/bindings", owner, body).status_code == 201

    owner, boards_admin = token("everything", "owner"), token("boards", "boards.admin")
    proxies_admin = http.post("/v1/auth/login", json={"email": EMAIL, "password": PASSWORD}).json()
    proxies_admin = proxies_admin["access_token"]
    person = {"email": "ann@example.com", "password": PASSWORD, "name": "Ann"}
    there = ask("POST", "/v1/users", proxies_admin, person).json()["id"]
    board_person = {"username": "ann", "password": PASSWORD, "role": "viewer"}
    made = ask("POST", "/api/v1/auth/register", boards_admin, board_person)
    assert made.status_code == 201, made.text
    here = next(
        one["users"]["boards"]
        for one in ask("GET", "/apis/v1/people/accounts", owner).json()["items"]
        if one["subject"] == "account/ann"
    )
    accounts = (
        ("PATCH", f"/v1/users/{there}", proxies_admin, f"proxies-user/{there}"),
        ("PUT", f"/api/v1/users/{here}", boards_admin, "account/ann"),
    )
    for method, path, admin, subject in accounts:
        assert ask(method, path, admin, {"password": PASSWORD}).status_code == 200, "it holds nothing more"
        give(subject, "admin")
        refused = ask(method, path, admin, {"password": STOLEN})
        assert refused.status_code == 403, refused.text
        assert ask(method, path, owner, {"password": PASSWORD}).status_code == 200, "an owner holds more"


def test_administrators_of_a_domain_decide_about_its_user_and_not_about_the_person(
    server: tuple[Path, ServerProcess, httpx.Client], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, http = server

    def token(name: str, role: str) -> str:
        assert run(["tokens", "create", name, "--role", role, "--data-dir", str(folder)]) == 0
        return capsys.readouterr().out.split()[-1]

    def ask(method: str, path: str, by: str, body: object = None) -> httpx.Response:
        return http.request(method, path, json=body, headers={"authorization": f"Bearer {by}"})

    def log_in(email: str, password: str = PASSWORD) -> httpx.Response:
        return http.post("/v1/auth/login", json={"email": email, "password": password})

    owner, boards_admin = token("all", "owner"), token("of-boards", "boards.admin")
    people_admin = token("of-people", "admin")
    sysadmin = log_in(EMAIL).json()["access_token"]
    # Eve is a system administrator of proxies, and looks at boards: one account, two users.
    eve = {"email": "eve@example.com", "password": PASSWORD, "is_system_admin": True}
    there = ask("POST", "/v1/users", sysadmin, eve).json()["id"]
    bound = {"subject": f"proxies-user/{there}", "role": "boards.viewer", "scope": "/tenants/default"}
    given = ask("POST", "/apis/v1/people/bindings", owner, bound)
    assert given.json()["subject"] == "account/eve@example.com", given.text
    login = http.post("/api/v1/auth/login", json={"email": "eve@example.com", "password": PASSWORD})
    assert login.json()["user"]["role"] == "viewer", login.text
    here = f"/api/v1/users/{login.json()['user']['id']}"

    # Who administers boards, or people without being an owner, does not become a system administrator.
    assert ask("PUT", here, boards_admin, {"password": STOLEN}).status_code == 403
    account = "/apis/v1/people/accounts/eve@example.com"
    refused = ask("PATCH", account, people_admin, {"password": STOLEN})
    assert (refused.status_code, refused.json()["reason"]) == (403, "PermissionDenied"), refused.text
    assert ask("DELETE", account, people_admin).status_code == 403
    raised = ask("PUT", here, boards_admin, {"role": "admin", "is_active": False})
    assert raised.json()["is_active"] is False, raised.text
    assert log_in("eve@example.com").status_code == 200, "boards close their own door alone"
    assert ask("DELETE", here, boards_admin).status_code == 204
    still = log_in("eve@example.com")
    assert ask("GET", f"/v1/users/{there}", still.json()["access_token"]).status_code == 200

    # An administrator of an organisation invites her, and decides about nothing of hers.
    founded = ask("POST", "/v1/organizations", sysadmin, {"name": "Mallory", "slug": "mallory"}).json()["id"]
    mallory = {"email": "mallory@example.com", "password": PASSWORD}
    assert ask("POST", "/v1/users", sysadmin, mallory).status_code == 201
    member = {"email": "mallory@example.com", "role": "admin"}
    assert ask("POST", f"/v1/organizations/{founded}/members", sysadmin, member).status_code == 201
    mallory_token = log_in("mallory@example.com").json()["access_token"]
    invited = {"email": "eve@example.com", "role": "viewer"}
    assert ask("POST", f"/v1/organizations/{founded}/members", mallory_token, invited).status_code == 201
    for method, path in (
        ("PATCH", f"/v1/users/{there}"),
        ("DELETE", f"/v1/users/{there}"),
        ("PATCH", account),
    ):
        body = {"password": STOLEN} if method == "PATCH" else None
        assert ask(method, path, mallory_token, body).status_code in (403, 404), path
    assert ask("DELETE", f"/v1/organizations/{founded}/members/{there}", mallory_token).status_code == 204
    assert log_in("eve@example.com").status_code == 200
    assert log_in("eve@example.com", STOLEN).status_code == 401
